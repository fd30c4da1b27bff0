"""Operations with the weights of a stack: S runs trained together, their weights stacked along a
new first dimension.

    y_s = x_s W_s'     for the runs s = 1..S, in one batched product

x holds the runs one after the other along its first dimension. Operations without weights
(attention, rotation, SwiGLU, sums) treat it as one long batch.

Shapes: S runs; B sequences of all runs, grouped by run; n tokens of one run, D width, X outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def by_run(x: Tensor, weight: Tensor) -> Tensor:
    """x_SnD: the tokens of x, grouped by run."""
    return x.reshape(len(weight), -1, x.shape[-1])


def linear(x: Tensor, weight_SXD: Tensor) -> Tensor:
    """x W' with each run's own W."""
    return torch.bmm(by_run(x, weight_SXD), weight_SXD.mT).view(*x.shape[:-1], -1)


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
    """Numbers below n_numbers of each run's tokens, along the first dimension, as numbers among
    those of all runs."""
    first_S1 = torch.arange(n_runs, device=number.device)[:, None] * n_numbers
    return (number.view(n_runs, -1) + first_S1).view_as(number)


def embedding(token_BT: Tensor, weight_SVD: Tensor) -> Tensor:
    """x_BTD, each run's tokens looked up in its own embedding."""
    return F.embedding(number_by_run(token_BT, *weight_SVD.shape[:2]), weight_SVD.flatten(0, 1))
