"""Products with the weights of one run, or of a stack of runs that train together.

    y = x W'        dx = g W        dW = g' x

In a stack of S runs (`train.stack`) each weight has a first dimension S, and x holds the runs one
after the other along its own first dimension: y_s = x_s W_s'. Operations without weights
(attention, rotation, SwiGLU, sums) treat x as one long batch.

`blas` is PyTorch's default for fp32 (on x86 Intel's MKL); `onednn` is oneDNN, which ships with
PyTorch. MKL uses AVX-512 on Intel processors only: on an AMD EPYC of Zen 5 oneDNN is 1.4 to 2.2
times as fast for products of `MIN_WORK` or more, except for the gradient of a small matrix
(`MIN_MATRIX`), where it first transposes an input; on Zen 4 0.5 to 1.3 times. Their last bits
differ. A stack, compiled blocks and other dtypes always use PyTorch's.

Shapes: N tokens, D width, X outputs; S runs of a stack, n tokens of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_WORK = 2**20
"""N D X from which oneDNN is worth its overhead of 8 microseconds per call."""

MIN_MATRIX = 3072
"""D X from which oneDNN's gradient of a matrix is faster."""


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives to a matrix product with x, or x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def project(x: Tensor, weight_XD: Tensor, kernel: str = "blas") -> Tensor:
    """x W'; in a stack, each run with its own W."""
    if weight_XD.ndim == 3:
        return torch.bmm(by_run(x, weight_XD), weight_XD.mT).view(*x.shape[:-1], -1)
    return _onednn(x, weight_XD) if _uses_onednn(x, weight_XD, kernel) else F.linear(x, weight_XD)


def gradients(grad: Tensor, x: Tensor, weight_XD: Tensor, kernel: str = "blas") -> tuple[Tensor, Tensor]:
    """dx and dW, from dy."""
    if weight_XD.ndim == 3:
        grad_SnX = by_run(grad, weight_XD)
        back = torch.bmm(grad_SnX, weight_XD).view(*grad.shape[:-1], -1)
        return back, torch.bmm(grad_SnX.mT, by_run(x, weight_XD))
    grad_NX, x_ND = grad.flatten(0, -2), x.flatten(0, -2)
    if not _uses_onednn(grad, weight_XD, kernel):
        return torch.mm(grad_NX, weight_XD).view(*grad.shape[:-1], -1), torch.mm(grad_NX.T, x_ND)
    back, (n_outputs, width) = _onednn(grad, weight_XD.T), weight_XD.shape
    if weight_XD.numel() < MIN_MATRIX:
        return back, grad_NX.T @ x_ND
    # oneDNN first transposes an input: the narrower one.
    return back, _onednn(grad_NX.T, x_ND.T) if n_outputs < width else _onednn(x_ND.T, grad_NX.T).T


def _onednn(x: Tensor, weight_XD: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_XD, None, "none", [], "")


def _uses_onednn(x: Tensor, weight_XD: Tensor, kernel: str) -> bool:
    n_tokens = x.numel() // x.shape[-1]
    return kernel == "onednn" and x.dtype == torch.float32 and n_tokens * weight_XD.numel() >= MIN_WORK


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
