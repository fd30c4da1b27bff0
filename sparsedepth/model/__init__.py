"""The decoder, its experts' kernels, and what it costs."""
