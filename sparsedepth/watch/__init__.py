"""Measures in somebody's own training loop: `sparsedepth.watch(model, tokens, every=1000, out=..., ...)`."""

import sparsedepth

sparsedepth.make_callable(__name__)
