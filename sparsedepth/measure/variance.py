"""Residual variance: how much the stream spreads over its D entries, layer by layer.

    v_l = mean over tokens of var(x_l over its D entries)   (unbiased: divided by D - 1),   l = 0..L
    growth = (v_L / v_1)^(1 / (L - 1))

x_L is taken before the final norm; the normalised state has a variance near 1 whatever the depth.
Sources: 2603.15389 (per-token variance over the dimensions, averaged over tokens); 2502.05795 (growth).

Shapes: B and N sequences, T tokens of one sequence, D width of the residual stream, L layers (L1 = L + 1 states).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import Estimate, bootstrap, finite
from sparsedepth.probe.fork import MAX_TOKENS, batches, probing, stream
from sparsedepth.probe.stack import Stack


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualVariance:
    by_layer: list[float | None]
    """v_0 .. v_L, in squared units of the stream, from 0"""
    last: Estimate
    """v_L"""
    growth: float | None
    """1/layer; None for a single layer or where v_1 is 0"""
    n_tokens: int


def residual_variance(
    stack: Stack, tokens_NT: Tensor, rng: np.random.Generator, max_tokens: int = MAX_TOKENS
) -> ResidualVariance:
    """The variance of every state of the stream, the embedding's output (layer 0) included."""
    variance_NL1 = variance_by_sequence(stack, tokens_NT, max_tokens)
    by_layer = variance_NL1.mean(0)
    return ResidualVariance(
        by_layer=[finite(value) for value in by_layer],
        last=bootstrap(lambda last_R: last_R, variance_NL1[:, -1], rng=rng),
        growth=growth(by_layer),
        n_tokens=tokens_NT.numel(),
    )


def variance_by_sequence(stack: Stack, tokens_NT: Tensor, max_tokens: int = MAX_TOKENS) -> np.ndarray:
    """variance_NL1: v_0 .. v_L of each sequence. One forward pass without the head: light enough to follow training."""
    parts = []
    with probing(stack):
        for tokens_BT in batches(stack, tokens_NT, max_tokens):
            variances = [token_variance(x_BTD) for x_BTD in stream(stack, tokens_BT)]
            parts.append(torch.stack(variances, dim=1))
        return torch.cat(parts).cpu().numpy()


def token_variance(x_BTD: Tensor) -> Tensor:
    """The variance over D, averaged over the tokens of each sequence: [B], fp64."""
    return x_BTD.var(dim=-1).mean(-1, dtype=torch.float64)


def growth(by_layer: Sequence[float] | np.ndarray) -> float | None:
    """(v_L / v_1)^(1/(L-1)): the mean factor per layer, from v_0 .. v_L."""
    n_layers = len(by_layer) - 1
    if n_layers < 2 or by_layer[1] == 0:
        return None
    return finite((by_layer[n_layers] / by_layer[1]) ** (1 / (n_layers - 1)))
