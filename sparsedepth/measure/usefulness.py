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
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap, bootstrap_each, complete_mean, shared_resamples
from sparsedepth.measure.loss import fork_losses, relative_change
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored, per_position
from sparsedepth.measure.variance import batched
from sparsedepth.probe.fork import batches, probing, stream
from sparsedepth.probe.probed_model import ProbedModel

NEEDED_AT = {"needed_layers_10mnat": 0.01, "needed_layers_50mnat": 0.05, "needed_layers_200mnat": 0.2}
"""Columns of `runs` -> thresholds [nat/token]."""
ENOUGH_FIT_TOKENS = 16
"""Per dimension of the stream: least squares on n tokens err by D / n of the variance that they leave."""


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
    probed, scored, config, weight_N = context.probed, context.scored, context.config, context.scored.weight
    forks = [{layer: affine} for layer, affine in enumerate(fit_affine(probed, context.fit), start=1)]
    base_N2, affine_NL2 = fork_losses(probed, scored, forks, accuracy=True)
    base_N, affine_NL = base_N2[:, 0], affine_NL2[..., 0]
    estimates = shared_resamples(context.rng(), bootstrap_each)

    def relative(affine_RL: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        return relative_change(affine_RL, base_R[:, None])

    def share(affine_RL: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        increase_RL = relative(affine_RL, base_R)
        above_RL = np.where(np.isnan(increase_RL), np.nan, increase_RL > config.usefulness_threshold)
        return above_RL.mean(-1, keepdims=True)

    def count(added_RL: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
        return (per_position(added_RL, weight_R) > config.needed_threshold).sum(-1, keepdims=True)

    def mean(statistic: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        return lambda *means: statistic(*means).mean(-1, keepdims=True)

    added_NL, lost_NL = affine_NL - base_N[:, None], base_N2[:, 1:] - affine_NL2[..., 1]
    increase, added = estimates(relative, affine_NL, base_N), estimates(per_position, added_NL, weight_N)
    (useful,) = estimates(share, affine_NL, base_N)
    needed = needed_layers(added, config.needed_threshold, estimates(count, added_NL, weight_N)[0])
    rows.add_score("usefulness", useful)
    rows.add_score("usefulness_loss_increase", estimates(mean(relative), affine_NL, base_N)[0])
    rows.add_score("affine_loss_added", estimates(mean(per_position), added_NL, weight_N)[0])
    rows.add_score("affine_accuracy_lost", estimates(mean(per_position), lost_NL, weight_N)[0])
    rows.add_score("needed_layers", needed)
    rows.add_layer_scores("affine_loss_increase", increase, scored.n_scored)
    rows.add_layer_scores("affine_loss_added", added, scored.n_scored)
    rows.add_layer_scores("affine_accuracy_lost", estimates(per_position, lost_NL, weight_N), scored.n_scored)
    for percent in (2, 5, 20):
        above = share_above([block.value for block in increase], percent / 100)
        rows.summary[f"usefulness_{percent}pct"] = above
    rows.summary["effective_layers"] = None if useful.value is None else useful.value * probed.n_layers
    if needed.value is not None:
        rows.summary.update({name: count_needed(added, threshold) for name, threshold in NEEDED_AT.items()})


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


def fit_affine(probed: ProbedModel, fit_NT: Tensor) -> list[AffineUpdate]:
    """The map of each block 1..L, fitted to its input in the unmodified model, from one pass.
    Raises ValueError unless there are more than D + 1 fit tokens. Sums take 16 L D^2 bytes."""
    n_tokens, width = fit_NT.numel(), probed.stream_width
    if n_tokens <= width + 1:
        raise ValueError(
            f"{n_tokens} fit tokens do not determine an affine map of width {width}; expected more than d_model + 1 = "
            f"{width + 1}: raise fit_tokens (for released_code measure_tokens), or hold out more text"
        )
    if n_tokens < ENOUGH_FIT_TOKENS * width:
        few = f"{n_tokens} fit tokens for maps of width {width}: their own error is {width / n_tokens:.0%} of what they"
        warnings.warn(f"{few} leave; raise fit_tokens to {ENOUGH_FIT_TOKENS * width}", stacklevel=2)
    n_seen, nothing = 0, torch.zeros((), dtype=torch.float64)
    moments: list[tuple[Tensor, Tensor]] = [(nothing, nothing)] * probed.n_layers
    with probing(probed):
        for tokens_BT in batches(probed, fit_NT):
            for index, states in enumerate(itertools.pairwise(stream(probed, tokens_BT))):
                x_nD, after_nD = (state_BTD.flatten(0, 1).double() for state_BTD in states)
                moments[index] = _merged(*moments[index], n_seen, x_nD, after_nD)
            n_seen += tokens_BT.numel()
        # Directions whose variance is below D eps of the largest are dropped: rounding errors of fp32 states.
        inverses = batched(partial(torch.linalg.pinv, hermitian=True), [of_both[:, :width] for _, of_both in moments])
        maps = []
        for (mean_2D, comoment_D2D), inverse_DD in zip(moments, inverses, strict=True):
            weight_DD = inverse_DD @ comoment_D2D[:, width:]
            maps.append(AffineUpdate(mean_2D[:width].float(), weight_DD.float(), mean_2D[width:].float()))
        return maps


def _merged(
    mean_2D: Tensor, comoment_D2D: Tensor, n_seen: int, x_nD: Tensor, after_nD: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean of (x, u) and the sum over tokens of (x - mean x) (x - mean x, u - mean u), with
    further tokens merged exactly (Chan, Golub & LeVeque 1983)."""
    z_n2D = torch.cat((x_nD, after_nD - x_nD), dim=-1)
    mean_of_new_2D = z_n2D.mean(0)
    z_n2D -= mean_of_new_2D
    n_new, width = x_nD.shape
    delta_2D = mean_of_new_2D - mean_2D
    between_D2D = torch.outer(delta_2D[:width], delta_2D) * (n_seen * n_new / (n_seen + n_new))
    comoment_D2D = comoment_D2D + z_n2D[:, :width].T @ z_n2D + between_D2D
    return mean_2D + delta_2D * (n_new / (n_seen + n_new)), comoment_D2D


def jointly_needed_layers(
    probed: ProbedModel, fit_NT: Tensor, scored: Scored, threshold: float, rng: np.random.Generator
) -> BootstrapEstimate:
    """Its interval is over resamples of sequences, in the chosen order. L (L + 1) / 2 forks at most."""
    maps = fit_affine(probed, fit_NT)
    remaining, replaced = list(range(1, probed.n_layers + 1)), {}
    added_KN: list[np.ndarray] = []
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

    return bootstrap(count, np.stack(added_KN, axis=1), scored.weight, rng=rng)


def add_joint_rows(context: MeasureContext, rows: Measurements) -> None:
    threshold = context.config.needed_threshold
    found = jointly_needed_layers(context.probed, context.fit, context.scored, threshold, context.rng())
    rows.add_score("jointly_needed_layers", found)
