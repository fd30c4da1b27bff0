"""Participation ratio: among how many directions the residual stream spreads its variance, layer by layer.

    C_l = covariance over tokens of the entries of x_l
    participation ratio of layer l = (tr C_l)^2 / tr C_l^2 = (sum of eigenvalues)^2 / sum of their squares,   l = 0..L

It is 1 where one direction holds all variance, and k where k directions hold equal shares. Unlike residual variance it
does not change when the stream grows as a whole: a stream that a few growing directions take over has more and more
variance and a falling ratio. Source: Litwin-Kumar et al. 2017 (Neuron 93, 1153); along the layers of networks
1906.00443.

Of n tokens it is biased downwards: 1 / ratio is too large by about 1 / n, where tokens are independent. There is no
interval: resamples of sequences would need a D x D matrix for each sequence.

Shapes: B and N sequences, T tokens of one sequence, n tokens of a batch, D width of the residual stream, L layers.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedepth.measure.bootstrap import finite
from sparsedepth.probe.fork import MAX_TOKENS, batches, probing, stream
from sparsedepth.probe.stack import Stack


@dataclass(frozen=True, kw_only=True)
class Participation:
    by_layer: list[float | None]
    """layers 0..L; None where no entry varies"""
    mean: float | None
    """over layers 1..L; None where one of them is"""
    n_tokens: int


def participation(stack: Stack, tokens_NT: Tensor, max_tokens: int = MAX_TOKENS) -> Participation:
    """One forward pass without the head; it keeps 8 (L + 1) D^2 bytes."""
    sums: dict[int, list[Tensor]] = defaultdict(list)
    with probing(stack):
        for tokens_BT in batches(stack, tokens_NT, max_tokens):
            for layer, x_BTD in enumerate(stream(stack, tokens_BT)):
                x_nD = x_BTD.flatten(0, 1).double()
                moments = [x_nD.sum(0), x_nD.T @ x_nD]
                sums[layer] = [a + b for a, b in zip(sums[layer], moments, strict=True)] if sums[layer] else moments
    by_layer = [_ratio(*sums[layer], tokens_NT.numel()) for layer in range(stack.n_layers + 1)]
    known = [value for value in by_layer[1:] if value is not None]
    mean = sum(known) / len(known) if len(known) == stack.n_layers else None
    return Participation(by_layer=by_layer, mean=mean, n_tokens=tokens_NT.numel())


def _ratio(sum_D: Tensor, product_DD: Tensor, n_tokens: int) -> float | None:
    mean_D = sum_D / n_tokens
    covariance_DD = product_DD / n_tokens - torch.outer(mean_D, mean_D)
    trace = covariance_DD.trace()
    if trace <= 1e-12 * product_DD.trace() / n_tokens:  # what rounding leaves of a stream that does not vary
        return None
    return finite((trace**2 / covariance_DD.square().sum()).item())
