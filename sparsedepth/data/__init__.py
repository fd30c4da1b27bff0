"""Text to tokens, once; tokens to batches, as a pure function of corpus, seed and step."""
