"""Linear layers, embeddings, and products with the weights of one run, or of a stack of runs.

    y = x W'        dx = g W        dW = g' x

In a stack of S runs (`train.stack`) each weight has a first dimension S, and x holds the runs one
after the other along its own first dimension: y_s = x_s W_s'. Operations without weights
(attention, rotation, SwiGLU, sums) treat x as one long batch.

Shapes: B sequences, T positions, N tokens, D width, X outputs; S runs of a stack, n tokens of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig

TensorPair = tuple[Tensor, Tensor]
"""Two that belong together, named where they are returned."""


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives to a matrix product with x, or x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def project(x: Tensor, weight_XD: Tensor) -> Tensor:
    """x W'; in a stack, each run with its own W."""
    if weight_XD.ndim == 2:
        return F.linear(x, weight_XD)
    return torch.bmm(by_run(x, weight_XD), weight_XD.mT).view(*x.shape[:-1], -1)


def gradients(grad: Tensor, x: Tensor, weight_XD: Tensor) -> TensorPair:
    """dx and dW, from dy."""
    if weight_XD.ndim == 2:
        grad_NX = grad.flatten(0, -2)
        return torch.mm(grad_NX, weight_XD).view(*grad.shape[:-1], -1), torch.mm(grad_NX.T, x.flatten(0, -2))
    grad_SnX = by_run(grad, weight_XD)
    back = torch.bmm(grad_SnX, weight_XD).view(*grad.shape[:-1], -1)
    return back, torch.bmm(grad_SnX.mT, by_run(x, weight_XD))


def by_run(x: Tensor, weight: Tensor) -> Tensor:
    """x_SnD: the tokens of x, grouped by run."""
    return x.reshape(len(weight), -1, x.shape[-1])


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x * weight; in a stack, each run times its own weight_SD or weight_S1."""
    return x * weight if weight.ndim < 2 else (by_run(x, weight) * weight[:, None]).view_as(x)


def plus(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias; in a stack, each run plus its own bias_SD."""
    return x + bias if bias.ndim < 2 else (by_run(x, bias) + bias[:, None]).view_as(x)


def token_mean(x_NX: Tensor, weight: Tensor) -> Tensor:
    """The mean over tokens; in a stack, mean_SX over each run's own."""
    return x_NX.mean(0) if weight.ndim < 3 else by_run(x_NX, weight).mean(1)


def number_by_run(number: Tensor, n_runs: int, n_numbers: int) -> Tensor:
    """Each run's numbers, below n_numbers, as numbers among those of all runs."""
    first_S1 = torch.arange(n_runs, device=number.device)[:, None] * n_numbers
    return (number.view(n_runs, -1) + first_S1).view_as(number)


class Linear(nn.Linear):
    """A matrix without bias: x W'."""

    def __init__(self, n_inputs: int, n_outputs: int):
        super().__init__(n_inputs, n_outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight)


def project_together(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """x W' for each W. In training under autocast as one product, which casts and stores x once and
    sums the gradients of the parts; no hook of the layers runs."""
    x = x.to(product_dtype(x))
    is_mixed = torch.is_autocast_enabled(x.device.type)
    if not (is_mixed and linears[0].training and linears[0].weight.ndim == 2):
        return tuple(linear(x) for linear in linears)
    matrix_XD = torch.cat([linear.weight for linear in linears])
    return F.linear(x, matrix_XD).split([linear.out_features for linear in linears], dim=-1)


class Embedding(nn.Embedding):
    def __init__(self, config: ModelConfig):
        super().__init__(config.vocab_size, config.d_model)

    def random_inputs(self, n_sequences: int, n_tokens: int, draws: torch.Generator) -> Tensor:
        return torch.randint(self.weight.shape[-2], (n_sequences, n_tokens), generator=draws)

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return super().forward(input)
        return F.embedding(number_by_run(input, *self.weight.shape[:2]), self.weight.flatten(0, 1))
