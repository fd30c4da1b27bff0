"""sparsedepth: which kinds of sparsity make the deep layers of a language model worth their cost?"""

__version__ = "0.1.0"
