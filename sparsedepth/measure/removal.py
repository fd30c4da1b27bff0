"""Layer removal: the loss and accuracy lost by leaving out a block, or a contiguous range of blocks.

    drop(i, j) = (loss without blocks i..j - loss) / loss,   1 <= i <= j <= L
    accuracy lost(i, j) = accuracy - accuracy without blocks i..j, at scored positions
    score = mean of drop(i, i) over the L single blocks;   range score = mean over the longer ranges
    cosine correlation = Spearman's over blocks of drop(l, l) with 1 - E_tokens cos(x_l, x_(l-1))

Sources: single layers 2502.05795 (performance drop; there in downstream accuracy: `evaluate --without`), ranges
2403.17887. Negative if the model is better without the blocks. Pruning often uses the similarity of a block's input and
output in place of its drop; the correlation tests this (2605.14075: poorly). Single blocks are always removed; with
`n_ranges` the longer ranges are a sample.

Shapes: P ranges.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, finite, finites, mean_of_last, shared_resamples
from sparsedepth.measure.loss import fork_losses, relative_change
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored, position_mean
from sparsedepth.probe.fork import batches, probing, stream, token_count
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, kw_only=True)
class Removal:
    drops: dict[tuple[int, int], float | None]
    """by (first, last) removed layer; (l, l) is the single block l"""
    accuracy_lost: dict[tuple[int, int], float | None]
    cosine_correlation: float | None
    """None for fewer than three blocks, or if all are equal"""
    scores: dict[str, BootstrapEstimate]
    """removal_score and removal_accuracy_lost over single blocks; removal_range_score, None without
    a longer range, whose interval ignores the sampling of ranges"""


def removal(probed: ProbedModel, scored: Scored, rng: np.random.Generator, n_ranges: int | None = None) -> Removal:
    """The loss without each block, and without all longer ranges or `n_ranges` of them."""
    n_layers = probed.n_layers
    ranges = [*((layer, layer) for layer in range(1, n_layers + 1)), *choose_ranges(n_layers, n_ranges, rng)]
    forks = [dict.fromkeys(range(first, last + 1)) for first, last in ranges]
    base_N2, removed_NP2 = fork_losses(probed, scored, forks, accuracy=True)
    base_N, removed_NP = base_N2[:, 0], removed_NP2[..., 0]
    drops = finites(relative_change(removed_NP.mean(0), base_N.mean()))
    lost_NP = base_N2[:, 1:] - removed_NP2[..., 1]
    estimate, lost_N = shared_resamples(rng), lost_NP[:, :n_layers].mean(1)

    def mean_drop(removed_RK: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        return mean_of_last(relative_change(removed_RK, base_R[:, None]))

    return Removal(
        drops=dict(zip(ranges, drops, strict=True)),
        accuracy_lost=dict(zip(ranges, lost_NP.mean(0).tolist(), strict=True)),
        cosine_correlation=rank_correlation(drops[:n_layers], block_influence(probed, scored.inputs)),
        scores={
            "removal_score": estimate(mean_drop, removed_NP[:, :n_layers], base_N),
            "removal_range_score": estimate(mean_drop, removed_NP[:, n_layers:], base_N),
            "removal_accuracy_lost": position_mean(lost_N, scored.weight, estimate),
        },
    )


def block_influence(probed: ProbedModel, tokens_NT: Tensor) -> list[float]:
    """1 - E cos(x_l, x_(l-1)) of blocks 1..L, in one pass without the head."""
    sums = np.zeros(probed.n_layers)
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT):
            for place, (before, after) in enumerate(itertools.pairwise(stream(probed, tokens_BT))):
                sums[place] += torch.cosine_similarity(before, after, dim=-1).sum(dtype=torch.float64).item()
    return (1 - sums / token_count(tokens_NT)).tolist()


def rank_correlation(x: Sequence[float | None], y: Sequence[float | None]) -> float | None:
    """Spearman's; None with fewer than three values, a missing one, or all equal."""
    from scipy.stats import spearmanr  # takes half a second, so imported where needed

    values = np.array([x, y], dtype=float)
    if values.shape[1] < 3 or not np.isfinite(values).all() or (np.ptp(values, axis=1) == 0).any():
        return None
    return finite(spearmanr(*values).statistic)


def choose_ranges(n_layers: int, n_ranges: int | None, rng: np.random.Generator) -> list[tuple[int, int]]:
    """All ranges of two or more layers in order, or `n_ranges` at random without replacement (at most all)."""
    ranges = list(itertools.combinations(range(1, n_layers + 1), 2))
    if n_ranges is None or n_ranges >= len(ranges):
        return ranges
    return [ranges[index] for index in np.sort(rng.choice(len(ranges), n_ranges, replace=False))]


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    found = removal(context.probed, context.scored, context.rng(), context.config.removal_ranges)
    for name, estimate in found.scores.items():
        rows.add_score(name, estimate)
    rows.summary["removal_cosine_correlation"] = found.cosine_correlation
    rows.add_pairs("removal_drop", found.drops, context.scored.n_scored)
    rows.add_pairs("removal_accuracy_lost", found.accuracy_lost, context.scored.n_scored)
