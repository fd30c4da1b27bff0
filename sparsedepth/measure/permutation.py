"""Permutation score: how much it matters which block stands where.

    effect(a, b) = |loss with blocks a and b swapped - loss| / loss,   a < b
    score = mean of effect(a, b) over the pairs

The blocks in between stay in place. 0: the blocks are interchangeable; high: each has its own task (2603.15389;
a plot title of its released code says the contrary). With `n_pairs` the mean is over a random sample of the
pairs, drawn without replacement.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparsedepth.measure.bootstrap import Estimate, bootstrap, finite
from sparsedepth.measure.loss import fork_losses, relative_change
from sparsedepth.probe.fork import MAX_TOKENS, swap
from sparsedepth.probe.stack import Stack


@dataclass(frozen=True, kw_only=True)
class PermutationEffect:
    effects: dict[tuple[int, int], float | None]
    """by pair of layers a < b, from 0"""
    score: Estimate
    """None for a single block. The interval is over sequences: it leaves out the choice of pairs"""
    n_tokens: int


def permutation_effect(
    stack: Stack, tokens_NS: Tensor, rng: np.random.Generator, n_pairs: int | None = None, max_tokens: int = MAX_TOKENS
) -> PermutationEffect:
    """The loss with each pair of blocks swapped, against the loss; S = T + 1 tokens with the last target."""
    pairs = choose_pairs(stack.n_layers, n_pairs, rng)
    base_N, swapped_NP = fork_losses(stack, tokens_NS, [swap(*pair) for pair in pairs], max_tokens)
    effects = np.abs(relative_change(swapped_NP.mean(0), base_N.mean()))
    return PermutationEffect(
        effects={pair: finite(effect) for pair, effect in zip(pairs, effects, strict=True)},
        score=bootstrap(_score, swapped_NP, base_N, rng=rng),
        n_tokens=tokens_NS[:, 1:].numel(),
    )


def choose_pairs(n_layers: int, n_pairs: int | None, rng: np.random.Generator) -> list[tuple[int, int]]:
    """All pairs of layers a < b in order, or `n_pairs` of them at random without replacement (all, if fewer exist)."""
    pairs = list(itertools.combinations(range(1, n_layers + 1), 2))
    if n_pairs is None or n_pairs >= len(pairs):
        return pairs
    return [pairs[index] for index in np.sort(rng.choice(len(pairs), n_pairs, replace=False))]


def _score(swapped_RP: np.ndarray, base_R: np.ndarray) -> np.ndarray:
    if swapped_RP.shape[1] == 0:
        return np.full(len(base_R), np.nan)
    return np.abs(relative_change(swapped_RP, base_R[:, None])).mean(-1)
