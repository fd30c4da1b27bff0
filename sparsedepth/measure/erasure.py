"""Erasure: up to which layer later tokens still read the state of an earlier token.

    erased(l, t)   x_l[t] becomes the mean state of layer l, over tokens and sequences; blocks l + 1..L run on
    effect(l, t) = E over sequences and tokens after t of ||p' - p||,   p the model's distribution over the vocabulary

for layers l = 0..L-1 and the tokens t at 0, 1/4, 1/2 and 3/4 of the sequence. The first token is left out of the
scores: models store a large state there, which dominates its erasure. At layer L - 1 only the last block's attention
reads the state. `late_share` is the share of the effect at layers from L // 2 on, read by the deeper half of the
blocks: near 0 if information moves between tokens early.

Source: 2505.13898, whose effect is the largest over prompts and tokens of an answer. Deviates: the mean over later
tokens, which can be bootstrapped, and positions at fixed shares, as there is no answer.

Shapes: B and N sequences, T tokens of one sequence, F forks, D width of the residual stream, V vocabulary, L layers,
P positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import BootstrapEstimate, ratio, shared_resamples
from sparsedepth.measure.context import MeasureContext, Measurements
from sparsedepth.measure.loss import MAX_LOGITS
from sparsedepth.probe.fork import (
    Fork,
    batches,
    by_sequence,
    chunk_size,
    probing,
    record_states,
    replace,
    run_forks,
    stream,
    token_count,
)
from sparsedepth.probe.probed_model import ProbedModel

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Positions of the erased tokens, as shares of the sequence."""
MIN_TOKENS = 5
"""In a shorter sequence these positions are not distinct."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Erasure:
    effect: np.ndarray
    """effect_LP, layers 0..L-1"""
    score: BootstrapEstimate
    """mean over layers and positions except the first token"""
    late_share: BootstrapEstimate
    """share of the effect at layers from L // 2 on; None without an effect"""


def erasure(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> Erasure:
    """The effect of erasing single states; a pass for the means, and half a pass for each layer and position."""
    positions = [int(share * (tokens_NT.shape[1] - 1)) for share in SHARES]
    with probing(probed):
        mean_LD = _mean_states(probed, tokens_NT)
    effect_NLP = by_sequence(probed, tokens_NT, lambda tokens_BT: _batch_effects(probed, tokens_BT, mean_LD, positions))
    estimate, later_NL, half = shared_resamples(rng), effect_NLP[:, :, 1:].mean(-1), probed.n_layers // 2
    return Erasure(
        effect=effect_NLP.mean(0),
        score=estimate(lambda effect_RL: effect_RL.mean(-1), later_NL),
        late_share=estimate(lambda effect_RL: ratio(effect_RL[:, half:].sum(-1), effect_RL.sum(-1)), later_NL),
    )


def _mean_states(probed: ProbedModel, tokens_NT: Tensor) -> Tensor:
    sums: list[Tensor] = []
    for tokens_BT in batches(probed, tokens_NT):
        batch_sums = [x_BTD.sum((0, 1), dtype=torch.float64) for x_BTD in stream(probed, tokens_BT)]
        sums = [a + b for a, b in zip(sums, batch_sums, strict=True)] if sums else batch_sums
    return torch.stack(sums).float() / token_count(tokens_NT)


def erase(probed: ProbedModel, layer: int, position: int, mean_D: Tensor) -> Fork:
    """Set x_layer[position] to `mean_D`, from block layer + 1 on."""

    def erased(x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD.clone()
        x_BTD[:, position] = mean_D
        return probed.block(layer + 1, x_BTD)

    return replace(layer + 1, erased)


def _batch_effects(probed: ProbedModel, tokens_BT: Tensor, mean_LD: Tensor, positions: list[int]) -> Tensor:
    """effect_BLP of each sequence."""
    states = record_states(probed, tokens_BT)
    chosen = [(layer, position) for layer in range(probed.n_layers) for position in range(len(positions))]
    forks = [erase(probed, layer, positions[position], mean_LD[layer]) for layer, position in chosen]
    effect_BLP = mean_LD.new_zeros(len(tokens_BT), probed.n_layers, len(positions), dtype=torch.float64)
    for step in run_forks(probed, states, forks):
        if step.layer == probed.n_layers:
            for index, x_BTD in zip(step.forks, step.after, strict=True):
                layer, position = chosen[index]
                later = slice(positions[position] + 1, None)
                effect_BLP[:, layer, position] = _distance(probed, x_BTD[:, later], states[-1][:, later])
    return effect_BLP


def _distance(probed: ProbedModel, first_BtD: Tensor, second_BtD: Tensor) -> Tensor:
    """The mean over tokens of ||p' - p||, by sequence."""
    rows = max(1, chunk_size(probed.device, MAX_LOGITS) // probed.vocab_size)
    parts = zip(*(x_BtD.flatten(0, 1).split(rows) for x_BtD in (first_BtD, second_BtD)), strict=True)
    distances = []
    for part in parts:
        first_nV, second_nV = (probed.logits(x_nD[None])[0].float().softmax(-1) for x_nD in part)
        distances.append(torch.linalg.vector_norm(first_nV - second_nV, dim=-1))
    return torch.cat(distances).view(first_BtD.shape[:2]).mean(-1, dtype=torch.float64)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    if not context.probed.causal or context.config.seq_len < MIN_TOKENS:
        return  # without causality no token is later than another
    result = erasure(context.probed, context.inputs, context.rng())
    rows.add_score("erasure_effect", result.score)
    rows.add_score("erasure_late_share", result.late_share)
    rows.add_layers("erasure_effect", result.effect[:, 1:].mean(1).tolist(), context.n_tokens, first=0)
    for share, effect_L in zip(SHARES, result.effect.T, strict=True):
        rows.add_layers(f"erasure_effect_{100 * share:.0f}", effect_L.tolist(), len(context.inputs), first=0)
