"""From rows to a recipe: derived, graded, tested on held-out runs, and compared with the literature."""

import sparsedepth

sparsedepth.make_callable(__name__)
