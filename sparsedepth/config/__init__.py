"""What a run and a sweep are: validated values, read from YAML that can neither import nor run anything."""
