"""Parts of a block with hand-written backward passes: fewer operations than autograd's.

    heads     q, k, v = n W',  q and k rotated              one product of the three matrices, forward and backward
    SwiGLU    y = silu(a) b,  a, b = n W'                   da = g b silu'(a),  db = g silu(a)
    RMSNorm   n = x s w,  s = 1/sqrt(mean(x^2) + eps):      dx = s (g w - x s^2 mean(x g w)),  dw = sum of g x s
    rotation  y = z c, channel pairs as complex numbers, |c| = 1:                              dz = g conj(c)

n is the RMSNorm of x: small models spend most of a step on the overhead of operations. Not for
compiled blocks (a compiler fuses the plain formulas, except, on a CPU, sums over tokens, so there
it gets this norm), nor for bf16, which has no complex numbers, nor for function transforms (the
Jacobian's). Weights may be those of a stack (`products`).

Shapes: B sequences, T tokens, D width of the norm or projection, H query heads, G key/value heads,
K head width, X outputs of a matrix (for heads, their number times K)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsedepth.model.linear import TensorPair, by_run, gradients, project, times


def needs_fp32_grad(x: Tensor) -> bool:
    """Whether x needs a gradient, in fp32."""
    return x.requires_grad and torch.is_grad_enabled() and x.dtype == torch.float32


def use_fused(x: Tensor, training: bool) -> bool:
    """Whether to use these functions: in eager fp32, in training or inference mode."""
    if x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return False
    return torch.is_inference_mode_enabled() or (training and needs_fp32_grad(x))


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, norm: Tensor, eps: float, angle_TX: Tensor, d_head: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        query, key, value = weights
        normed_BTD, scale = rms_normed(x_BTD, norm, eps)
        weight_XD = torch.cat((interleave_halves(torch.cat((query, key), dim=-2), d_head), value), dim=-2)
        y_BTX = project(normed_BTD, weight_XD)
        _rotated(y_BTX, angle_TX).mul_(angle_TX)
        ctx.save_for_backward(x_BTD, normed_BTD, scale, norm, weight_XD, angle_TX)
        ctx.d_head = d_head
        ctx.widths = [weight.shape[-2] for weight in weights]
        n_heads = [width // d_head for width in ctx.widths]
        return y_BTX.unflatten(-1, (-1, d_head)).transpose(1, 2).split(n_heads, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, normed_BTD, scale, norm, weight_XD, angle_TX = ctx.saved_tensors
        grad_BTX = torch.cat([grad.transpose(1, 2) for grad in grads_BHTK], dim=2).flatten(2)
        _rotated(grad_BTX, angle_TX).mul_(angle_TX.conj())
        grad_BTD, grad_XD = gradients(grad_BTX, normed_BTD, weight_XD)
        pairs_XD, grad_value = grad_XD.split((sum(ctx.widths[:2]), ctx.widths[2]), dim=-2)
        halves_XD = pairs_XD.unflatten(-2, (-1, ctx.d_head // 2, 2)).transpose(-3, -2).flatten(-4, -2)
        grads_XD = (*halves_XD.split(ctx.widths[:2], dim=-2), grad_value)
        return *_norm_gradients(grad_BTD, x_BTD, scale, norm), None, None, None, *grads_XD


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = rms_normed(x, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_norm_gradients(grads[0], *ctx.saved_tensors), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, gate_XD: Tensor, up_XD: Tensor) -> Tensor:
        normed, scale = rms_normed(x, norm, eps)
        gate, up = (project(normed, weight_XD) for weight_XD in (gate_XD, up_XD))
        ctx.save_for_backward(x, normed, scale, norm, gate_XD, up_XD, gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, normed, scale, norm, gate_XD, up_XD, gate, up = ctx.saved_tensors
        through = grad * up
        grad_gate = torch.ops.aten.silu_backward.grad_input(through, gate, grad_input=through)
        grad_up = F.silu(gate).mul_(grad)
        grad_normed, grad_gate_XD = gradients(grad_gate, normed, gate_XD)
        grad_up_normed, grad_up_XD = gradients(grad_up, normed, up_XD)
        grad_normed.add_(grad_up_normed)
        return *_norm_gradients(grad_normed, x, scale, norm), None, grad_gate_XD, grad_up_XD


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> TensorPair:
    """x s w, and s."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = x * scale
    if weight.ndim == 1:
        y.mul_(weight)
    else:
        by_run(y, weight).mul_(weight[:, None])
    return y, scale


def _norm_gradients(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> TensorPair:
    """dx and dw, from dy of `rms_normed`; dw, a sum over tokens, as a product, which is faster."""
    if weight.ndim == 1:
        grad_weight = torch.mv((grad * x).flatten(0, -2).T, scale.flatten())
    else:
        grad_weight = torch.bmm(scale.view(len(weight), 1, -1), by_run(grad * x, weight)).squeeze(1)
    grad_unit = times(grad, weight)
    along = torch.linalg.vecdot(grad_unit, x).unsqueeze(-1).mul_(scale.square()).div_(-x.shape[-1])
    return grad_unit.addcmul_(x, along).mul_(scale), grad_weight


def _rotated(y_BTX: Tensor, angle_TX: Tensor) -> Tensor:
    """A complex view of the first channels, as many pairs as there are angles."""
    return torch.view_as_complex(y_BTX[..., : 2 * angle_TX.shape[-1]].unflatten(-1, (-1, 2)))


def interleave_halves(weight_XD: Tensor, d_head: int) -> Tensor:
    """The rows of each head in the order 0, K/2, 1, K/2 + 1, ...: RoPE's halves become pairs."""
    return weight_XD.unflatten(-2, (-1, 2, d_head // 2)).transpose(-3, -2).flatten(-4, -2)


def angles(cos_TK: Tensor, sin_TK: Tensor, n_heads: int) -> Tensor:
    """cos + i sin of each pair of n_heads heads; pair i has its angle in columns i and K/2 + i."""
    angle_TK = torch.complex(*(part[:, : part.shape[1] // 2].contiguous() for part in (cos_TK, sin_TK)))
    return angle_TK.repeat(1, n_heads)


rms_norm = _RMSNorm.apply
"""(x, weight, eps) -> n, of one dtype"""
swiglu = _SwiGLU.apply
"""(x, norm's weight, eps, gate_XD, up_XD) -> silu(n gate') * (n up')"""
rotated_heads = _Heads.apply
"""(x_BTD, norm's weight, eps, angle_TX, d_head, query_XD, key_XD, value_XD) -> q_BHTK, k_BGTK and
v_BGTK of n; q and k with RoPE by their `angles`, and permuted channels, which leaves q k unchanged"""
