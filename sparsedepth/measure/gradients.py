"""Gradient along depth: the norm of the loss's gradient with respect to the residual stream, by layer.

    g_l = d loss / d x_l,   stream_gradient of layer l = ||g_l|| / ||g_L||, l = 0..L
    gradient_gain = that of layer 0

Norms are over all entries of all tokens; the scale of the loss, a mean over scored positions, cancels. With a gain of 1
and all layers at 1 the model learns as if it were one block; 2502.05795 (Theorem 3.3) bounds it for Pre-LN, whose deep
blocks approach the identity, and lets it grow with depth for LNS. Derivatives are along the stream: what a block reads
of x_0 or of block 1's values (`residual_scalars`, `value_residual`) is held constant. If this measure is requested,
training records the gradients of each block's weights (`gradient_norm`, `train.loop`).
"""

import numpy as np
import torch
import torch.nn.functional as F

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import ScoreByLayer, bootstrap, finites, ratio
from sparsedepth.measure.jacobian import GRAPH_MEMORY
from sparsedepth.measure.measurements import MeasureContext, Measurements, Scored
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedModel


def gradients(probed: ProbedModel, scored: Scored, rng: np.random.Generator) -> ScoreByLayer:
    """Layers 0..L, 1 at L, and the gain; None if no gradient reaches x_L. One forward and one
    backward pass, with a graph of all blocks."""
    parts = []
    with probing(probed, gradients=True):
        for part in scored.parts(probed, GRAPH_MEMORY):
            with torch.enable_grad():
                states = [probed.embed(part.inputs).detach().requires_grad_()]
                for layer in range(1, probed.n_layers + 1):
                    states.append(probed.block(layer, states[-1]))
                logits_NV, target_N = probed.logits(states[-1]).flatten(0, 1), part.targets.flatten()
                # The sum, not the mean, so that batches add up.
                loss = F.cross_entropy(logits_NV, target_N, ignore_index=IGNORED, reduction="sum")
                grads = torch.autograd.grad(loss, states)
            parts.append(torch.stack([grad.double().square().sum((1, 2)) for grad in grads], dim=1).cpu())
    square_NL = torch.cat(parts).numpy()

    def by_layer(square_RL: np.ndarray) -> np.ndarray:
        return np.sqrt(ratio(square_RL, square_RL[:, -1:]))

    score = bootstrap(lambda square_RL: by_layer(square_RL)[:, 0], square_NL, rng=rng)
    return ScoreByLayer(by_layer=finites(by_layer(square_NL.mean(0)[None])[0]), score=score, first=0)


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    profile = gradients(context.probed, context.scored, context.rng())
    rows.add_profiles({"stream_gradient": profile}, context.n_tokens, {"stream_gradient": "gradient_gain"})
