"""Early exit: the loss of a model that stops after layer l.

    logit lens(l) = loss of head(final norm(x_l)),   l = 0..L; at L it is the model's own loss
    last block(l) = loss of head(final norm(block_L(x_l))),   l = 0..L-1; at L - 1 it is the model's own loss
    score = mean over the exits before the model's own of (loss at the exit - loss) / loss

Source: 2602.05970, whose exits go through the last block; the plain lens as in 2505.13898 (which compares
distributions, not losses). A low score means that the blocks in between add little to the prediction. Neither exit is
calibrated: head and last block were trained on deep states only, so an early loss may exceed ln V, that of guessing.

Shapes: B and N sequences, T tokens of one sequence, D width of the residual stream, E exits, R resamples.
"""

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import ScoreByLayer, finite, mean_of_last, shared_resamples
from sparsedepth.measure.loss import relative_change, sequence_loss
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.probed_model import ProbedModel


def early_exit(probed: ProbedModel, scored: Scored, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """Loss at every exit, nat/token, the last one the model's own; the scores are as above, None without other exits.

    lens_loss: by logit lens, layers 0..L; early_exit_loss: through the last block, layers 0..L-1. One forward pass,
    L - 1 extra blocks, 2 L heads.
    """
    with probing(probed):
        parts = [_exit_losses(probed, part, scored.scale) for part in scored.parts(probed)]
        lens_NE, block_NE = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    estimate = shared_resamples(rng)

    def mean_increase(loss_RE: np.ndarray) -> np.ndarray:
        return mean_of_last(relative_change(loss_RE[:, :-1], loss_RE[:, -1:]))

    def exits(loss_NE: np.ndarray) -> ScoreByLayer:
        by_layer = [finite(loss_N.mean()) for loss_N in loss_NE.T]
        return ScoreByLayer(by_layer=by_layer, score=estimate(mean_increase, loss_NE), first=0)

    return {"lens_loss": exits(lens_NE), "early_exit_loss": exits(block_NE)}


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


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    for name, exits in early_exit(context.probed, context.scored, context.rng()).items():
        rows.add_profile(name, exits, context.scored.n_scored, score=f"{name}_increase")
