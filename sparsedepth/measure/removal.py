"""Layer removal: what the loss pays for leaving out a block, or a contiguous range of blocks.

    drop(i, j) = (loss without blocks i..j - loss) / loss,   1 <= i <= j <= L
    score = mean of drop(i, i) over the L single blocks;   range score = mean over the ranges of two blocks and more

Sources: single layers 2502.05795 (performance drop; there in downstream accuracy, here in loss), ranges 2403.17887.
Below 0 where the loss is lower without the blocks. Single blocks are always removed; with `n_ranges` the longer ranges
are a random sample without replacement.

Shapes: N sequences, P ranges, R resamples.
"""

from dataclasses import dataclass

import numpy as np

from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap, finite
from sparsedepth.measure.loss import fork_losses, relative_change
from sparsedepth.measure.scored import Scored
from sparsedepth.probe.fork import MAX_TOKENS, Fork
from sparsedepth.probe.stack import Stack


@dataclass(frozen=True, kw_only=True)
class Removal:
    drops: dict[tuple[int, int], float | None]
    """by (first, last) removed layer; (l, l) is the single block l"""
    by_layer: list[float | None]
    """drop(l, l) for l = 1..L"""
    score: BootstrapEstimate
    """over single blocks"""
    range_score: BootstrapEstimate
    """over the ranges of two blocks and more; None if there is none. The interval leaves out the choice of ranges"""
    n_tokens: int


def removal(
    stack: Stack, scored: Scored, rng: np.random.Generator, n_ranges: int | None = None, max_tokens: int = MAX_TOKENS
) -> Removal:
    """The loss without each single block, and without each of the longer ranges or `n_ranges` of them."""
    singles = [(layer, layer) for layer in range(1, stack.n_layers + 1)]
    longer = choose_ranges(stack.n_layers, n_ranges, rng)
    forks = [skip_range(first, last) for first, last in (*singles, *longer)]
    base_N, removed_NP = fork_losses(stack, scored, forks, max_tokens)
    drops = [finite(drop) for drop in relative_change(removed_NP.mean(0), base_N.mean())]
    seed = int(rng.integers(2**63))  # one set of resamples for both scores

    def score(removed_NK: np.ndarray) -> BootstrapEstimate:
        return bootstrap(_mean_drop, removed_NK, base_N, rng=np.random.default_rng(seed))

    return Removal(
        drops=dict(zip((*singles, *longer), drops, strict=True)),
        by_layer=drops[: stack.n_layers],
        score=score(removed_NP[:, : stack.n_layers]),
        range_score=score(removed_NP[:, stack.n_layers :]),
        n_tokens=scored.n_scored,
    )


def skip_range(first: int, last: int) -> Fork:
    """Leave blocks first..last out: x'_last = x_(first-1)."""
    return Fork(dict.fromkeys(range(first, last + 1)))


def choose_ranges(n_layers: int, n_ranges: int | None, rng: np.random.Generator) -> list[tuple[int, int]]:
    """All ranges of two layers and more in order, or `n_ranges` at random without replacement (all, if fewer exist)."""
    layers = range(1, n_layers + 1)
    ranges = [(first, last) for first in layers for last in layers if first < last]
    if n_ranges is None or n_ranges >= len(ranges):
        return ranges
    return [ranges[index] for index in np.sort(rng.choice(len(ranges), n_ranges, replace=False))]


def _mean_drop(removed_RK: np.ndarray, base_R: np.ndarray) -> np.ndarray:
    if removed_RK.shape[1] == 0:
        return np.full(len(base_R), np.nan)
    return relative_change(removed_RK, base_R[:, None]).mean(-1)
