"""Loss of n-gram counts on the held-out positions: a model must beat these to be worth measuring.

    p(y)     = (c(y) + 1) / (n + V)                      unigram, add-one
    p(y | x) = (c(x, y) + m p(y)) / (c(x) + m)           bigram, interpolated; m the best of STRENGTHS held out

For text, c counts exactly the tokens that a run trained on, of pairs those of answers, and x is the previous token. For
a task, x is the position and its difficulty, and c counts CHANCE_POSITIONS further held-out ones: chance is the loss
of knowing only how often each answer occurs there. m favours the counts.

Shapes: n positions, U distinct pairs (x, y) of the held-out positions, V vocabulary, C contexts."""

from collections.abc import Callable

import numpy as np

from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Counted, Sequences, Source, after_tokens, next_tokens

STRENGTHS = (1, 10, 100, 1000)
"""m: weight of the unigram, in counts"""

MOST_COUNTED = 2**24
"""Training tokens counted for a model whose own are not known, and before a sweep."""


def ngram_losses(source: Source, config: RunConfig, tick: Callable[[], None] = lambda: None) -> dict[str, float | None]:
    """unigram_loss and bigram_loss of a text, chance_loss of a task, on the held-out positions of val_loss.
    Reads every batch of the run once more (about 20 ns a token); `tick` is called in between."""
    return losses_of(source.counted(config), tick)


def losses_ahead(source: Source, config: RunConfig) -> dict[str, float | None]:
    """Of the text of a run, before it is trained: of at most MOST_COUNTED of its tokens."""
    return ngram_losses(source, config.model_copy(update={"train_tokens": min(config.train_tokens, MOST_COUNTED)}))


def after_tokens_of_text(held_out: Sequences, ids: np.ndarray, vocab_size: int) -> Counted:
    """What is counted of another text: the first MOST_COUNTED ids of its training part."""
    n = min(len(ids), MOST_COUNTED) - 1
    parts = (next_tokens(np.asarray(ids[i : min(i + 2**16, n) + 1], np.int64)[None]) for i in range(0, n, 2**16))
    return after_tokens(held_out, parts, vocab_size)


def losses_of(counted: Counted, tick: Callable[[], None] = lambda: None) -> dict[str, float | None]:
    """The two losses of the counted pairs, nat/token, in the columns that they are of; None in the others, and in all
    if nothing was counted."""
    from pandas import Index  # slow to import, and no other part of training needs it

    def pairs(part: Sequences) -> tuple[np.ndarray, np.ndarray]:
        scored_NT = part.targets != IGNORED
        return counted.context(part)[scored_NT], part.targets[scored_NT]

    vocab_size = counted.vocab_size
    x_n, y_n = pairs(counted.held_out)
    pair_U, held_out_U = np.unique(x_n * vocab_size + y_n, return_counts=True)
    place_of = Index(pair_U).get_indexer
    by_pair_U, by_context_C, by_target_V = (np.zeros(n, int) for n in (len(pair_U), counted.n_contexts, vocab_size))
    for part in counted.trained:
        tick()
        x_n, y_n = pairs(part)
        by_context_C += np.bincount(x_n, minlength=counted.n_contexts)
        by_target_V += np.bincount(y_n, minlength=vocab_size)
        place_n = place_of(x_n * vocab_size + y_n) + 1  # 0 for a pair that does not occur
        by_pair_U += np.bincount(place_n, minlength=len(pair_U) + 1)[1:]

    x_U, y_U = np.divmod(pair_U, vocab_size)
    unigram_U = (by_target_V[y_U] + 1) / (by_target_V.sum() + vocab_size)
    bigrams = ((by_pair_U + m * unigram_U) / (by_context_C[x_U] + m) for m in STRENGTHS)
    share_U = held_out_U / held_out_U.sum()
    unigram, *bigram = (float(-(share_U * np.log(p_U)).sum()) for p_U in (unigram_U, *bigrams))
    losses: dict[str, float | None] = dict.fromkeys(("unigram_loss", "bigram_loss", "chance_loss"))
    if not by_target_V.any():
        return losses
    return losses | {name: loss for name, loss in zip(counted.columns, (unigram, min(bigram)), strict=True) if name}
