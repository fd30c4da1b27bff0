"""Measures: a model and tokens in, numbers by column name out, as rows.

Shapes in all files: N and B sequences, T tokens of one sequence, n tokens of a batch, D width of the residual stream,
V vocabulary, L layers (L1 = L + 1 states), R resamples; each file names its other letters."""

import sparsedepth

sparsedepth.make_callable(__name__)
