"""Any decoder as a stack of blocks, and interventions as forks of its residual stream."""
