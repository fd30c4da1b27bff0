"""Variations of the plain decoder, each a small class; `table` has them in their order."""
