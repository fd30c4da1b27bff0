"""Products with the weights of one run, or of a stack of runs that train together.

    y = x W'        dx = g W        dW = g' x

In a stack of S runs (`train.stack`) each weight has a first dimension S, and x holds the runs one
after the other along its own first dimension: y_s = x_s W_s'. Operations without weights
(attention, rotation, SwiGLU, sums) treat x as one long batch.

Shapes: N tokens, D width, X outputs; S runs of a stack, n tokens of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives to a matrix product with x, or x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def project(x: Tensor, weight_XD: Tensor) -> Tensor:
    """x W'; in a stack, each run with its own W."""
    if weight_XD.ndim == 2:
        return F.linear(x, weight_XD)
    return torch.bmm(by_run(x, weight_XD), weight_XD.mT).view(*x.shape[:-1], -1)


def gradients(grad: Tensor, x: Tensor, weight_XD: Tensor) -> tuple[Tensor, Tensor]:
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
    if weight.ndim < 2:
        return x * weight
    return (by_run(x, weight) * weight[:, None]).view_as(x)


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
