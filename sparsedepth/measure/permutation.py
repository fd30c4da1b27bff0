"""Permutation score: how much the order of blocks matters.

    effect(a, b) = |loss with blocks a and b swapped - loss| / loss,   a < b
    score = mean of effect(a, b) over the pairs

The blocks in between stay in place. 0: blocks are interchangeable; high: each has its own role (2603.15389; a plot
title of its released code says the opposite).

Neighbours only, a control of ours: most pairs are far apart, and swapping them also moves both blocks to depths they
were not trained at. Neighbours isolate the order of computation, and need L - 1 swaps, so all are run where other pairs
are sampled.

Noise raises absolute values, and resamples add the same noise again: their mean exceeds the score by about as much as
the score exceeds its truth. So the interval's lower end is lowered by twice that.

With `n_pairs` the mean is over a sample of pairs, systematic in order of a and random within an a: every pair is
equally likely, and each first layer, on which the effect depends most, is represented. The interval then includes the
sampling of pairs: mean exp(-+ z r), r the relative standard error of the sampled mean, sqrt(1 - n/M) sd / (sqrt(n)
mean) for n of M pairs; on a log scale, as effects are positive and skewed.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap, finites, mean_of_last
from sparsedepth.measure.loss import fork_losses, relative_change
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored
from sparsedepth.probe.fork import swap
from sparsedepth.probe.probed_model import ProbedModel

Z_PAIRS = 2.8
"""Half-width in standard errors. 1.96 suffices for the mean of many values; for 16 to 50 with a skew
like exp(normal), whose standard deviation is uncertain too, 2.8 covers 95% (simulated in the tests)."""


@dataclass(frozen=True, kw_only=True)
class PermutationEffect:
    effects: dict[tuple[int, int], float | None]
    """by pair of layers a < b, from 0"""
    score: BootstrapEstimate
    """None for a single block. The interval is over sequences, and over sampled pairs"""


def permutation_effect(
    probed: ProbedModel,
    scored: Scored,
    rng: np.random.Generator,
    n_pairs: int | None = None,
    *,
    neighbours: bool = False,
) -> PermutationEffect:
    """The relative change of the loss with each pair of blocks swapped, or only `neighbours`."""
    n_layers = probed.n_layers
    pairs = [*itertools.pairwise(range(1, n_layers + 1))] if neighbours else choose_pairs(n_layers, n_pairs, rng)
    base_N, swapped_NP = fork_losses(probed, scored, [swap(*pair) for pair in pairs])

    def mean_effect(swapped_RP: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        return mean_of_last(np.abs(relative_change(swapped_RP, base_R[:, None])))

    score = bootstrap(mean_effect, swapped_NP, base_N, rng=rng)
    if score.lo is not None:
        score = replace(score, lo=max(0.0, score.lo - 2 * max(score.excess, 0.0)))
    effects = np.abs(relative_change(swapped_NP.mean(0), base_N.mean()))
    if not neighbours:
        score = _with_pair_sampling(score, effects, math.comb(n_layers, 2))
    return PermutationEffect(effects=dict(zip(pairs, finites(effects), strict=True)), score=score)


def choose_pairs(n_layers: int, n_pairs: int | None, rng: np.random.Generator) -> list[tuple[int, int]]:
    """All pairs of layers a < b in order, or `n_pairs` at random without replacement (all, if fewer exist)."""
    pairs = list(itertools.combinations(range(1, n_layers + 1), 2))
    if n_pairs is None or n_pairs >= len(pairs):
        return pairs
    shuffled = np.lexsort((rng.random(len(pairs)), np.array([a for a, _ in pairs])))  # by a, at random within it
    places = (np.arange(n_pairs) + rng.random()) * len(pairs) / n_pairs
    return [pairs[index] for index in np.sort(shuffled[places.astype(int)])]


def _with_pair_sampling(score: BootstrapEstimate, effects: np.ndarray, n_all: int) -> BootstrapEstimate:
    """Combine the independent intervals over sequences and pairs: distances from the value add as squares."""
    if score.value is None or len(effects) == n_all:
        return score
    lo, hi = pair_interval(effects, n_all)
    if score.lo is None or score.hi is None or math.isnan(lo):
        return replace(score, lo=None, hi=None)
    below = math.hypot(score.value - score.lo, score.value - lo)
    above = math.hypot(score.hi - score.value, hi - score.value)
    return replace(score, lo=max(0.0, score.value - below), hi=score.value + above)


def pair_interval(effects: np.ndarray, n_all: int) -> tuple[float, float]:
    """The 95% interval of the mean over all `n_all` pairs, from a sample of them; NaN for a single pair."""
    n, mean = len(effects), effects.mean()
    if n < 2:
        return math.nan, math.nan
    if mean == 0:
        return 0.0, 0.0
    relative_error = math.sqrt((1 - n / n_all) / n) * effects.std(ddof=1) / mean
    return mean * math.exp(-Z_PAIRS * relative_error), mean * math.exp(Z_PAIRS * relative_error)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    n_pairs = context.config.permutation_pairs
    found = permutation_effect(context.probed, context.scored, context.rng(), n_pairs)
    rows.add_score("permutation_score", found.score)
    rows.add_pairs("permutation_effect", found.effects, context.scored.n_scored)


def add_neighbour_rows(context: MeasureContext, rows: Measurements) -> None:
    found = permutation_effect(context.probed, context.scored, context.rng(), neighbours=True)
    rows.add_score("permutation_neighbours", found.score)
