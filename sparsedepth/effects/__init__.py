"""Settings against the baseline, with intervals."""

import sparsedepth

sparsedepth.make_callable(__name__)
