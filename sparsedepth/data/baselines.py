"""Loss of n-gram counts on the held-out positions: a model must beat these to be worth measuring.

    p(y)     = (c(y) + 1) / (n + V)                      unigram, add-one
    p(y | x) = (c(x, y) + m p(y)) / (c(x) + m)           bigram, interpolated; m the best of STRENGTHS held out

For text, c counts exactly the tokens that a run trained on, and x is the previous token; for prompts and answers only
those of answers. For a task, x is the position in the sequence and its difficulty, and c counts CHANCE_POSITIONS fresh
training positions: chance is the loss of knowing only how often each answer occurs there; for images, how often each
class does. m favours the counts: a model that loses to them has learnt less than the text's pairs of tokens.

Shapes: n positions, U distinct pairs (x, y) of the held-out positions, V vocabulary, C contexts.
"""

from collections.abc import Callable, Iterator

import numpy as np

from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.images import ImageSource
from sparsedepth.data.sequences import Sequences
from sparsedepth.data.source import Source
from sparsedepth.data.tasks.stream import TaskSource

STRENGTHS = (1, 10, 100, 1000)
"""m: weight of the unigram, in counts"""

CHANCE_POSITIONS = 2**18

DENSE = 2**24
"""Pairs (x, y) up to which a lookup table is used, else bisection."""

Context = Callable[[Sequences], np.ndarray]
"""sequences -> context_NT"""


class PairCounts:
    """Training counts of the pairs (x, y) that occur in the held-out positions."""

    def __init__(self, x_n: np.ndarray, y_n: np.ndarray, n_contexts: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.pairs_U, self.held_out_U = np.unique(x_n * vocab_size + y_n, return_counts=True)
        self.by_pair_U = np.zeros(len(self.pairs_U), dtype=np.int64)
        self.by_context_C = np.zeros(n_contexts, dtype=np.int64)
        self.by_target_V = np.zeros(vocab_size, dtype=np.int64)
        self._index_of_pair: np.ndarray | None = None
        if n_contexts * vocab_size <= DENSE:
            self._index_of_pair = np.full(n_contexts * vocab_size, len(self.pairs_U), dtype=np.int32)
            self._index_of_pair[self.pairs_U] = np.arange(len(self.pairs_U))

    def add(self, x_n: np.ndarray, y_n: np.ndarray) -> None:
        """Count training positions."""
        self.by_context_C += np.bincount(x_n, minlength=len(self.by_context_C))
        self.by_target_V += np.bincount(y_n, minlength=self.vocab_size)
        pair_n = x_n * self.vocab_size + y_n
        if self._index_of_pair is not None:
            index_n = self._index_of_pair[pair_n]
        else:
            index_n = np.searchsorted(self.pairs_U, pair_n)
            missing_n = self.pairs_U[np.minimum(index_n, len(self.pairs_U) - 1)] != pair_n
            index_n[missing_n] = len(self.pairs_U)
        self.by_pair_U += np.bincount(index_n, minlength=len(self.pairs_U) + 1)[:-1]

    def losses(self) -> tuple[float, float]:
        """Losses of unigram and bigram, nat/token, on the held-out positions."""
        x_U, y_U = np.divmod(self.pairs_U, self.vocab_size)
        n = self.by_target_V.sum()
        unigram_U = (self.by_target_V[y_U] + 1) / (n + self.vocab_size)
        context_count_U = self.by_context_C[x_U]
        share_U = self.held_out_U / self.held_out_U.sum()
        pair_losses = [
            -(share_U * np.log((self.by_pair_U + m * unigram_U) / (context_count_U + m))).sum() for m in STRENGTHS
        ]
        return float(-(share_U * np.log(unigram_U)).sum()), float(min(pair_losses))


def baselines(source: Source, config: RunConfig, tick: Callable[[], None] = lambda: None) -> dict[str, float | None]:
    """unigram_loss and bigram_loss of a text, chance_loss of a task or images, on the held-out positions of val_loss.

    Reads every batch of the run once more (about 10 ns a token); `tick` is called in between.
    """
    held_out = source.held_out(config.seq_len, config.val_tokens)
    if isinstance(source, ImageSource):
        label_n = held_out.targets[held_out.targets != IGNORED]
        counts = PairCounts(np.zeros_like(label_n), label_n, 1, config.vocab_size)
        counts.add(np.zeros_like(source.train_classes), source.train_classes)
        return {"unigram_loss": None, "bigram_loss": None, "chance_loss": counts.losses()[0]}
    if not isinstance(source, TaskSource):
        steps = (source.batch(config, step) for step in range(config.n_steps))
        unigram, bigram = _losses(lambda part: part.inputs, held_out, steps, config.vocab_size, config.vocab_size, tick)
        return {"unigram_loss": unigram, "bigram_loss": bigram, "chance_loss": None}
    assert held_out.difficulty is not None
    levels = int(held_out.difficulty.max()) + 1

    def position_and_difficulty(part: Sequences) -> np.ndarray:
        assert part.difficulty is not None
        return np.arange(part.inputs.shape[1]) * levels + np.minimum(part.difficulty, levels - 1)

    steps = _until_enough(source.batch(config, step) for step in range(2**31))
    _, chance = _losses(position_and_difficulty, held_out, steps, config.seq_len * levels, config.vocab_size, tick)
    return {"unigram_loss": None, "bigram_loss": None, "chance_loss": chance}


def _losses(
    context: Context,
    held_out: Sequences,
    steps: Iterator[Sequences],
    n_contexts: int,
    vocab_size: int,
    tick: Callable[[], None],
) -> tuple[float, float]:
    counts = PairCounts(*_scored_pairs(context, held_out), n_contexts, vocab_size)
    for part in steps:
        tick()
        counts.add(*_scored_pairs(context, part))
    return counts.losses()


def _scored_pairs(context: Context, part: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """x_n and y_n at scored positions."""
    scored_NT = part.targets != IGNORED
    return context(part)[scored_NT], part.targets[scored_NT]


def _until_enough(steps: Iterator[Sequences]) -> Iterator[Sequences]:
    seen = 0
    for part in steps:
        yield part
        seen += part.n_scored
        if seen >= CHANCE_POSITIONS:
            return
