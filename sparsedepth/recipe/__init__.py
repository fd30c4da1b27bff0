"""From rows to a recipe: derived, graded, and tested on held-out runs."""

import sparsedepth

sparsedepth.make_callable(__name__)
