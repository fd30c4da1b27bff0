"""Random numbers of a task: a counter-based generator, so any block of a stream can be drawn without the earlier ones.

Philox (Salmon et al. 2011) with the key (task, stream) and the counter (block, 0, 0, 0) x 2^64. Only its raw bits are
used, which NumPy keeps stable across releases."""

import math

import numpy as np


class Draws:
    """One block of a stream."""

    def __init__(self, task: int, stream: int, block: int = 0):
        key, counter = (np.array(words, dtype=np.uint64) for words in ([task, stream], [0, block, 0, 0]))
        self._bits = np.random.Philox(key=key, counter=counter)

    def below(self, n: int | np.ndarray, *shape: int) -> np.ndarray:
        """Integers 0..n-1, int64, each with probability 1/n to within 2^-32; `n` may differ by place."""
        size = math.prod(shape)
        bits = self._bits.random_raw((size + 1) // 2).view(np.uint32)[:size].astype(np.uint64).reshape(shape)
        return ((bits * np.uint64(n)) >> np.uint64(32)).astype(np.int64)

    def permutations(self, n_rows: int, n: int) -> np.ndarray:
        """Permutations of 0..n-1, one a row, int64."""
        return self._bits.random_raw(n_rows * n).reshape(n_rows, n).argsort(axis=1)
