"""The products of a matrix with its input, and of its derivatives, by one of two libraries that agree.

    y = x W'        dx = g W        dW = g' x

`blas` is what PyTorch multiplies fp32 with, on x86 Intel's MKL; `onednn` is oneDNN, which PyTorch brings along. MKL
uses AVX-512 on Intel's processors alone: on an AMD EPYC that has it, oneDNN is 1.4 to 2.2 times as fast from
`LEAST_WORK` on, but not for the derivative of a small matrix (`LEAST_MATRIX`), one of whose factors it must first turn.
They sum in another order, so the last bits differ; each gives the same bits at each call. Products of a stack
(`stacked`), and of other dtypes, are always PyTorch's.

Shapes: N tokens, D width, X outputs; S runs of a stack, n tokens of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.model.stacked import by_run

LEAST_WORK = 2**20
"""N D X, from which a call of oneDNN pays for its overhead of 8 microseconds."""

LEAST_MATRIX = 3072
"""D X, from which its derivative of a matrix is the faster one."""


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast asks of a matrix product with x, or x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def project(x: Tensor, weight_XD: Tensor, kernel: str = "blas") -> Tensor:
    """x W', of a stack each run's with its own W."""
    if weight_XD.ndim == 3:
        product = x.new_empty(*x.shape[:-1], weight_XD.shape[1])
        torch.bmm(by_run(x, weight_XD), weight_XD.mT, out=by_run(product, weight_XD))
        return product
    return _onednn(x, weight_XD) if _uses_onednn(x, weight_XD, kernel) else F.linear(x, weight_XD)


def gradients(grad: Tensor, x: Tensor, weight_XD: Tensor, kernel: str = "blas") -> tuple[Tensor, Tensor]:
    """dx and dW, from dy."""
    return _project_back(grad, weight_XD, kernel), _weight_gradient(grad, x, weight_XD, kernel)


def _project_back(grad: Tensor, weight_XD: Tensor, kernel: str) -> Tensor:
    if weight_XD.ndim == 3:
        return torch.bmm(by_run(grad, weight_XD), weight_XD).view(*grad.shape[:-1], -1)
    return _onednn(grad, weight_XD.T) if _uses_onednn(grad, weight_XD, kernel) else grad @ weight_XD


def _weight_gradient(grad: Tensor, x: Tensor, weight_XD: Tensor, kernel: str) -> Tensor:
    if weight_XD.ndim == 3:
        return torch.bmm(by_run(grad, weight_XD).mT, by_run(x, weight_XD))
    grad_NX, x_ND = grad.flatten(0, -2), x.flatten(0, -2)
    if weight_XD.numel() < LEAST_MATRIX or not _uses_onednn(x_ND, weight_XD, kernel):
        return grad_NX.T @ x_ND
    n_outputs, width = weight_XD.shape  # the narrower input is the one that gets turned
    return _onednn(grad_NX.T, x_ND.T) if n_outputs < width else _onednn(x_ND.T, grad_NX.T).T


def _onednn(x: Tensor, weight_XD: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.sparsedepth.onednn(x, weight_XD)
    return _linear(x, weight_XD)


def _linear(x: Tensor, weight_XD: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_XD, None, "none", [], "")


# The compiler takes oneDNN's operation itself only of weights that never change, so it gets it under another name.
_LIBRARY = torch.library.Library("sparsedepth", "DEF")
_LIBRARY.define("onednn(Tensor x, Tensor weight_XD) -> Tensor")
_LIBRARY.impl("onednn", _linear, "CPU")
_LIBRARY.impl("onednn", lambda x, weight_XD: x.new_empty(*x.shape[:-1], len(weight_XD)), "Meta")


def _uses_onednn(x: Tensor, weight_XD: Tensor, kernel: str) -> bool:
    n_tokens = x.numel() // x.shape[-1]
    return kernel == "onednn" and x.dtype == torch.float32 and n_tokens * weight_XD.numel() >= LEAST_WORK
