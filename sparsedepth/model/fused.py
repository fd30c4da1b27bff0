"""Parts of a block with hand-written backward passes: fewer passes over memory than autograd's, same values.

    product   y = x W'                                      dx = g W,  dW = g' x, by `products`
    heads     q, k, v = x W',  q and k rotated              one product of the three matrices, forward and backward
    SwiGLU    y = silu(a) b,  a, b = x W'                   da = g b silu'(a),  db = g silu(a); one product of both
    RMSNorm   y = x s w,  s = 1/sqrt(mean(x^2) + eps):      dx = s (g w - x s^2 mean(x g w)),  dw = sum of g x s
    rotation  y = z c, channel pairs as complex numbers, |c| = 1:                              dz = g conj(c)

For eager training in fp32. Otherwise the plain formulas are used: a compiler fuses them (except, on a CPU, sums over
tokens, so there it gets this norm), bf16 has no complex numbers, and function transforms (the Jacobian's) need them.

Weights of a stack (`stacked`) have an extra first dimension, the runs, whose tokens are equal parts of x in order.

Shapes: N tokens, B sequences, T tokens, D width of the norm or projection, H query heads, G key/value heads, K head
width, X outputs of a matrix (for heads, their number times K); S runs of a stack, n tokens of each.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsedepth.model import products
from sparsedepth.model.stacked import by_run, times


def needs_fp32_grad(x: Tensor) -> bool:
    """Whether x needs a gradient, in fp32."""
    return x.requires_grad and torch.is_grad_enabled() and x.dtype == torch.float32


def use_fused(x: Tensor, *, compiled: bool = False) -> bool:
    """Whether to use this file's functions: training in fp32, eager or, where faster there too, `compiled`."""
    is_fp32 = needs_fp32_grad(x) and not torch.is_autocast_enabled(x.device.type)
    return is_fp32 and (compiled or not torch.compiler.is_compiling())


def is_inference(x: Tensor) -> bool:
    """Whether x is computed in inference mode, fp32 and eager, as in most measures."""
    is_plain = torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()
    return is_plain and x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_XD: Tensor, kernel: str) -> Tensor:
        ctx.save_for_backward(x, weight_XD)
        ctx.kernel = kernel
        return products.project(x, weight_XD, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *products.gradients(grads[0], *ctx.saved_tensors, ctx.kernel), None


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, query: Tensor, key: Tensor, value: Tensor, angle_TX: Tensor, kernel: str):
        ctx.save_for_backward(x_BTD, query, key, value, angle_TX)
        ctx.kernel, ctx.widths = kernel, [weight.shape[-2] for weight in (query, key, value)]
        y_BTX = products.project(x_BTD, torch.cat((query, key, value), dim=-2), kernel)
        _rotated(y_BTX, angle_TX).mul_(angle_TX)
        return torch.unsafe_split_with_sizes(y_BTX, ctx.widths, dim=-1)  # not views to autograd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BTX: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, *weights_XD, angle_TX = ctx.saved_tensors
        grad_BTX = torch.cat(grads_BTX, dim=-1)
        _rotated(grad_BTX, angle_TX).mul_(angle_TX.conj())
        grad_x_BTD, grad_XD = products.gradients(grad_BTX, x_BTD, torch.cat(weights_XD, dim=-2), ctx.kernel)
        return grad_x_BTD, *grad_XD.split(ctx.widths, dim=-2), None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        y = x * scale
        if weight.ndim == 1:
            return y.mul_(weight)
        by_run(y, weight).mul_(weight[:, None])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, scale, weight = ctx.saved_tensors
        # The weight's gradient is a sum over tokens, faster as a product.
        if weight.ndim == 1:
            grad_weight = scale.flatten() @ (grad * x).flatten(0, -2)
        else:
            grad_weight = torch.bmm(scale.view(len(weight), 1, -1), by_run(grad * x, weight)).squeeze(1)
        grad_unit = times(grad, weight)
        along = torch.linalg.vecdot(grad_unit, x).unsqueeze(-1).mul_(scale.square()).div_(-x.shape[-1])
        return grad_unit.addcmul_(x, along).mul_(scale), grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_XD: Tensor, up_XD: Tensor, kernel: str) -> Tensor:
        gate, up = (products.project(x, weight_XD, kernel) for weight_XD in (gate_XD, up_XD))
        ctx.save_for_backward(x, gate_XD, up_XD, gate, up)
        ctx.kernel = kernel
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, gate_XD, up_XD, gate, up = ctx.saved_tensors
        through = grad * up
        grad_gate = torch.ops.aten.silu_backward.grad_input(through, gate, grad_input=through)
        grad_both = torch.cat((grad_gate, F.silu(gate).mul_(grad)), dim=-1)
        grad_x, grad_XD = products.gradients(grad_both, x, torch.cat((gate_XD, up_XD), dim=-2), ctx.kernel)
        return grad_x, *grad_XD.chunk(2, dim=-2), None


def _rotated(y_BTX: Tensor, angle_TX: Tensor) -> Tensor:
    """A complex view of the first channels, as many pairs as there are angles."""
    return torch.view_as_complex(y_BTX[..., : 2 * angle_TX.shape[-1]].unflatten(-1, (-1, 2)))


def product(x: Tensor, weight_XD: Tensor, kernel: str = "blas") -> Tensor:
    """x W'."""
    return _Product.apply(x, weight_XD, kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight_D, or in a stack weight_SD; x and weight have the same dtype."""
    return _RMSNorm.apply(x, weight, eps)


def swiglu(x: Tensor, gate_XD: Tensor, up_XD: Tensor, kernel: str = "blas") -> Tensor:
    """silu(x gate') * (x up')."""
    return _SwiGLU.apply(x, gate_XD, up_XD, kernel)


def interleave_halves(weight_XD: Tensor, d_head: int) -> Tensor:
    """The rows of each head reordered to 0, K/2, 1, K/2 + 1, ...: RoPE's halves become adjacent pairs."""
    return weight_XD.unflatten(-2, (-1, 2, d_head // 2)).transpose(-3, -2).flatten(-4, -2)


def rotated_heads(
    x_BTD: Tensor,
    query_XD: Tensor,
    key_XD: Tensor,
    value_XD: Tensor,
    rotary: tuple[Tensor, Tensor],
    kernel: str = "blas",
) -> tuple[Tensor, Tensor, Tensor]:
    """q_BHTK, k_BGTK and v_BGTK with RoPE; q's and k's channels are permuted alike, which leaves q k unchanged.

    cos and sin are those of `Decoder.rotary`: pair i has its angle in columns i and K/2 + i. The rotation of a pair is
    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
    """
    d_head = rotary[0].shape[-1]
    angle_TK = torch.complex(*(part[:, : d_head // 2].contiguous() for part in rotary))
    angle_TX = angle_TK.repeat(1, (query_XD.shape[-2] + key_XD.shape[-2]) // d_head)
    query_XD, key_XD = interleave_halves(query_XD, d_head), interleave_halves(key_XD, d_head)
    parts = _RotatedHeads.apply(x_BTD, query_XD, key_XD, value_XD, angle_TX, kernel)
    q_BHTK, k_BGTK, v_BGTK = (part.unflatten(-1, (-1, d_head)).transpose(1, 2) for part in parts)
    return q_BHTK, k_BGTK, v_BGTK
