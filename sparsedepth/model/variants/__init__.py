"""Variations of the plain decoder, each a small class beside it; `table` has them in their
order."""
