"""Measures: a stack and tokens in, a frozen record with its sample size out."""
