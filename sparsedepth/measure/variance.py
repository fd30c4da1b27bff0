"""Residual variance: the spread of the stream, and of each block's update, over its D entries, by layer.

    v_l = mean over tokens of var(x_l over its D entries)   (unbiased: divided by D - 1),   l = 0..L
    growth of layer l = v_l / v_(l-1);   growth = (v_L / v_1)^(1 / (L - 1)), the mean factor per layer
    branches: the same variance of the updates a_l by attention and f_l by the feed-forward part

x_L is taken before the final norm; a normed state has a variance near 1 at any depth.
Sources: 2603.15389 (per-token variance over the dimensions, averaged over tokens); 2502.05795 (growth).

Shapes: B and N sequences, T tokens of one sequence, D width of the residual stream, L layers (L1 = L + 1 states),
R resamples.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, ScoreByLayer, finite, identity, ratio, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import by_sequence, stream, updates
from sparsedepth.probe.probed_model import ProbedModel


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualVariance:
    by_layer: list[float | None]
    """v_0 .. v_L, in squared units of the stream, from 0"""
    last: BootstrapEstimate
    """v_L"""
    growth_by_layer: list[float | None]
    """v_l / v_(l-1) for l = 1..L; None if v_(l-1) is 0"""
    growth_rate: BootstrapEstimate
    """factor per layer; None for a single layer or if v_1 is 0"""
    branches: dict[str, ScoreByLayer]
    """attention_variance and ffn_variance, and the mean over layers; empty if the model has no known branches"""


def residual_variance(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> ResidualVariance:
    """The variance of every state, from the embedding (layer 0) on, and of both branches."""
    variance_NX = by_sequence(probed, tokens_NT, lambda tokens_BT: _variances(probed, tokens_BT))
    variance_NL1, branch_NX = np.split(variance_NX, [probed.n_layers + 1], axis=1)
    by_layer = variance_NL1.mean(0)
    estimate = shared_resamples(rng)

    def profile(variance_NL: np.ndarray) -> ScoreByLayer:
        by_layer = [finite(value) for value in variance_NL.mean(0)]
        return ScoreByLayer(by_layer=by_layer, score=estimate(lambda v_RL: v_RL.mean(-1), variance_NL))

    branches = {}
    if branch_NX.size:
        attention_NL, ffn_NL = np.split(branch_NX, 2, axis=1)
        branches = {"attention_variance": profile(attention_NL), "ffn_variance": profile(ffn_NL)}
    return ResidualVariance(
        by_layer=[finite(value) for value in by_layer],
        last=estimate(identity, variance_NL1[:, -1]),
        growth_by_layer=[finite(value) for value in ratio(by_layer[1:], by_layer[:-1])],
        growth_rate=estimate(_growth_rate, variance_NL1),
        branches=branches,
    )


def _variances(probed: ProbedModel, tokens_BT: Tensor) -> Tensor:
    """For each sequence v_0 .. v_L, then, if known for all blocks, attention's L variances and those of the other
    branch."""
    states, branches = [], []
    for update in updates(probed, tokens_BT):
        if not states:
            states.append(token_variance(update.before))
        states.append(token_variance(update.after))
        if update.branches is not None:
            branches.append([token_variance(branch) for branch in update.branches])
    known = zip(*branches, strict=True) if len(branches) == probed.n_layers else ()
    return torch.stack([*states, *itertools.chain(*known)], dim=1)


def variance_by_sequence(probed: ProbedModel, tokens_NT: Tensor) -> np.ndarray:
    """variance_NL1: v_0 .. v_L of each sequence, in one forward pass without the head: cheap enough for training."""

    def variances(tokens_BT: Tensor) -> Tensor:
        return torch.stack([token_variance(x_BTD) for x_BTD in stream(probed, tokens_BT)], dim=1)

    return by_sequence(probed, tokens_NT, variances)


def token_variance(x_BTD: Tensor) -> Tensor:
    """The variance over D, averaged over the tokens of each sequence: [B], fp64."""
    return x_BTD.var(dim=-1).mean(-1, dtype=torch.float64)


def _growth_rate(variance_RL1: np.ndarray) -> np.ndarray:
    """(v_L / v_1)^(1/(L-1))."""
    n_layers = variance_RL1.shape[1] - 1
    if n_layers < 2:
        return np.full(len(variance_RL1), np.nan)
    return ratio(variance_RL1[:, -1], variance_RL1[:, 1]) ** (1 / (n_layers - 1))


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    result = residual_variance(context.probed, context.inputs, context.rng())
    rows.add_score("residual_variance_last", result.last)
    rows.add_score("residual_variance_growth", result.growth_rate)
    rows.add_layers("residual_variance", result.by_layer, context.n_tokens, first=0)
    rows.add_layers("residual_growth", result.growth_by_layer, context.n_tokens)
    rows.add_profiles(result.branches, context.n_tokens)
