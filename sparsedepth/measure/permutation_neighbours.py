"""Permutation score over neighbours alone: does a block care whether it runs before or after the next one?

    effect(l) = |loss with blocks l and l + 1 swapped - loss| / loss,   l = 1..L-1;   score = mean over l

`permutation` takes the mean over all pairs (2603.15389), most of them far apart: such a swap also moves both blocks to
a depth they were not trained at. Neighbours isolate the order of computation, and cost L - 1 swaps rather than
L (L - 1) / 2, so they are all run where the pairs of `permutation` are sampled. Ours, as a control.

Shapes: N sequences, R resamples.
"""

from dataclasses import dataclass

import numpy as np

from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap, finite
from sparsedepth.measure.context import MeasureContext
from sparsedepth.measure.loss import fork_losses, relative_change
from sparsedepth.measure.permutation import mean_effect
from sparsedepth.measure.rows import Measurements
from sparsedepth.measure.scored import Scored
from sparsedepth.probe.fork import MAX_TOKENS, swap
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, kw_only=True)
class NeighbourPermutation:
    by_layer: list[float | None]
    """effect(l) for l = 1..L-1, from 0"""
    score: BootstrapEstimate
    """None for a single block"""
    n_tokens: int


def permutation_neighbours(
    probed: ProbedModel, scored: Scored, rng: np.random.Generator, max_tokens: int = MAX_TOKENS
) -> NeighbourPermutation:
    """The loss with each two neighbouring blocks swapped, against the loss."""
    forks = [swap(layer, layer + 1) for layer in range(1, probed.n_layers)]
    base_N, swapped_NP = fork_losses(probed, scored, forks, max_tokens)
    effects = np.abs(relative_change(swapped_NP.mean(0), base_N.mean()))
    return NeighbourPermutation(
        by_layer=[finite(effect) for effect in effects],
        score=bootstrap(mean_effect, swapped_NP, base_N, rng=rng),
        n_tokens=scored.n_scored,
    )


def add_rows(context: MeasureContext, made: Measurements) -> None:
    result = permutation_neighbours(context.probed, context.scored, context.rng(), context.max_tokens)
    made.add_score("permutation_neighbours", result.score)
