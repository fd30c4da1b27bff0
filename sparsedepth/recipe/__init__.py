"""From rows to a recipe: chosen, graded, tested on what it has not seen, and laid beside the literature."""

import sparsedepth

sparsedepth.make_callable(__name__)
