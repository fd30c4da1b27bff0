"""Usefulness: the share of blocks that do more than an affine map could.

    A_l, b_l = argmin sum over the fit tokens ||x_l - (A x_(l-1) + b)||^2
    increase(l) = (loss with block l replaced by its affine map - loss) / loss,   on tokens not used for the fit
    usefulness = share of blocks with increase(l) > threshold;   effective layers = usefulness x L

Source: 2603.15389 (threshold 0.1 from its released code). The count has steps of 1/L, so further thresholds and the
mean increase are reported too; the increase with the block skipped (identity instead of a map) is in `causal`. Ours, in
absolute units, since in a model with a loss of 0.00001 a block counts as useful whose replacement costs nothing:

    added(l) = loss with block l replaced by its affine map - loss              (nat/token)
    accuracy lost(l) = accuracy - accuracy with block l replaced by its affine map
    needed layers = number of blocks with added(l) > needed_threshold and its 95% interval above 0

Deviates: the released code fits and scores on the same tokens, and installs the transposed map (A^T for A).

The fit is least squares without ridge, in fp64, on centred data, of the block's update u = x_l - x_(l-1): with C the
covariances over the fit tokens, x_l = x + (x - mean x) C_xx^+ C_xu + mean u. If the fit tokens span the stream this is
the map above. Directions without variance (the embeddings of a small vocabulary span few) pass unchanged; the
least-norm A would set them to 0.

Shapes: N and B sequences, T tokens, n tokens, D width of the residual stream, L layers, R resamples, E statistics; 2:
loss and accuracy.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.run import MeasureConfig
from sparsedepth.measure.bootstrap import BootstrapEstimate, bootstrap_each, complete_mean
from sparsedepth.measure.loss import fork_scores, relative_change
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored, per_position
from sparsedepth.measure.spectra import pseudo_inverses
from sparsedepth.probe.fork import batches, probing, replace, stream
from sparsedepth.probe.probed_model import ProbedModel

NEEDED_AT = {"needed_layers_10mnat": 0.01, "needed_layers_50mnat": 0.05, "needed_layers_200mnat": 0.2}
"""Columns of `runs` -> thresholds [nat/token]."""
NEEDED_THRESHOLD: float = MeasureConfig.model_fields["needed_threshold"].default
"""nat/token"""

Statistic = Callable[..., np.ndarray]
"""Means over sequences, [R, ...] each -> [R, E]."""


@dataclass(frozen=True, kw_only=True)
class Usefulness:
    increase: list[BootstrapEstimate]
    """of blocks 1..L, relative; negative if the map does better than the block"""
    added: list[BootstrapEstimate]
    """the same in nat/token"""
    accuracy_lost: list[BootstrapEstimate]
    """share of the scored positions"""
    share: BootstrapEstimate
    """share of blocks above the threshold, 0 to 1"""
    mean_increase: BootstrapEstimate
    mean_added: BootstrapEstimate
    mean_accuracy_lost: BootstrapEstimate
    needed: BootstrapEstimate
    """number of blocks; None without an interval, which takes two sequences"""

    @property
    def affine_increase(self) -> list[float | None]:
        """`increase` without intervals"""
        return [estimate.value for estimate in self.increase]


@dataclass(frozen=True, eq=False)
class AffineUpdate:
    """x + (x - mean) weight + bias."""

    mean: Tensor
    weight: Tensor
    bias: Tensor

    def __call__(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + (x_BTD - self.mean) @ self.weight + self.bias


def usefulness(
    probed: ProbedModel,
    fit_NT: Tensor,
    scored: Scored,
    threshold: float,
    rng: np.random.Generator,
    needed_threshold: float = NEEDED_THRESHOLD,
) -> Usefulness:
    """Replace each block by its affine map, fitted on `fit_NT`, and compute the losses on `scored`. `threshold` is
    relative to the loss, `needed_threshold` in nat/token."""
    layers = range(1, probed.n_layers + 1)
    maps = fit_affine(probed, fit_NT)
    forks = [replace(layer, affine) for layer, affine in zip(layers, maps, strict=True)]
    base_N2, affine_NL2 = fork_scores(probed, scored, forks)
    base_N, affine_NL, weight_N = base_N2[:, 0], affine_NL2[..., 0], scored.weight
    seed = int(rng.integers(2**63))  # the same resamples for all scores

    def estimates(statistic: Statistic, *per_sequence: np.ndarray) -> list[BootstrapEstimate]:
        return bootstrap_each(statistic, *per_sequence, rng=np.random.default_rng(seed))

    def relative(affine_RL: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        return relative_change(affine_RL, base_R[:, None])

    def share(affine_RL: np.ndarray, base_R: np.ndarray) -> np.ndarray:
        increase_RL = relative(affine_RL, base_R)
        return np.where(np.isnan(increase_RL), np.nan, increase_RL > threshold).mean(-1, keepdims=True)

    def count(added_RL: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
        return (per_position(added_RL, weight_R) > needed_threshold).sum(-1, keepdims=True)

    added_NL, lost_NL = affine_NL - base_N[:, None], base_N2[:, 1:] - affine_NL2[..., 1]
    added = estimates(per_position, added_NL, weight_N)
    return Usefulness(
        increase=estimates(relative, affine_NL, base_N),
        added=added,
        accuracy_lost=estimates(per_position, lost_NL, weight_N),
        share=estimates(share, affine_NL, base_N)[0],
        mean_increase=estimates(_mean(relative), affine_NL, base_N)[0],
        mean_added=estimates(_mean(per_position), added_NL, weight_N)[0],
        mean_accuracy_lost=estimates(_mean(per_position), lost_NL, weight_N)[0],
        needed=needed_layers(added, needed_threshold, estimates(count, added_NL, weight_N)[0]),
    )


def _mean(statistic: Statistic) -> Statistic:
    return lambda *means: statistic(*means).mean(-1, keepdims=True)


def share_above(increases: Sequence[float | None], threshold: float) -> float | None:
    """The share of blocks whose loss increase exceeds the threshold; None if one is unknown, or there is none."""
    return complete_mean([None if increase is None else float(increase > threshold) for increase in increases])


def count_needed(added: Sequence[BootstrapEstimate], threshold: float) -> float:
    """The number of blocks that add more than the threshold, with an interval above 0."""
    return float(sum((block.value or 0.0) > threshold and (block.lo or 0.0) > 0 for block in added))


def needed_layers(
    added: Sequence[BootstrapEstimate], threshold: float, above_threshold: BootstrapEstimate
) -> BootstrapEstimate:
    """The count, with the interval of `above_threshold`, the number of blocks above the threshold, widened to include
    the count. None if a block has no interval, which takes two sequences."""
    lo, hi = above_threshold.lo, above_threshold.hi
    if lo is None or hi is None or any(block.value is None or block.lo is None for block in added):
        return dataclasses.replace(above_threshold, value=None, lo=None, hi=None)
    needed = count_needed(added, threshold)
    return dataclasses.replace(above_threshold, value=needed, lo=min(lo, needed), hi=max(hi, needed))


def fit_affine(probed: ProbedModel, fit_NT: Tensor) -> list[AffineUpdate]:
    """The map of each block 1..L, from one pass. Raises ValueError unless there are more than D + 1 fit tokens. Means
    and covariances of the parts are merged exactly (Chan, Golub & LeVeque 1983). They take 16 L D^2 bytes."""
    moments = [_Moments() for _ in range(probed.n_layers)]
    with probing(probed):
        for tokens_BT in batches(probed, fit_NT):
            # Each map is fitted to its block's input in the unmodified model.
            states = itertools.pairwise(stream(probed, tokens_BT))
            for moment, (x_BTD, after_BTD) in zip(moments, states, strict=True):
                moment.add(x_BTD.flatten(0, 1), after_BTD.flatten(0, 1))
        return _solve(moments)


class _Moments:
    """Mean and co-moments of (x, u), u the block's update, over the tokens so far, in fp64."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.mean_2D: Tensor | float = 0.0
        self.comoment_D2D: Tensor | float = 0.0  # sum over tokens of (x - mean x) (x - mean x, u - mean u)

    def add(self, x_nD: Tensor, after_nD: Tensor) -> None:
        x_nD, after_nD = x_nD.double(), after_nD.double()
        z_n2D = torch.cat((x_nD, after_nD - x_nD), dim=-1)
        mean_2D = z_n2D.mean(0)
        z_n2D -= mean_2D
        n_seen, n_new = self.n_tokens, len(z_n2D)
        self.n_tokens += n_new
        delta_2D = mean_2D - self.mean_2D
        d_model = x_nD.shape[1]
        between_D2D = torch.outer(delta_2D[:d_model], delta_2D) * (n_seen * n_new / self.n_tokens)
        self.comoment_D2D = self.comoment_D2D + z_n2D[:, :d_model].T @ z_n2D + between_D2D
        self.mean_2D = self.mean_2D + delta_2D * (n_new / self.n_tokens)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """mean of x and of u, co-moments of (x, x) and of (x, u)."""
        assert isinstance(self.comoment_D2D, Tensor) and isinstance(self.mean_2D, Tensor)
        mean_D, bias_D = self.mean_2D.chunk(2)
        if self.n_tokens <= len(mean_D) + 1:
            raise ValueError(
                f"{self.n_tokens} fit tokens do not determine an affine map of width {len(mean_D)}; "
                f"expected more than d_model + 1 = {len(mean_D) + 1}: raise fit_tokens (for released_code "
                f"measure_tokens), or hold out more text"
            )
        xx_DD, xu_DD = self.comoment_D2D.chunk(2, dim=1)
        return mean_D, bias_D, xx_DD, xu_DD


def _solve(moments: list[_Moments]) -> list[AffineUpdate]:
    mean_LD, bias_LD, xx_LDD, xu_LDD = zip(*(moment.parts() for moment in moments), strict=True)
    # Directions whose variance is below D eps of the largest are dropped: rounding errors of fp32 states.
    weight_LDD = [inverse_DD @ xu_DD for inverse_DD, xu_DD in zip(pseudo_inverses(xx_LDD), xu_LDD, strict=True)]
    layers = zip(mean_LD, weight_LDD, bias_LD, strict=True)
    return [AffineUpdate(mean_D.float(), weight_DD.float(), bias_D.float()) for mean_D, weight_DD, bias_D in layers]


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    """The published score, its absolute forms by layer, and needed layers, from one fit."""
    config = context.config
    result = usefulness(
        context.probed, context.fit, context.scored, config.usefulness_threshold, context.rng(),
        config.needed_threshold,
    )  # fmt: skip
    rows.add_score("usefulness", result.share)
    rows.add_score("usefulness_loss_increase", result.mean_increase)
    for percent in (2, 5, 20):
        rows.summary[f"usefulness_{percent}pct"] = share_above(result.affine_increase, percent / 100)
    share = result.share.value
    rows.summary["effective_layers"] = None if share is None else share * context.probed.n_layers
    rows.add_score("affine_loss_added", result.mean_added)
    rows.add_score("affine_accuracy_lost", result.mean_accuracy_lost)
    rows.add_score("needed_layers", result.needed)
    if result.needed.value is not None:
        rows.summary.update({name: count_needed(result.added, threshold) for name, threshold in NEEDED_AT.items()})
    rows.add_layer_scores("affine_loss_increase", result.increase, context.scored.n_scored)
    rows.add_layer_scores("affine_loss_added", result.added, context.scored.n_scored)
    rows.add_layer_scores("affine_accuracy_lost", result.accuracy_lost, context.scored.n_scored)
