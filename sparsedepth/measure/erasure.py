"""Erasure: until which layer later tokens still read what stands at a token's place.

    erased(l, t)   x_l[t] becomes the mean state of layer l, over tokens and sequences; blocks l + 1..L run on
    effect(l, t) = E over sequences and tokens after t of ||p' - p||,   p the model's distribution over the vocabulary

for layers l = 0..L-1 and the tokens t that stand at 0, 1/4, 1/2 and 3/4 of the sequence. The first is left out of the
scores: models park a large state there, and its erasure tells of that. At layer L - 1 only the last block's attention
still reads it, and where no block looks back there is no effect at all. `late_share` is the part of the effect that the
layers from L // 2 on still have, those that the deep half of the blocks reads: near 0 where what tokens tell each other
is settled early.

Source: 2505.13898, whose effect is the largest over prompts and tokens of an answer. Deviates: the mean over later
tokens, which a bootstrap over sequences tells something of, and positions at fixed shares, as there is no answer.

Shapes: B and N sequences, T tokens of one sequence, F forks, D width of the residual stream, V vocabulary, L layers,
P positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.runtime import MAX_TOKENS
from sparsedepth.measure.bootstrap import BootstrapEstimate, ratio, same_resamples
from sparsedepth.measure.context import MeasureContext
from sparsedepth.measure.loss import MAX_LOGITS
from sparsedepth.measure.rows import Measurements
from sparsedepth.probe.fork import Fork, batches, piece, probing, record, replace, stream, token_count, walk
from sparsedepth.probe.probed_model import ProbedModel

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Where the erased tokens stand, as shares of the sequence."""
MIN_TOKENS = 5
"""Of a shorter sequence these are not four places, and some of them are the first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Erasure:
    effect: np.ndarray
    """effect_LP, layers 0..L-1"""
    score: BootstrapEstimate
    """mean over layers and positions but the first token"""
    late_share: BootstrapEstimate
    """of that, the sum over layers from L // 2 on; None where there is no effect"""
    n_tokens: int


def erasure(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator, max_tokens: int = MAX_TOKENS) -> Erasure:
    """The effect of erasing one token's state; a pass for the means, and half of one for each layer and position."""
    places = [int(share * (tokens_NT.shape[1] - 1)) for share in SHARES]
    with probing(probed):
        mean_LD = _mean_states(probed, tokens_NT, max_tokens)
        parts = [
            _of_batch(probed, tokens_BT, mean_LD, places, max_tokens)
            for tokens_BT in batches(probed, tokens_NT, max_tokens)
        ]
    effect_NLP = torch.cat(parts).cpu().numpy()
    estimate, later_NL = same_resamples(rng), effect_NLP[:, :, 1:].mean(-1)
    return Erasure(
        effect=effect_NLP.mean(0),
        score=estimate(lambda effect_RL: effect_RL.mean(-1), later_NL),
        late_share=estimate(_late_share, later_NL),
        n_tokens=token_count(tokens_NT),
    )


def _late_share(effect_RL: np.ndarray) -> np.ndarray:
    return ratio(effect_RL[:, effect_RL.shape[1] // 2 :].sum(-1), effect_RL.sum(-1))


def _mean_states(probed: ProbedModel, tokens_NT: Tensor, max_tokens: int) -> Tensor:
    sums: list[Tensor] = []
    for tokens_BT in batches(probed, tokens_NT, max_tokens):
        of_batch = [x_BTD.sum((0, 1), dtype=torch.float64) for x_BTD in stream(probed, tokens_BT)]
        sums = [a + b for a, b in zip(sums, of_batch, strict=True)] if sums else of_batch
    return torch.stack(sums).float() / token_count(tokens_NT)


def erase(probed: ProbedModel, layer: int, place: int, mean_D: Tensor) -> Fork:
    """x_layer[place] becomes `mean_D`, from block layer + 1 on."""

    def erased(x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD.clone()
        x_BTD[:, place] = mean_D
        return probed.block(layer + 1, x_BTD)

    return replace(layer + 1, erased)


def _of_batch(probed: ProbedModel, tokens_BT: Tensor, mean_LD: Tensor, places: list[int], max_tokens: int) -> Tensor:
    """effect_BLP of each sequence."""
    states = record(probed, tokens_BT)
    chosen = [(layer, place) for layer in range(probed.n_layers) for place in range(len(places))]
    forks = [erase(probed, layer, places[place], mean_LD[layer]) for layer, place in chosen]
    effect_BLP = mean_LD.new_zeros(len(tokens_BT), probed.n_layers, len(places), dtype=torch.float64)
    for step in walk(probed, states, forks, max_tokens):
        if step.layer == probed.n_layers:
            for index, x_BTD in zip(step.forks, step.after, strict=True):
                layer, place = chosen[index]
                later = slice(places[place] + 1, None)
                effect_BLP[:, layer, place] = _distance(probed, x_BTD[:, later], states[-1][:, later])
    return effect_BLP


def _distance(probed: ProbedModel, one_BtD: Tensor, other_BtD: Tensor) -> Tensor:
    """The mean over tokens of ||p' - p||, of each sequence."""
    rows = max(1, piece(probed.device, MAX_LOGITS) // probed.vocab_size)
    parts = zip(*(x_BtD.flatten(0, 1).split(rows) for x_BtD in (one_BtD, other_BtD)), strict=True)
    distances = []
    for part in parts:
        one_nV, other_nV = (probed.logits(x_nD[None])[0].float().softmax(-1) for x_nD in part)
        distances.append(torch.linalg.vector_norm(one_nV - other_nV, dim=-1))
    return torch.cat(distances).view(one_BtD.shape[:2]).mean(-1, dtype=torch.float64)


def add_rows(context: MeasureContext, made: Measurements) -> None:
    if not context.probed.causal or context.config.seq_len < MIN_TOKENS:
        return  # where every token sees every other, none is later
    result = erasure(context.probed, context.inputs, context.rng(), context.max_tokens)
    made.add_score("erasure_effect", result.score)
    made.add_score("erasure_late_share", result.late_share)
    made.add_layers("erasure_effect", result.effect[:, 1:].mean(1).tolist(), result.n_tokens, first=0)
    for share, effect_L in zip(SHARES, result.effect.T, strict=True):
        made.add_layers(f"erasure_effect_{100 * share:.0f}", effect_L.tolist(), len(context.inputs), first=0)
