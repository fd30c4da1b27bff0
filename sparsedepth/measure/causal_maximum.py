"""Causal effect after 2505.13898: the largest relative change of a later block's update at any single token.

    ratio(s, l; t) = ||u'_l[t] - u_l[t]|| / max(||u_l[t]||, 1e-6),   u_l = x_l - x_(l-1),   s < l

    future   u' with block s skipped at tokens 1..p-1 (from 0), largest ratio over the tokens t >= p and over positions
             p: what later tokens read of block s. p is drawn from 8, 16, 24, .. below T - 4
    current  u' with block s skipped at every token but the first, largest ratio over all tokens

    depth score = sum_s s e_s / sum_s e_s,   e_s = mean over l > s of the pair's largest ratio,   s = 1..L-1: the mean
             layer of the blocks that later ones depend on

The first token is never skipped: models store a large state there. `causal` has the ratio of means of 2603.15389, with
block s skipped at every token; a maximum is larger, and grows with the number of tokens. Without causality (a ViT) no
token is later than another, so the suite omits 'future'.
Deviates: the published number is the maximum over sequences too, here `effects`. A maximum cannot be bootstrapped, so
the scores, which have intervals, average each sequence's maximum. The paper's depth score counts layers from 0.

Shapes: B and N sequences, T tokens of one sequence, F forks, D width of the residual stream, L layers, R resamples.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, finite, mean_of_last, ratio, shared_resamples
from sparsedepth.measure.context import MeasureContext, Measurements
from sparsedepth.probe.fork import Fork, by_sequence, record_states, replace, run_forks
from sparsedepth.probe.probed_model import ProbedModel

SMALLEST_UPDATE = 1e-6
"""Lower bound of the norm of an update."""
SPACING, MARGIN = 8, 4
"""Positions p are multiples of SPACING followed by more than MARGIN tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalMaximum:
    effects: dict[tuple[int, int], float | None]
    """by pair of layers s < l: the largest ratio over tokens, positions and sequences, from 0"""
    score: BootstrapEstimate
    """mean over pairs of the mean over sequences of each sequence's largest ratio; None for a single block"""
    depth_score: BootstrapEstimate
    """layer, from 1, from the mean over sequences of each one's largest ratio; None if no block has an effect"""
    positions: list[int]
    """p, from 0; empty for 'current'"""


def causal_maximum(
    probed: ProbedModel,
    tokens_NT: Tensor,
    rng: np.random.Generator,
    *,
    tokens: Literal["future", "current"] = "future",
    n_positions: int = 4,
) -> CausalMaximum:
    """Skip each block and take the largest effect on each later one. All sequences share the positions. Raises
    ValueError where 'future' finds no position: sequences of less than 13 tokens."""
    length = tokens_NT.shape[1]
    positions = choose_positions(length, n_positions, rng) if tokens == "future" else []
    spans = [(1, p, p) for p in positions] or [(1, length, 0)]
    largest_NLL = by_sequence(probed, tokens_NT, lambda tokens_BT: _skip_spans(probed, tokens_BT, spans))
    largest_LL, estimate = largest_NLL.max(0), shared_resamples(rng)
    pairs = itertools.combinations(range(1, probed.n_layers + 1), 2)
    return CausalMaximum(
        effects={(s, later): finite(largest_LL[s - 1, later - 1]) for s, later in pairs},
        score=estimate(lambda x_RLL: mean_of_last(x_RLL[:, *np.triu_indices(probed.n_layers, 1)]), largest_NLL),
        depth_score=estimate(_depth_score, largest_NLL),
        positions=positions,
    )


def choose_positions(length: int, n_positions: int, rng: np.random.Generator) -> list[int]:
    """`n_positions` multiples of 8 from 8 to below T - 4 without replacement (all, if fewer exist), in order."""
    possible = range(SPACING, length - MARGIN, SPACING)
    if not possible:
        raise ValueError(
            f"sequences of {length} tokens have no position to split at; expected at least {SPACING + MARGIN + 1}: "
            f"use longer sequences, or tokens='current'"
        )
    return sorted(int(p) for p in rng.choice(possible, min(n_positions, len(possible)), replace=False))


def skip_span(probed: ProbedModel, layer: int, start: int, stop: int) -> Fork:
    """Skip a block at the tokens start .. stop - 1 (from 0): x'_l = x_(l-1) there."""

    def skipping(x_BTD: Tensor) -> Tensor:
        after_BTD = probed.block(layer, x_BTD)
        return torch.cat((after_BTD[:, :start], x_BTD[:, start:stop], after_BTD[:, stop:]), dim=1)

    return replace(layer, skipping)


def _skip_spans(probed: ProbedModel, tokens_BT: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """largest_BLL of each sequence; a span is (first skipped token, end, first compared token)."""
    n_layers, states = probed.n_layers, record_states(probed, tokens_BT)
    chosen = [(layer, span) for layer in range(1, n_layers + 1) for span in spans]
    forks = [skip_span(probed, layer, start, stop) for layer, (start, stop, _) in chosen]
    largest_LLB = torch.zeros(n_layers, n_layers, len(tokens_BT), dtype=torch.float64, device=probed.device)
    for step in run_forks(probed, states, forks):
        update_BTD = states[step.layer] - states[step.layer - 1]
        size_BT = torch.linalg.vector_norm(update_BTD, dim=-1).clamp(min=SMALLEST_UPDATE)
        for index, before_BTD, after_BTD in zip(step.forks, step.before, step.after, strict=True):
            layer, (_, _, first) = chosen[index]
            ratio_BT = torch.linalg.vector_norm((after_BTD - before_BTD) - update_BTD, dim=-1) / size_BT
            maximum_B = largest_LLB[layer - 1, step.layer - 1]
            torch.maximum(maximum_B, ratio_BT[:, first:].amax(-1).double(), out=maximum_B)
    return largest_LLB.movedim(-1, 0)


def _depth_score(largest_RLL: np.ndarray) -> np.ndarray:
    n_layers = largest_RLL.shape[-1]
    layer_s = np.arange(1, n_layers)
    later_Rs = np.triu(largest_RLL, 1)[:, :-1].sum(-1) / (n_layers - layer_s)
    return ratio(later_Rs @ layer_s, later_Rs.sum(-1))


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    for name, tokens in (("causal_maximum", "future"), ("causal_maximum_current", "current")):
        too_short = context.config.seq_len <= SPACING + MARGIN
        if tokens == "future" and (too_short or not context.probed.causal):
            continue  # no position has enough tokens on both sides, or no token is later than another
        result = causal_maximum(context.probed, context.inputs, context.rng(), tokens=tokens)
        rows.add_score(name, result.score)
        rows.add_score(name.replace("causal_maximum", "depth_score"), result.depth_score)
        rows.add_pairs(name, result.effects, context.n_tokens)
