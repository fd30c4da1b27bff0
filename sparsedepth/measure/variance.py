"""Residual variance: how much the stream, and what each block adds to it, spreads over its D entries, layer by layer.

    v_l = mean over tokens of var(x_l over its D entries)   (unbiased: divided by D - 1),   l = 0..L
    growth of layer l = v_l / v_(l-1);   growth = (v_L / v_1)^(1 / (L - 1)), the mean factor per layer
    the branches: the same variance of a_l and f_l, what attention and the feed-forward part add to the stream

x_L is taken before the final norm; the normalised state has a variance near 1 whatever the depth.
Sources: 2603.15389 (per-token variance over the dimensions, averaged over tokens); 2502.05795 (growth).

Shapes: B and N sequences, T tokens of one sequence, D width of the residual stream, L layers (L1 = L + 1 states),
R resamples.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.runtime import MAX_TOKENS
from sparsedepth.measure.bootstrap import BootstrapEstimate, finite, itself, ratio, same_resamples
from sparsedepth.measure.context import MeasureContext
from sparsedepth.measure.rows import Measurements
from sparsedepth.probe.fork import batches, probing, stream, token_count
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.probe.updates import updates


@dataclass(frozen=True, kw_only=True, eq=False)
class BranchVariance:
    """Of what one branch adds, in squared units of the stream."""

    by_layer: list[float | None]
    """layers 1..L, from 0"""
    mean: BootstrapEstimate
    """over layers"""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualVariance:
    by_layer: list[float | None]
    """v_0 .. v_L, in squared units of the stream, from 0"""
    last: BootstrapEstimate
    """v_L"""
    growth_by_layer: list[float | None]
    """v_l / v_(l-1) for l = 1..L; None where v_(l-1) is 0"""
    growth_rate: BootstrapEstimate
    """1/layer; None for a single layer or where v_1 is 0"""
    attention: BranchVariance | None
    ffn: BranchVariance | None
    """None where the model cannot tell its branches"""
    n_tokens: int


def residual_variance(
    probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator, max_tokens: int = MAX_TOKENS
) -> ResidualVariance:
    """The variance of every state of the stream, the embedding's output (layer 0) included, and of both branches."""
    state_parts, branch_parts = [], []
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT, max_tokens):
            states, branches = _variances(probed, tokens_BT)
            state_parts.append(states)
            branch_parts.append(branches)
        variance_NL1 = torch.cat(state_parts).cpu().numpy()
        branch_NL2 = None if branch_parts[0] is None else torch.cat(branch_parts).cpu().numpy()
    by_layer = variance_NL1.mean(0)
    estimate = same_resamples(rng)

    def branch(index: int) -> BranchVariance | None:
        if branch_NL2 is None:
            return None
        variance_NL = branch_NL2[..., index]
        by_layer = [finite(value) for value in variance_NL.mean(0)]
        return BranchVariance(by_layer=by_layer, mean=estimate(lambda v_RL: v_RL.mean(-1), variance_NL))

    return ResidualVariance(
        by_layer=[finite(value) for value in by_layer],
        last=estimate(itself, variance_NL1[:, -1]),
        growth_by_layer=[finite(value) for value in ratio(by_layer[1:], by_layer[:-1])],
        growth_rate=estimate(_growth_rate, variance_NL1),
        attention=branch(0),
        ffn=branch(1),
        n_tokens=token_count(tokens_NT),
    )


def _variances(probed: ProbedModel, tokens_BT: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of each sequence: v_0 .. v_L, and the variances of attention and feed-forward part [B, L, 2] if all are known."""
    states, branches = [], []
    for update in updates(probed, tokens_BT):
        if not states:
            states.append(token_variance(update.before))
        states.append(token_variance(update.after))
        if update.branches is not None:
            branches.append(torch.stack([token_variance(branch) for branch in update.branches], dim=-1))
    known = len(branches) == probed.n_layers
    return torch.stack(states, dim=1), torch.stack(branches, dim=1) if known else None


def variance_by_sequence(probed: ProbedModel, tokens_NT: Tensor, max_tokens: int = MAX_TOKENS) -> np.ndarray:
    """variance_NL1: v_0 .. v_L of each sequence. One forward pass without the head: light enough to follow training."""
    parts = []
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT, max_tokens):
            variances = [token_variance(x_BTD) for x_BTD in stream(probed, tokens_BT)]
            parts.append(torch.stack(variances, dim=1))
        return torch.cat(parts).cpu().numpy()


def token_variance(x_BTD: Tensor) -> Tensor:
    """The variance over D, averaged over the tokens of each sequence: [B], fp64."""
    return x_BTD.var(dim=-1).mean(-1, dtype=torch.float64)


def _growth_rate(variance_RL1: np.ndarray) -> np.ndarray:
    """(v_L / v_1)^(1/(L-1))."""
    n_layers = variance_RL1.shape[1] - 1
    if n_layers < 2:
        return np.full(len(variance_RL1), np.nan)
    return ratio(variance_RL1[:, -1], variance_RL1[:, 1]) ** (1 / (n_layers - 1))


def add_rows(context: MeasureContext, made: Measurements) -> None:
    result = residual_variance(context.probed, context.inputs, context.rng(), context.max_tokens)
    made.add_score("residual_variance_last", result.last)
    made.add_score("residual_variance_growth", result.growth_rate)
    made.add_layers("residual_variance", result.by_layer, result.n_tokens, first=0)
    made.add_layers("residual_growth", result.growth_by_layer, result.n_tokens)
    for name, branch in (("attention_variance", result.attention), ("ffn_variance", result.ffn)):
        if branch is not None:
            made.add_score(name, branch.mean)
            made.add_layers(name, branch.by_layer, result.n_tokens)
