"""The batch of a step, as a pure function of corpus, seed and step; and windows of held-out text.

The training tokens are cut into chunks of chunk_len (plus one token, the last target). Epoch e visits chunk

    p_(seed, e)(0), p_(seed, e)(1), ...      p_(seed, e) a permutation of all chunks

and step t takes the next batch_tokens / chunk_len of them, across epochs if needed. Each chunk is cut into windows of
seq_len. So no state is carried from step to step, and runs that differ only in seq_len, at one chunk_len, predict
exactly the same tokens in each step. Documents are concatenated and windows may span several (separated by the
end-of-document id), as in the papers' training data.

Shapes: B windows of a batch, K chunks of a batch, N windows of held-out text, T = seq_len.
"""

import math

import numpy as np

from sparsedepth.config.run import RunConfig
from sparsedepth.data.shards import Corpus, nothing_left


def batch(corpus: Corpus, config: RunConfig, step: int) -> np.ndarray:
    """Ids of step `step` (from 0), int64 [B, T + 1]: inputs are [:, :-1], targets [:, 1:]; B = batch_tokens // T.
    Raises ValueError if the training text is shorter than one batch."""
    chunk_len = config.chunk_len or config.seq_len
    n_chunks = (len(corpus.train) - 1) // chunk_len
    per_step = config.batch_tokens // chunk_len
    if n_chunks < per_step:
        told = f"the training text has {len(corpus.train):,} tokens: {n_chunks:,} chunks of {chunk_len:,} (and one)"
        needed = f"a step of batch_tokens={config.batch_tokens:,} reads {per_step:,}"
        raise ValueError(f"{told}, and {needed}; use a longer corpus or a smaller batch_tokens")
    chunk_K = step_indices(n_chunks, per_step, config.seed, step)
    start_B = (chunk_K[:, None] * chunk_len + np.arange(0, chunk_len, config.seq_len)).reshape(-1)
    return _windows(corpus.train, start_B, config.seq_len)


def step_indices(n: int, per_step: int, seed: int, step: int) -> np.ndarray:
    """The indices, below n, that step `step` reads, int64 [per_step]: each once per epoch, shuffled in each epoch."""
    epoch_K, place_K = np.divmod(step * per_step + np.arange(per_step), n)
    return np.concatenate([shuffled(place_K[epoch_K == epoch], n, seed, int(epoch)) for epoch in np.unique(epoch_K)])


def held_out(corpus: Corpus, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> np.ndarray:
    """Windows of the held-out text from token `skip_tokens` on, int64 [N, T + 1], N = n_tokens // T (fewer at its end).
    Windows do not overlap: disjoint ranges predict disjoint tokens. Raises ValueError if not even one window fits."""
    assert skip_tokens >= 0
    available = len(corpus.val) - 1 - skip_tokens  # the last token has no target
    n_windows = min(n_tokens, available) // seq_len
    if n_windows < 1:
        held_out_text = f"the held-out text has {len(corpus.val):,}"
        raise nothing_left(f"window of seq_len={seq_len:,}", n_tokens, skip_tokens, held_out_text)
    return _windows(corpus.val, skip_tokens + np.arange(n_windows) * seq_len, seq_len)


def _windows(ids: np.ndarray, start_B: np.ndarray, seq_len: int) -> np.ndarray:
    return ids[start_B[:, None] + np.arange(seq_len + 1)].astype(np.int64)


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
