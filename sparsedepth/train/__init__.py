"""From a config and batches to trained weights and curves, exactly resumable."""

import sparsedepth

sparsedepth.make_callable(__name__)
