"""Residual variance: the spread of the stream, and of each block's update, over its D entries, by layer.

    v_l = mean over tokens of var(x_l over its D entries)   (unbiased: divided by D - 1),   l = 0..L
    growth of layer l = v_l / v_(l-1);   growth = (v_L / v_1)^(1 / (L - 1)), the mean factor per layer
    branches: the same variance of the updates a_l by attention and f_l by the feed-forward part

x_L is taken before the final norm; a normed state has a variance near 1 at any depth. Sources: 2603.15389 (per-token
variance over the dimensions, averaged over tokens); 2502.05795 (growth).
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import ScoreByLayer, finites, identity, mean_of_last, ratio, shared_resamples
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import by_sequence, stream, updates
from sparsedepth.probe.probed_model import ProbedModel


def residual_variance(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """residual_variance, whose score is v_L; residual_growth, factors per layer, None from a variance of 0 and, as a
    score, for a single layer; attention_variance and ffn_variance, if known. In squared units of the stream."""
    variance_NX = by_sequence(probed, tokens_NT, lambda tokens_BT: _variances(probed, tokens_BT))
    n_layers, estimate = probed.n_layers, shared_resamples(rng)
    variance_NL1, attention_NL, ffn_NL = np.split(variance_NX, [n_layers + 1, 2 * n_layers + 1], axis=1)
    by_layer = variance_NL1.mean(0)
    last, growth = estimate(identity, variance_NL1[:, -1]), estimate(_growth_rate, variance_NL1)
    profiles = {
        "residual_variance": ScoreByLayer(by_layer=finites(by_layer), score=last, first=0),
        "residual_growth": ScoreByLayer(by_layer=finites(ratio(by_layer[1:], by_layer[:-1])), score=growth),
    }
    for name, branch_NL in (("attention_variance", attention_NL), ("ffn_variance", ffn_NL)):
        if branch_NL.size:
            score = estimate(mean_of_last, branch_NL)
            profiles[name] = ScoreByLayer(by_layer=finites(branch_NL.mean(0)), score=score)
    return profiles


def _variances(probed: ProbedModel, tokens_BT: Tensor) -> Tensor:
    """For each sequence v_0 .. v_L, then, if known for all blocks, attention's L variances and
    those of the other branch."""
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
    n_layers = variance_RL1.shape[1] - 1
    if n_layers < 2:
        return np.full(len(variance_RL1), np.nan)
    return ratio(variance_RL1[:, -1], variance_RL1[:, 1]) ** (1 / (n_layers - 1))


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    profiles = residual_variance(context.probed, context.inputs, context.rng())
    scores = {"residual_variance": "residual_variance_last", "residual_growth": "residual_variance_growth"}
    rows.add_profiles(profiles, context.n_tokens, scores)
