"""Activation sparsity: the share of hidden units of dense feed-forward parts that are inactive.

    h = input of the down projection, F numbers per token
    zeros     share of the h that are exactly 0
    sparsity  share with |h| < NEAR_ZERO rms(h), rms over all tokens and units of the layer
    units     E over tokens of (sum_f h_f^2)^2 / (F sum_f h_f^4): 1 if all units are equal, 1/F if one dominates

relu, reglu and relu2 give exact zeros (counted by 2210.06313 in ReLU transformers); smooth functions do not, and are
compared by the other two. 2603.15389, section 3.2.1, lists activations as a form of sparsity. A token with h = 0 has no
`units`. Layers of experts have no dense part and are left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import finite
from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import batches, block_inputs, probing
from sparsedepth.probe.probed_model import ProbedModel

NEAR_ZERO = 0.1
"""Threshold relative to the rms of a layer's hidden units, as the first of weight_rel_eps."""


def activations(probed: ProbedModel, tokens_NT: Tensor) -> dict[str, list[float | None]]:
    """The quantities above of layers 1..L; None for experts, or (units) if all hidden units are 0. Two
    passes without the head, the first for the rms of each layer; each block runs to its hidden units twice."""
    squares: dict[int, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    sums: dict[int, Tensor] = defaultdict(lambda: torch.zeros(2, 3, dtype=torch.float64))  # and numbers of tokens
    with probing(probed):
        for layer, h_nF in _hidden(probed, tokens_NT):
            squares[layer] += torch.tensor([h_nF.square().sum().item(), h_nF.numel()])
        for layer, h_nF in _hidden(probed, tokens_NT):
            total, count = squares[layer].tolist()
            is_zero = h_nF == 0
            is_near = is_zero | (h_nF.abs() < NEAR_ZERO * math.sqrt(total / count))
            energy_n, fourth_n = h_nF.square().sum(1), h_nF.pow(4).sum(1)
            unit_n = (energy_n.square() / (h_nF.shape[1] * fourth_n))[fourth_n > 0]
            shares = [float(share.double().mean(1).sum()) for share in (is_zero, is_near)]
            sums[layer] += torch.tensor([[*shares, float(unit_n.sum())], [len(h_nF), len(h_nF), len(unit_n)]])
    means = {layer: (sum_23[0] / sum_23[1]).tolist() for layer, sum_23 in sums.items()}
    return {
        name: [finite(means[layer][i]) if layer in means else None for layer in range(1, probed.n_layers + 1)]
        for i, name in enumerate(("activation_zeros", "activation_sparsity", "activation_units"))
    }


def _hidden(probed: ProbedModel, tokens_NT: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(layer, h_nF in fp64) of each batch and dense layer."""
    for tokens_BT in batches(probed, tokens_NT):
        for layer, x_BTD in block_inputs(probed, tokens_BT):
            if (h_BTF := probed.hidden_units(layer, x_BTD)) is not None:
                yield layer, h_BTF.flatten(0, 1).double()


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    for name, by_layer in activations(context.probed, context.inputs).items():
        if known := [share for share in by_layer if share is not None]:  # a mixture of experts may have no dense part
            rows.summary[name] = sum(known) / len(known)
            rows.add_layers(name, by_layer, context.n_tokens)
