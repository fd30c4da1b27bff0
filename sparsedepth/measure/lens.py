"""Lens: how far the prediction read off each layer's state is from the model's own.

    p_l = softmax(head(final norm(x_l))),   p = p_L,   l = 0..L
    kl(l) = E_tokens sum_v p_l ln(p_l / p)          top-5 overlap(l) = E_tokens |top5(p_l) and top5(p)| / 5

Source: 2505.13898, which reads off the layer from which on the model only refines what it has already settled: there kl
falls, and the overlap rises, over the last layers alone. Where `early_exit` asks how good an early prediction is, this
asks how near it is to the final one, of which neither needs the other: a model may be sure, and wrong, early. Over all
tokens, whatever their targets; the scores are means over l < L. Nothing is fitted: a lens may miss what is there.

Shapes: B and N sequences, T tokens of one sequence, n tokens, D width of the residual stream, V vocabulary, L layers.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sparsedepth.config.runtime import MAX_TOKENS
from sparsedepth.measure.bootstrap import BootstrapEstimate, same_resamples
from sparsedepth.measure.context import MeasureContext
from sparsedepth.measure.loss import MAX_LOGITS
from sparsedepth.measure.rows import Measurements
from sparsedepth.probe.fork import batches, piece, probing, record, token_count
from sparsedepth.probe.probed_model import ProbedModel

TOP = 5
"""Tokens that are compared, the most likely ones; all of a smaller vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Lens:
    kl: list[float]
    """layers 0..L, nat; 0 at L"""
    overlap: list[float]
    """layers 0..L; 1 at L"""
    mean_kl: BootstrapEstimate
    """over layers 0..L-1"""
    mean_overlap: BootstrapEstimate
    n_tokens: int


def lens(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator, max_tokens: int = MAX_TOKENS) -> Lens:
    """Apply the head to the state after every layer: one forward pass and L + 1 heads."""
    with probing(probed):
        parts = [_of_batch(probed, record(probed, tokens_BT)) for tokens_BT in batches(probed, tokens_NT, max_tokens)]
    both_2NL = torch.cat(parts, dim=1).cpu().numpy()
    mean = partial(same_resamples(rng), lambda value_RL: value_RL[:, :-1].mean(-1))
    kl_L, overlap_L = both_2NL.mean(1)
    return Lens(
        kl=kl_L.tolist(),
        overlap=overlap_L.tolist(),
        mean_kl=mean(both_2NL[0]),
        mean_overlap=mean(both_2NL[1]),
        n_tokens=token_count(tokens_NT),
    )


def _of_batch(probed: ProbedModel, states: list[Tensor]) -> Tensor:
    """Means over the tokens of each sequence: kl and overlap, [2, B, L + 1]."""
    n_sequences, n_tokens, _ = states[0].shape
    at_once = piece(probed.device, MAX_LOGITS) // len(states)  # logits of all states are there together
    # A CPU too gets MAX_LOGITS of each state: smaller pieces would be all calls.
    rows = max(1, max(MAX_LOGITS, at_once) // probed.vocab_size)
    both_2nL = states[0].new_zeros(2, n_sequences * n_tokens, len(states), dtype=torch.float64)
    for start in range(0, n_sequences * n_tokens, rows):
        read = [probed.logits(x_BTD.flatten(0, 1)[None, start : start + rows])[0].float() for x_BTD in states]
        top = min(TOP, probed.vocab_size)
        final_nV, final_nK = read[-1].log_softmax(-1), read[-1].topk(top).indices
        for layer, logits_nV in enumerate(read):
            log_p_nV = logits_nV.log_softmax(-1)
            both_2nL[0, start : start + rows, layer] = (log_p_nV.exp() * (log_p_nV - final_nV)).double().sum(-1)
            shared_nKK = logits_nV.topk(top).indices[:, :, None] == final_nK[:, None, :]
            both_2nL[1, start : start + rows, layer] = shared_nKK.any(-1).double().mean(-1)
    return both_2nL.unflatten(1, (n_sequences, n_tokens)).mean(2)


def add_rows(context: MeasureContext, made: Measurements) -> None:
    if not context.probed.causal:
        return  # the head of a ViT reads the class token alone
    result = lens(context.probed, context.inputs, context.rng(), context.max_tokens)
    for name, score, by_layer in (
        ("lens_kl", result.mean_kl, result.kl),
        ("lens_overlap", result.mean_overlap, result.overlap),
    ):
        made.add_score(name, score)
        made.add_layers(name, by_layer, result.n_tokens, first=0)
