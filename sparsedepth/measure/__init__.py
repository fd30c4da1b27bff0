"""Measures: a model and tokens in, values by column name or a small record out."""

import sparsedepth

sparsedepth.make_callable(__name__)
