"""Sequences with their targets, the door to the source of a run's, and the order in which training reads them.

Each kind of corpus (`config.corpus`) is a module, whose KIND opens a source of sequences. Text and pairs are first
made into files of ids (`data.pipeline`): their KIND has texts and an encoder.

Shapes: N sequences, T tokens of one sequence, S = T + 1 tokens with the last target, K places of the order."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparsedepth.config.corpus import TASK, corpus_name
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.quantities.quantity import Named


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    inputs: np.ndarray
    """inputs_NT, int64"""
    targets: np.ndarray
    """targets_NT, int64; IGNORED where not scored"""
    difficulty: np.ndarray | None = None
    """difficulty_NT, int64, of a task at scored positions (what it counts: docs/sweeps.md); None for text"""

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice) -> "Sequences":
        difficulty = None if self.difficulty is None else self.difficulty[rows]
        return Sequences(inputs=self.inputs[rows], targets=self.targets[rows], difficulty=difficulty)

    @property
    def n_tokens(self) -> int:
        """Number of positions, scored or not."""
        return self.targets.size

    @property
    def n_scored(self) -> int:
        return int((self.targets != IGNORED).sum())


ReadHeldOut = Callable[[int, int, int], Sequences]
"""(seq_len, n_tokens, skip_tokens) -> at most n_tokens held-out tokens after the first skip_tokens."""


def next_tokens(tokens_NS: np.ndarray) -> Sequences:
    """Text: every position is scored, and its target is the next token."""
    return Sequences(inputs=tokens_NS[:, :-1], targets=tokens_NS[:, 1:])


class Counted(NamedTuple):
    """What `data.ngram_losses` counts of a source: pairs (context x, target y) of the scored positions."""

    held_out: Sequences
    trained: Iterable[Sequences]
    context: Callable[[Sequences], np.ndarray]
    """sequences -> context_NT, below n_contexts"""
    n_contexts: int
    vocab_size: int
    columns: tuple[str | None, str | None]
    """which columns of `runs` are the losses of unigram and bigram"""


def after_tokens(held_out: Sequences, trained: Iterable[Sequences], vocab_size: int) -> Counted:
    """Each target after its token."""
    return Counted(held_out, trained, lambda part: part.inputs, vocab_size, vocab_size, ("unigram_loss", "bigram_loss"))


class Source(Protocol):
    """Sequences for training, and held-out ones, which training never sees."""

    @property
    def bytes_per_token(self) -> float | None:
        """Of held-out text; None where a token is not a piece of running text."""
        return None

    @property
    def eod(self) -> int | None:
        """The token that ends a document; None without documents."""
        return None

    @property
    def data_hash(self) -> str:
        """12 hex digits: equal if and only if the sequences are."""

    @property
    def facts(self) -> Named:
        """What a run records."""

    def batch(self, config: RunConfig, step: int) -> Sequences:
        """batch_tokens // seq_len of them, a pure function of source, seed and step. Raises ValueError if too few."""

    def held_out(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Sequences:
        """n_tokens // seq_len of them after the first `skip_tokens` tokens, fewer at the end: disjoint for disjoint
        ranges. Raises ValueError if there is none."""

    def counted(self, config: RunConfig) -> Counted:
        """The pairs that `data.ngram_losses` counts."""


def data_kind(corpus: str) -> Any:
    """The kind of a corpus; its module is imported when it is first used."""
    kind = corpus_name(corpus).kind
    return import_module(f"sparsedepth.data.{'tasks.stream' if kind is TASK else kind.name}").KIND


def check_files(corpus: str) -> None:
    """Raises ValueError for a corpus of local files that are missing or empty."""
    if corpus_name(corpus).origin == "files":
        data_kind(corpus).check(corpus)


def open_source(config: RunConfig, root: Path, tokenizer: Tokenizer | None = None) -> Source:
    """The source of a run; text is tokenised once under `root`, with the given tokenizer if the model from which
    training starts learned it. Raises ValueError for a corpus that cannot be used."""
    return data_kind(config.corpus).open(config, root, tokenizer)


def check_one_sequence(n_tokens: int, seq_len: int) -> None:
    """Raises ValueError for fewer tokens than one sequence."""
    if n_tokens < seq_len:
        raise ValueError(f"{n_tokens:,} tokens are less than one sequence of seq_len={seq_len:,}; raise the number")


def step_indices(n: int, per_step: int, seed: int, step: int) -> np.ndarray:
    """The indices, below n, that step `step` reads, int64 [per_step]: each once per epoch, shuffled in each epoch."""
    epoch_K, place_K = np.divmod(step * per_step + np.arange(per_step), n)
    return np.concatenate([shuffled(place_K[epoch_K == epoch], n, seed, int(epoch)) for epoch in np.unique(epoch_K)])


def shuffled(place_K: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation p_(seed, epoch) of 0..n-1 applied to each place, int64 [K]; memory does not grow with n.

    A Feistel network on pairs (x, y) of Z_a x Z_b, a * b just over n, each half changed in turn by a hash of the other;
    results of n or more are permuted again until below n (cycle walking: Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains")."""
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
