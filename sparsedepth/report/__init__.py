"""The report: results folders as one HTML file."""

import sparsedepth

sparsedepth.make_callable(__name__)
