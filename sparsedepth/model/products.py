"""Matrix products and their gradients, by one of two libraries.

    y = x W'        dx = g W        dW = g' x

`blas` is PyTorch's default for fp32 (on x86 Intel's MKL); `onednn` is oneDNN, which ships with
PyTorch. MKL uses AVX-512 on Intel processors only: on an AMD EPYC that computes 512 bits at once
(Zen 5), oneDNN is 1.4 to 2.2 times as fast for products of `MIN_WORK` or more, except for the
gradient of a small matrix (`MIN_MATRIX`), where it must first transpose an input. On Zen 4 it is
0.5 to 1.3 times as fast, depending on size, and not used by default. Their summation order, and so
the last bits, differ; each is deterministic. Products of a stack (`stacked`) and of other dtypes
are always PyTorch's.

Shapes: N tokens, D width, X outputs; S runs of a stack, n tokens of each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.model import stacked
from sparsedepth.model.stacked import by_run

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
        return stacked.linear(x, weight_XD)
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
    if torch.compiler.is_compiling():
        return torch.ops.sparsedepth.onednn(x, weight_XD)
    return _linear(x, weight_XD)


def _linear(x: Tensor, weight_XD: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_XD, None, "none", [], "")


# The compiler accepts oneDNN's own operation for constant weights only, so it gets this one.
_LIBRARY = torch.library.Library("sparsedepth", "DEF")
_LIBRARY.define("onednn(Tensor x, Tensor weight_XD) -> Tensor")
_LIBRARY.impl("onednn", _linear, "CPU")
_LIBRARY.impl("onednn", lambda x, weight_XD: x.new_empty(*x.shape[:-1], len(weight_XD)), "Meta")


def _uses_onednn(x: Tensor, weight_XD: Tensor, kernel: str) -> bool:
    n_tokens = x.numel() // x.shape[-1]
    return kernel == "onednn" and x.dtype == torch.float32 and n_tokens * weight_XD.numel() >= MIN_WORK
