"""Sentences and tables: pure functions from a record to text. Nothing is computed here; records come from the parts
that compute them, whose types are imported for the checker alone."""
