"""What to run, and at what price: rows and configs only, never torch."""

import sparsedepth

sparsedepth.make_callable(__name__)
