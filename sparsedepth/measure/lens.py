"""Predictions from early layers: their loss (`early_exit`), and how far they are from the model's own (`lens`).

    logit lens(l) = loss of head(final norm(x_l)),   l = 0..L; at L it is the model's own loss
    last block(l) = loss of head(final norm(block_L(x_l))),   l = 0..L-1; at L - 1 the model's own loss
    score = mean over the exits before the model's own of (loss at the exit - loss) / loss

    p_l = softmax(head(final norm(x_l))),   p = p_L,   l = 0..L
    kl(l) = E_tokens sum_v p_l ln(p_l / p)      top-5 overlap(l) = E_tokens |top5(p_l) and top5(p)| / 5

Exits through the last block are of 2602.05970, the plain lens, kl and overlap of 2505.13898, which locates the layer
after which the model only refines its prediction: kl falls, and overlap rises, only over the last layers. A model may
be sure, and wrong, early: a low loss increase means that the blocks in between add little to the prediction, a low kl
that they no longer change it. Nothing is fitted, and head and last block were trained on deep states only, so an early
loss may exceed ln V, that of guessing, and a lens may miss information that is there.

Losses are over scored positions; kl and overlap over all tokens, their scores means over l < L.

Shapes: E exits.
"""

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import ScoreByLayer, finites, mean_of_last, shared_resamples
from sparsedepth.measure.loss import MAX_LOGITS, relative_change, sequence_loss
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored
from sparsedepth.probe.fork import by_sequence, chunk_size, probing, record_states, stream
from sparsedepth.probe.probed_model import ProbedModel

TOP = 5
"""Number of most likely tokens compared, or all of a smaller vocabulary."""


def early_exit(probed: ProbedModel, scored: Scored, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """lens_loss and early_exit_loss, by logit lens and through the last block, nat/token; the scores are None without
    other exits than the model's own. One forward pass, L - 1 extra blocks, 2 L heads."""
    with probing(probed):
        parts = [_exit_losses(probed, part, scored.scale) for part in scored.parts(probed)]
        losses = [torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)]
    estimate = shared_resamples(rng)

    def mean_increase(loss_RE: np.ndarray) -> np.ndarray:
        return mean_of_last(relative_change(loss_RE[:, :-1], loss_RE[:, -1:]))

    return {
        name: ScoreByLayer(by_layer=finites(loss_NE.mean(0)), score=estimate(mean_increase, loss_NE), first=0)
        for name, loss_NE in zip(("lens_loss", "early_exit_loss"), losses, strict=True)
    }


def _exit_losses(probed: ProbedModel, part: Scored, scale: float) -> tuple[Tensor, Tensor]:
    """Losses of each sequence: by logit lens [B, L + 1], through the last block [B, L]."""
    last = probed.n_layers
    lens, through = [], []
    for layer, x_BTD in enumerate(stream(probed, part.inputs)):
        lens.append(sequence_loss(probed, x_BTD[None], part.targets, scale)[0])
        if layer < last - 1:
            through.append(sequence_loss(probed, probed.block(last, x_BTD)[None], part.targets, scale)[0])
    through.append(lens[-1])  # block L of x_(L-1) is x_L
    return torch.stack(lens, dim=1), torch.stack(through, dim=1)


def lens(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """lens_kl (nat) and lens_overlap of layers 0..L. One forward pass and L + 1 heads."""
    kl_overlap_N2L = by_sequence(probed, tokens_NT, lambda tokens_BT: _batch_lens(probed, tokens_BT))
    estimate = shared_resamples(rng)

    def mean_before_last(value_RL: np.ndarray) -> np.ndarray:
        return value_RL[:, :-1].mean(-1)

    return {
        name: ScoreByLayer(by_layer=finites(value_NL.mean(0)), score=estimate(mean_before_last, value_NL), first=0)
        for name, value_NL in zip(("lens_kl", "lens_overlap"), np.moveaxis(kl_overlap_N2L, 1, 0), strict=True)
    }


def _batch_lens(probed: ProbedModel, tokens_BT: Tensor) -> Tensor:
    """Means over the tokens of each sequence: kl and overlap, [B, 2, L + 1]."""
    states = record_states(probed, tokens_BT)
    n_sequences, n_tokens, _ = states[0].shape
    # The logits of all states exist at once. On a CPU each state still gets MAX_LOGITS: smaller chunks would cost more
    # in calls.
    chunk = max(1, max(MAX_LOGITS, chunk_size(probed.device, MAX_LOGITS) // len(states)) // probed.vocab_size)
    kl_overlap_2nL = states[0].new_zeros(2, n_sequences * n_tokens, len(states), dtype=torch.float64)
    top = min(TOP, probed.vocab_size)
    for start in range(0, n_sequences * n_tokens, chunk):
        logits = [probed.logits(x_BTD.flatten(0, 1)[None, start : start + chunk])[0].float() for x_BTD in states]
        final_nV, final_nK = logits[-1].log_softmax(-1), logits[-1].topk(top).indices
        for layer, logits_nV in enumerate(logits):
            log_p_nV = logits_nV.log_softmax(-1)
            kl_overlap_2nL[0, start : start + chunk, layer] = (log_p_nV.exp() * (log_p_nV - final_nV)).double().sum(-1)
            shared_nKK = logits_nV.topk(top).indices[:, :, None] == final_nK[:, None, :]
            kl_overlap_2nL[1, start : start + chunk, layer] = shared_nKK.any(-1).double().mean(-1)
    return kl_overlap_2nL.unflatten(1, (n_sequences, n_tokens)).mean(2).transpose(0, 1)


def add_exit_rows(context: MeasureContext, rows: Measurements) -> None:
    profiles = early_exit(context.probed, context.scored, context.rng())
    rows.add_profiles(profiles, context.scored.n_scored, {name: f"{name}_increase" for name in profiles})


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    if context.probed.causal:  # the head of a ViT reads only the class token
        rows.add_profiles(lens(context.probed, context.inputs, context.rng()), context.n_tokens)
