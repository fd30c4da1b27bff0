"""The order in which training reads: a permutation for each epoch, a pure function of seed and epoch.

Shapes: K places.
"""

import math

import numpy as np


def step_indices(n: int, per_step: int, seed: int, step: int) -> np.ndarray:
    """The indices, below n, that step `step` reads, int64 [per_step]: each once per epoch, shuffled in each epoch."""
    epoch_K, place_K = np.divmod(step * per_step + np.arange(per_step), n)
    return np.concatenate([shuffled(place_K[epoch_K == epoch], n, seed, int(epoch)) for epoch in np.unique(epoch_K)])


def shuffled(place_K: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation p_(seed, epoch) of 0..n-1 applied to each place, int64 [K]; memory does not grow with n.

    A Feistel network on pairs (x, y) of Z_a x Z_b, a * b just over n, each half changed in turn by a hash of the other;
    results of n or more are permuted again until below n (cycle walking: Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains").
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)
    image_K = place_K.astype(np.uint64)
    pending_K = np.ones(len(image_K), dtype=bool)
    while pending_K.any():
        x, y = np.divmod(image_K[pending_K], np.uint64(b))
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            x = (x + _mix(y, first) % np.uint64(a)) % np.uint64(a)
            y = (y + _mix(x, second) % np.uint64(b)) % np.uint64(b)
        image_K[pending_K] = x * np.uint64(b) + y
        pending_K = image_K >= n
    return image_K.astype(np.int64)


def _mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A 64-bit hash of x with a key: the finaliser of SplitMix64 (Steele, Lea and Flood 2014), twice."""
    for _ in range(2):
        x = x ^ key
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x
