"""A sweep on a cluster, by the cluster's own engine."""
