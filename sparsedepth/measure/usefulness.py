"""Usefulness: the share of blocks that do more than an affine map could; and how many blocks a model needs.

    A_l, b_l = argmin sum over the fit tokens ||x_l - (A x_(l-1) + b)||^2
    increase(l) = (loss with block l replaced by its affine map - loss) / loss,  on other tokens
    usefulness = share of blocks with increase(l) > threshold;   effective layers = usefulness x L

Source: 2603.15389 (threshold 0.1 from its released code). The count has steps of 1/L, so further thresholds and the
mean increase are reported too; the increase with the block skipped is in `causal`. Deviates: the released code fits and
scores on the same tokens, and installs A^T for A.

Ours, in absolute units (in a model with a loss of 0.00001 a block counts as useful whose replacement costs nothing):

    added(S) = loss with the blocks S replaced by their affine maps - loss         (nat/token)
    accuracy lost(l) = accuracy - accuracy with block l replaced by its affine map
    needed layers = number of blocks with added(l) > needed_threshold and its 95% interval above 0
    needed at an equal rise: that number at .01 nat/byte x bytes per token, which no tokenizer moves
    jointly needed layers = L - the largest k such that added(S_1), ..., added(S_k) <= needed_threshold
        S_k = S_(k-1) + the block whose replacement in addition to S_(k-1) gives the lowest loss

The needed layers replace one block at a time, and so count neither of two redundant blocks: a model with spare layers
spreads its work and seems to need few of them. Of the jointly needed ones the remaining blocks suffice by construction,
so the number is an upper bound of what is needed; a search over all subsets could find fewer. Blocks are chosen, and
losses measured, on the same sequences.

The fit is least squares without ridge, in fp64, on centred data, of the block's update u: with C the covariances over
the fit tokens, x_l = x + (x - mean x) C_xx^+ C_xu + mean u. If the fit tokens span the stream this is the map above.
Directions without variance (the embeddings of a small vocabulary span few) pass unchanged; the least-norm A would set
them to 0.

Shapes: K successive replacements; 2: loss and accuracy."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.measure.bootstrap import (
    BootstrapEstimate,
    bootstrap,
    bootstrap_each,
    complete_mean,
    finites,
    ratio,
    shared_resamples,
)
from sparsedepth.measure.loss import fork_losses
from sparsedepth.measure.measurements import MeasureContext, Measurements, per_position
from sparsedepth.measure.variance import batched
from sparsedepth.probe.fork import batches, probing, stream
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities.measured import EQUAL_RISE

NEEDED_AT = {"needed_layers_10mnat": 0.01, "needed_layers_50mnat": 0.05, "needed_layers_200mnat": 0.2}
"""Columns of `runs` -> thresholds [nat/token]."""


@dataclass(frozen=True, eq=False)
class AffineUpdate:
    """x + (x - mean) weight + bias."""

    mean: Tensor
    weight: Tensor
    bias: Tensor

    def __call__(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + (x_BTD - self.mean) @ self.weight + self.bias


def add_usefulness_rows(context: MeasureContext, rows: Measurements) -> None:
    """Losses with each block replaced by its affine map: the published score, its absolute forms by layer, and needed
    layers, from one fit."""
    probed, scored, config, n_layers = context.probed, context.scored, context.config, context.probed.n_layers
    forks = [{layer: affine} for layer, affine in enumerate(fit_affine(probed, context.fit), start=1)]
    base_N2, affine_NL2 = fork_losses(probed, scored, forks, accuracy=True)
    added_NL, lost_NL = affine_NL2[..., 0] - base_N2[:, :1], base_N2[:, 1:] - affine_NL2[..., 1]

    needed_at = {"needed_layers": config.needed_threshold}
    if context.bytes_per_token is not None:
        needed_at["needed_equal_rise"] = EQUAL_RISE * context.bytes_per_token
    statistic = partial(_scores, useful_at=config.usefulness_threshold, needed_at=[*needed_at.values()])
    estimate = shared_resamples(context.rng(), bootstrap_each)
    estimates = iter(estimate(statistic, added_NL, lost_NL, base_N2[:, 0], scored.weight))
    by_layer = ("affine_loss_increase", "affine_loss_added", "affine_accuracy_lost")
    increase, added, _ = blocks = [[*islice(estimates, n_layers)] for _ in by_layer]
    for name, estimates_L in zip(by_layer, blocks, strict=True):
        rows.add_layer_scores(name, estimates_L, scored.n_scored)
    for name in ("usefulness", "usefulness_loss_increase", *by_layer[1:]):
        rows.add_score(name, next(estimates))
    for name, threshold in needed_at.items():
        rows.add_score(name, needed_layers(added, threshold, next(estimates)))
    for percent in (2, 5, 20):
        rows.summary[f"usefulness_{percent}pct"] = share_above([block.value for block in increase], percent / 100)
    useful = rows.summary["usefulness"]
    rows.summary["effective_layers"] = None if useful is None else useful * n_layers
    if rows.summary["needed_layers"] is not None:
        rows.summary.update({name: count_needed(added, threshold) for name, threshold in NEEDED_AT.items()})


def _scores(
    added_RL: np.ndarray,
    lost_RL: np.ndarray,
    base_R: np.ndarray,
    weight_R: np.ndarray,
    *,
    useful_at: float,
    needed_at: Sequence[float],
) -> np.ndarray:
    """By layer the relative increase, the loss added and the accuracy lost; the share of blocks whose increase is above
    a threshold; the mean of each; the number whose loss added is above each of the others."""
    by_layer = ratio(added_RL, base_R[:, None]), per_position(added_RL, weight_R), per_position(lost_RL, weight_R)
    increase_RL, added_RL, _ = by_layer
    useful_RL = np.where(np.isnan(increase_RL), np.nan, increase_RL > useful_at)
    n_above = ((added_RL > threshold).sum(1) for threshold in needed_at)
    return np.column_stack((*by_layer, useful_RL.mean(1), *(each_RL.mean(1) for each_RL in by_layer), *n_above))


def share_above(increases: Sequence[float | None], threshold: float) -> float | None:
    """The share of blocks whose loss increase exceeds the threshold; None if one is unknown, or there is none."""
    return complete_mean([None if increase is None else float(increase > threshold) for increase in increases])


def count_needed(added: Sequence[BootstrapEstimate], threshold: float) -> float:
    """The number of blocks that add more than the threshold, with an interval above 0."""
    return float(sum((block.value or 0.0) > threshold and (block.lo or 0.0) > 0 for block in added))


def needed_layers(
    added: Sequence[BootstrapEstimate], threshold: float, above_threshold: BootstrapEstimate
) -> BootstrapEstimate:
    """The count, with the interval of `above_threshold`, the number of blocks above the threshold,
    widened to include the count. None if a block has no interval, which takes two sequences."""
    lo, hi = above_threshold.lo, above_threshold.hi
    if lo is None or hi is None or any(block.value is None or block.lo is None for block in added):
        return dataclasses.replace(above_threshold, value=None, lo=None, hi=None)
    needed = count_needed(added, threshold)
    return dataclasses.replace(above_threshold, value=needed, lo=min(lo, needed), hi=max(hi, needed))


def fit_affine(probed: ProbedModel, fit_NT: Tensor, span: int = 1) -> list[AffineUpdate]:
    """The map of each block 1..L, or of each `span` blocks that follow each other, fitted to its input in the
    unmodified model, from one pass. Raises ValueError unless there are more than D + 1 fit tokens. Sums take 16 L D^2
    bytes."""
    n_tokens, width = fit_NT.numel(), probed.stream_width
    if n_tokens <= width + 1:
        raise ValueError(
            f"{n_tokens} fit tokens do not determine an affine map of width {width}; expected more than d_model + 1 = "
            f"{width + 1}: raise fit_tokens (for released_code measure_tokens), or hold out more text"
        )
    with probing(probed):
        origins, moments = _moments(probed, fit_NT, span)
        covariances = [moment[1:, 1:] - torch.outer(moment[1:, 0], moment[0, 1:]) for moment in moments]
        # Directions whose variance is below D eps of the largest are dropped: rounding errors of fp32 states.
        inverses = batched(partial(torch.linalg.pinv, hermitian=True), [both[:, :width] for both in covariances])
        weights = [inverse @ both[:, width:] for inverse, both in zip(inverses, covariances, strict=True)]
        at = [(origin + moment[0, 1:]).split(width) for origin, moment in zip(origins, moments, strict=True)]
        return [AffineUpdate(x.float(), weight.float(), u.float()) for (x, u), weight in zip(at, weights, strict=True)]


def _moments(probed: ProbedModel, fit_NT: Tensor, span: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of each block, or `span` of them, an origin of (x, u), and about it the means over tokens of (1, x) times
    (1, x, u)."""
    width = probed.stream_width
    origins = {}  # of (x, u): without one near their mean, differences of large sums would be lost
    sums: dict[int, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for tokens_BT in batches(probed, fit_NT):
        window = deque[Tensor](maxlen=span + 1)
        for layer, x_BTD in enumerate(stream(probed, tokens_BT)):
            window.append(x_BTD)
            if (index := layer - span) < 0:
                continue
            x_nD, after_nD = (state_BTD.flatten(0, 1).double() for state_BTD in (window[0], x_BTD))
            z_n2D = torch.cat((x_nD, after_nD - x_nD), dim=-1)
            z_nX = F.pad(z_n2D - origins.setdefault(index, z_n2D.mean(0)), (1, 0), value=1)  # (1, x, u)
            sums[index] = sums[index] + z_nX[:, : width + 1].T @ z_nX
    return [*origins.values()], [sums[index] / fit_NT.numel() for index in origins]


def add_joint_rows(context: MeasureContext, rows: Measurements) -> None:
    """The jointly needed layers, with an interval over resamples of sequences, in the chosen order. L (L + 1) / 2 forks
    at most."""
    probed, scored, threshold = context.probed, context.scored, context.config.needed_threshold
    maps = fit_affine(probed, context.fit)
    remaining, replaced = list(range(1, probed.n_layers + 1)), {}
    added_KN = []
    while remaining and (not added_KN or added_KN[-1].mean() <= threshold):
        forks = [{**replaced, layer: maps[layer - 1]} for layer in remaining]
        base_N, changed_NF = fork_losses(probed, scored, forks)
        best = int(np.nan_to_num(changed_NF.mean(0), nan=np.inf, posinf=np.inf).argmin())
        added_KN.append(changed_NF[:, best] - base_N)
        layer = remaining.pop(best)
        replaced[layer] = maps[layer - 1]

    def count(added_RK: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
        within_RK = per_position(added_RK, weight_R) <= threshold
        n_needed_R = probed.n_layers - np.logical_and.accumulate(within_RK, axis=1).sum(1)
        return np.where(np.isnan(added_RK).any(1), np.nan, n_needed_R)  # undefined if a loss is NaN

    needed = bootstrap(count, np.stack(added_KN, axis=1), scored.weight, rng=context.rng())
    rows.add_score("jointly_needed_layers", needed)


def add_span_rows(context: MeasureContext, rows: Measurements) -> None:
    """Two blocks replaced by one map: the first is left out, and the second is the map from its input."""
    if context.probed.n_layers < 2:
        return
    maps = fit_affine(context.probed, context.fit, span=2)
    forks = [{layer - 1: None, layer: affine} for layer, affine in enumerate(maps, start=2)]
    base_N, changed_NF = fork_losses(context.probed, context.scored, forks)
    added_NF, weight = changed_NF - base_N[:, None], context.scored.weight
    score = bootstrap(lambda *means: per_position(*means).mean(1), added_NF, weight, rng=context.rng())
    rows.add_score("span_loss_added", score)
    rows.add_layers("span_loss_added", finites(added_NF.mean(0)), context.scored.n_scored, first=2)
