"""Loss of n-gram counts on the held-out positions: a model must beat these to be worth measuring.

    p(y)     = (c(y) + 1) / (n + V)                      unigram, add-one
    p(y | x) = (c(x, y) + m p(y)) / (c(x) + m)           bigram, interpolated; m the best of STRENGTHS held out

For text, c counts exactly the tokens that a run trained on, of pairs those of answers, and x is the previous token. For
a task, x is the position and its difficulty, and c counts CHANCE_POSITIONS fresh training positions: chance is the loss
of knowing only how often each answer occurs there; for images, how often each class does. m favours the counts.

Shapes: n positions, U distinct pairs (x, y) of the held-out positions, V vocabulary, C contexts.
"""

from collections.abc import Callable

import numpy as np

from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Counted, Sequences, Source, after_tokens, next_tokens

STRENGTHS = (1, 10, 100, 1000)
"""m: weight of the unigram, in counts"""

MOST_COUNTED = 2**24
"""Training tokens counted for a model whose own are not known, and before a sweep."""


class PairCounts:
    """Training counts of the pairs (x, y) that occur in the held-out positions."""

    def __init__(self, x_n: np.ndarray, y_n: np.ndarray, n_contexts: int, vocab_size: int):
        from pandas import Index  # slow to import, and no other part of training needs it

        self.vocab_size = vocab_size
        self.pairs_U, self.held_out_U = np.unique(x_n * vocab_size + y_n, return_counts=True)
        self.place_of = Index(self.pairs_U).get_indexer
        self.by_pair_U = np.zeros(len(self.pairs_U), dtype=np.int64)
        self.by_context_C = np.zeros(n_contexts, dtype=np.int64)
        self.by_target_V = np.zeros(vocab_size, dtype=np.int64)

    def add(self, x_n: np.ndarray, y_n: np.ndarray) -> None:
        """Count training positions."""
        self.by_context_C += np.bincount(x_n, minlength=len(self.by_context_C))
        self.by_target_V += np.bincount(y_n, minlength=self.vocab_size)
        place_n = self.place_of(x_n * self.vocab_size + y_n) + 1  # 0 for a pair that does not occur
        self.by_pair_U += np.bincount(place_n, minlength=len(self.pairs_U) + 1)[1:]

    def losses(self) -> tuple[float, float]:
        """Losses of unigram and bigram, nat/token, on the held-out positions."""
        x_U, y_U = np.divmod(self.pairs_U, self.vocab_size)
        unigram_U = (self.by_target_V[y_U] + 1) / (self.by_target_V.sum() + self.vocab_size)
        share_U, context_U = self.held_out_U / self.held_out_U.sum(), self.by_context_C[x_U]
        bigrams = ((self.by_pair_U + m * unigram_U) / (context_U + m) for m in STRENGTHS)
        return float(-(share_U * np.log(unigram_U)).sum()), min(
            float(-(share_U * np.log(p_U)).sum()) for p_U in bigrams
        )


def ngram_losses(source: Source, config: RunConfig, tick: Callable[[], None] = lambda: None) -> dict[str, float | None]:
    """unigram_loss and bigram_loss of a text, chance_loss of a task or images, on the held-out positions of val_loss.
    Reads every batch of the run once more (about 20 ns a token); `tick` is called in between."""
    return losses_of(source.counted(config), config.vocab_size, tick)


def table_text(source: Source, config: RunConfig) -> str:
    """What a bigram table reaches on the text of a run, before it is trained: of at most MOST_COUNTED of its tokens."""
    counted = config.model_copy(update={"train_tokens": min(config.train_tokens, MOST_COUNTED)})
    loss = ngram_losses(source, counted)["bigram_loss"]
    return f"a bigram table of the training text reaches {loss:.4g} nat/token; a worse model is no evidence about depth"


def losses_of_text(ids: np.ndarray, held_out: Sequences, vocab_size: int) -> dict[str, float | None]:
    """unigram_loss and bigram_loss from the first MOST_COUNTED ids of a text's training part."""
    n = min(len(ids), MOST_COUNTED) - 1
    parts = (next_tokens(np.asarray(ids[i : min(i + 2**16, n) + 1], np.int64)[None]) for i in range(0, n, 2**16))
    return losses_of(after_tokens(held_out, parts, vocab_size), vocab_size)


def losses_of(counted: Counted, vocab_size: int, tick: Callable[[], None] = lambda: None) -> dict[str, float | None]:
    def pairs(part: Sequences) -> tuple[np.ndarray, np.ndarray]:
        scored_NT = part.targets != IGNORED
        return counted.context(part)[scored_NT], part.targets[scored_NT]

    counts = PairCounts(*pairs(counted.held_out), counted.n_contexts, vocab_size)
    for part in counted.trained:
        tick()
        counts.add(*pairs(part))
    losses: dict[str, float | None] = dict.fromkeys(("unigram_loss", "bigram_loss", "chance_loss"))
    return losses | {name: loss for name, loss in zip(counted.columns, counts.losses(), strict=True) if name}
