"""Sequences that a small model learns in a few steps."""

import numpy as np

from sparsedepth.data.sequences import Sequences, next_tokens


def counting(step: int) -> Sequences:
    """Sequences that count upwards modulo 12 from a start drawn by step: learnable, and a function of step alone."""
    start = np.random.default_rng(step).integers(0, 12, (4, 1))
    return next_tokens((start + np.arange(9)) % 12)
