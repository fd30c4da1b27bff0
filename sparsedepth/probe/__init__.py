"""Any decoder as blocks on one residual stream, and interventions as forks of that stream.

Shapes in all files: B sequences, T tokens, D width of the residual stream, H query heads, G key/value heads, K head
width, F hidden units, E experts, C experts chosen per token, V vocabulary."""
