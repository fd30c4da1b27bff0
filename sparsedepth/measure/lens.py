"""Logit lens: how far the prediction from each layer's state is from the model's own.

    p_l = softmax(head(final norm(x_l))),   p = p_L,   l = 0..L
    kl(l) = E_tokens sum_v p_l ln(p_l / p)          top-5 overlap(l) = E_tokens |top5(p_l) and top5(p)| / 5

Source: 2505.13898, which locates the layer after which the model only refines its prediction: kl falls, and overlap
rises, only over the last layers. Unlike `early_exit`, which measures how good an early prediction is, this measures how
close it is to the final one: a model may be sure, and wrong, early. Over all tokens, scored or not; the scores are
means over l < L. Nothing is fitted, so a lens may miss information that is there.

Shapes: B and N sequences, T tokens of one sequence, n tokens, D width of the residual stream, V vocabulary, L layers.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import ScoreByLayer, shared_resamples
from sparsedepth.measure.loss import MAX_LOGITS
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import by_sequence, chunk_size, record_states
from sparsedepth.probe.probed_model import ProbedModel

TOP = 5
"""Number of most likely tokens compared, or all of a smaller vocabulary."""


def lens(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """lens_kl (nat) and lens_overlap of layers 0..L; the scores are means over layers 0..L-1. One forward pass and
    L + 1 heads."""
    kl_overlap_N2L = by_sequence(probed, tokens_NT, lambda tokens_BT: _batch_lens(probed, tokens_BT))
    mean = partial(shared_resamples(rng), lambda value_RL: value_RL[:, :-1].mean(-1))
    return {
        name: ScoreByLayer(by_layer=value_NL.mean(0).tolist(), score=mean(value_NL), first=0)
        for name, value_NL in (("lens_kl", kl_overlap_N2L[:, 0]), ("lens_overlap", kl_overlap_N2L[:, 1]))
    }


def _batch_lens(probed: ProbedModel, tokens_BT: Tensor) -> Tensor:
    """Means over the tokens of each sequence: kl and overlap, [B, 2, L + 1]."""
    states = record_states(probed, tokens_BT)
    n_sequences, n_tokens, _ = states[0].shape
    # The logits of all states exist at once. On a CPU each state still gets MAX_LOGITS: smaller chunks would cost more
    # in calls.
    chunk = max(1, max(MAX_LOGITS, chunk_size(probed.device, MAX_LOGITS) // len(states)) // probed.vocab_size)
    kl_overlap_2nL = states[0].new_zeros(2, n_sequences * n_tokens, len(states), dtype=torch.float64)
    for start in range(0, n_sequences * n_tokens, chunk):
        logits = [probed.logits(x_BTD.flatten(0, 1)[None, start : start + chunk])[0].float() for x_BTD in states]
        top = min(TOP, probed.vocab_size)
        final_nV, final_nK = logits[-1].log_softmax(-1), logits[-1].topk(top).indices
        for layer, logits_nV in enumerate(logits):
            log_p_nV = logits_nV.log_softmax(-1)
            kl_overlap_2nL[0, start : start + chunk, layer] = (log_p_nV.exp() * (log_p_nV - final_nV)).double().sum(-1)
            shared_nKK = logits_nV.topk(top).indices[:, :, None] == final_nK[:, None, :]
            kl_overlap_2nL[1, start : start + chunk, layer] = shared_nKK.any(-1).double().mean(-1)
    return kl_overlap_2nL.unflatten(1, (n_sequences, n_tokens)).mean(2).transpose(0, 1)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    if context.probed.causal:  # the head of a ViT reads only the class token
        rows.add_profiles(lens(context.probed, context.inputs, context.rng()), context.n_tokens)
