"""The depth law: how loss falls with width, depth and data."""

import sparsedepth

sparsedepth.make_callable(__name__)
