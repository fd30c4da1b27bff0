"""Points that are not independent: a random effect for each cluster on ln L, fitted by generalised least squares.

    ln L_n = law(x_n) + u_c + e_n,      u_c ~ N(0, s_u^2) shared by the points of cluster c,      e_n ~ N(0, s_e^2)

Least squares of r_n - (1 - sqrt(1 - lambda_c)) mean_c r is the maximum likelihood at given variances, with

    lambda_c = k_c s_u^2 / (k_c s_u^2 + s_e^2),      k_c points in the cluster

Shapes: N points, C clusters.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ClusterEffect:
    index: np.ndarray
    """The cluster of each point, from 0, (N,)."""
    between: float = 0.0
    """s_u: standard deviation of ln L between clusters, about the law."""
    within: float = 1.0
    """s_e."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """k_c, (C,)."""
        return np.bincount(self.index)

    @cached_property
    def members(self) -> np.ndarray:
        """1 where a point is in a cluster, (N, C)."""
        return (self.index[:, None] == np.arange(len(self.sizes))).astype(float)

    def whitened(self, values: np.ndarray) -> np.ndarray:
        """Values of the points, (N,) or (N, P), less the share of their cluster's mean."""
        if self.between == 0:
            return values
        shared_C = self.sizes * self.between**2
        share_C = 1 - np.sqrt(1 - shared_C / (shared_C + self.within**2))
        mean_C = values.T @ self.members / self.sizes
        return values - (share_C * mean_C)[..., self.index].T


def cluster_effect(index_N: np.ndarray, residual_N: np.ndarray, n_free: int) -> ClusterEffect:
    """The variances from residuals, by the method of moments (analysis of variance). Parameters reduce the degrees of
    freedom between clusters, since width and depth do not vary within one."""
    k_C = np.bincount(index_N)
    mean_C = np.bincount(index_N, weights=residual_N) / k_C
    n, n_clusters = len(index_N), len(k_C)
    if n == n_clusters:  # the two variances cannot be separated
        return ClusterEffect(index=index_N, within=float(np.sqrt((residual_N**2).sum() / max(1, n - n_free))))
    within = float(((residual_N - mean_C[index_N]) ** 2).sum()) / (n - n_clusters)
    between = float((k_C * mean_C**2).sum()) / max(1, n_clusters - n_free)
    k_mean = (n - float((k_C**2).sum()) / n) / max(1, n_clusters - 1)
    return ClusterEffect(
        index=index_N, between=float(np.sqrt(max(0.0, between - within) / k_mean)), within=float(np.sqrt(within))
    )
