"""Composite gain: how much the residual maps of several streams amplify activations forward and gradients backward.

    x_l = H_l x_(l-1) + what the branches of block l add,   H_l [n, n] of each token, over n streams
    H = H_L .. H_(l+1) H_l
    forward gain of layer l  = mean over tokens of max_i |sum_j H_ij|     rows: equal streams, as after the embedding
    backward gain of layer l = mean over tokens of max_j |sum_i H_ij|     columns: the gradient comes back as H^T g

2512.24880, section 3.1 and figure 3(b), 'Amax gain magnitude'; the model's own is that of layer 1. It is 1 for a
residual sum and for any product of doubly stochastic maps; that of plain hyper-connections is unbounded, and reached
3000 there. Deviates: a layer there is a branch, here a block, so H_l is the product of its two branches' maps.

Shapes: N and B sequences, T tokens of one sequence, D channels of all streams, n streams, L layers, R resamples.
"""

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import ScoreByLayer, bootstrap, finite
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import batches, probing, record_states
from sparsedepth.probe.probed_model import ProbedModel


def composite_gain(probed: ProbedModel, tokens_NT: Tensor, rng: np.random.Generator) -> dict[str, ScoreByLayer]:
    """composite_gain (forward) and composite_gain_backward of blocks l..L together, l = 1..L; the score is that of
    layer 1. Empty for a single stream. One forward pass without the head, and the attention parts twice."""
    parts = []
    with probing(probed):
        for tokens_BT in batches(probed, tokens_NT):
            states, product_BTnn, by_layer = record_states(probed, tokens_BT), None, []
            # Backwards, so that H_L .. H_l is the previous product times one factor.
            for layer in range(probed.n_layers, 0, -1):
                map_BTnn = probed.residual_map(layer, states[layer - 1])
                if map_BTnn is None:
                    return {}
                product_BTnn = map_BTnn if product_BTnn is None else product_BTnn @ map_BTnn
                by_layer.append([product_BTnn.sum(axis).abs().amax(-1).double().mean(1) for axis in (-1, -2)])
            parts.append(torch.stack([torch.stack(gains) for gains in reversed(by_layer)]).cpu())
    gain_L2N = torch.cat(parts, dim=-1).numpy()

    def gain(gain_LN: np.ndarray) -> ScoreByLayer:
        whole = bootstrap(lambda mean_R1: mean_R1[:, 0], gain_LN[:1].T, rng=rng)
        return ScoreByLayer(by_layer=[finite(value) for value in gain_LN.mean(1)], score=whole)

    return {"composite_gain": gain(gain_L2N[:, 0]), "composite_gain_backward": gain(gain_L2N[:, 1])}


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    rows.add_profiles(composite_gain(context.probed, context.inputs, context.rng()), context.n_tokens)
