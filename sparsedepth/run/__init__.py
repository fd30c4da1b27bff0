"""One run: trained, measured and published by the one process that holds its lease."""
