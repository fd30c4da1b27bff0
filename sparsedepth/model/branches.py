"""A whole branch of a plain block with its derivative by hand: norm, products, and the sum with the stream.

    attention   x + A W_o',   A = softmax(q k' / sqrt(K) + mask) v by head,   q, k, v = n W',   q and k rotated
    swiglu      x + (silu(a) b) W_down',                                      a, b = n W'
    norm        n = f w x / sqrt(mean(x^2) + eps),    with LNS's factor f, or 1

What a small model waits for is less its products than the many operations between them. So here

    norm        u = x / r, r = sqrt(|x|^2 + D eps);  the vector c = f sqrt(D) w multiplies the matrices, not the tokens:
                n W' = u V', V = W diag(c).     dW = dV diag(c),  dw = f sqrt(D) sum over rows of dV * W,
                du = g V,  dx = (du - u (u . du)) / r
    attention   P = softmax(S), kept: T is small.   dv = P' g,  dP = g v',  dS = P * (dP - sum(P * dP)),
                dq = dS k,  dk = dS' q;  1/sqrt(K) is part of the rotation of q, so of its derivative
    stream      the sum is part of the last product where oneDNN multiplies; backwards the two paths meet in one pass

Same values as the formulas of `decoder` to rounding (1e-6 of a loss in fp32 after some steps), the same bits at each
call. For eager training in fp32 on a CPU; attention of up to `MOST_TOKENS`, since P of all layers leaves the cache.

Shapes: B sequences, T tokens, D width of the stream, X outputs of a matrix, F hidden units; G key/value heads, R query
heads that each serves, K width of a head; N = G B.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import products
from sparsedepth.model.attention import visible
from sparsedepth.model.fused import paired, rotated, use_fused

MOST_TOKENS = 32
"""of a sequence, up to which attention by batched products is the faster one."""


def is_plain(config: ModelConfig) -> bool:
    """Whether blocks are x + F(s N x), s = 1 or LNS's: what this file's branches compute."""
    changes_stream = config.residual_scalars or config.gpas or config.n_streams > 1 or config.attention_residuals
    changes_branch = config.residual_gate != "none" or config.residual_dropout or config.depth_multiplier != 1
    is_pre_norm = config.norm == "pre" and config.norm_kind == "rms" and config.depth_scale in ("none", "lns")
    return is_pre_norm and not (changes_stream or changes_branch)


def takes(x_BTD: Tensor) -> bool:
    """Whether this stream is one of eager training in fp32 on a CPU."""
    return x_BTD.device.type == "cpu" and use_fused(x_BTD)


class _Norm:
    """The norm before a branch's first product: its unit vectors, and that product's matrix with the norm's weight."""

    def __init__(self, x_BTD: Tensor, norm_D: Tensor, rows_XD: Tensor, eps: float, factor: Tensor | None):
        width = x_BTD.shape[-1]
        squares_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True).square_()
        self.scale_BT1 = squares_BT1.add_(width * eps).rsqrt_()
        self.unit_BTD = x_BTD * self.scale_BT1
        self.per_weight = math.sqrt(width) if factor is None else factor * math.sqrt(width)
        self.gain_D = norm_D * self.per_weight
        self.rows_XD, self.matrix_XD = rows_XD, rows_XD * self.gain_D

    def gradients(self, grad_BTX: Tensor, grad_out_BTD: Tensor, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
        """dx, with what reaches the stream beside the branch; dw; dW."""
        grad_BTD, grad_XD = products.gradients(grad_BTX, self.unit_BTD, self.matrix_XD, kernel)
        along_BT1 = torch.linalg.vecdot(grad_BTD, self.unit_BTD).unsqueeze(-1)
        grad_BTD.addcmul_(self.unit_BTD, along_BT1, value=-1)
        grad_norm_D = (grad_XD * self.rows_XD).sum(0).mul_(self.per_weight)
        return torch.addcmul(grad_out_BTD, grad_BTD, self.scale_BT1), grad_norm_D, grad_XD.mul_(self.gain_D)


class _AttentionBranch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD, norm_D, query_XD, key_XD, value_XD, output_DX, turns, factor, eps, kernel):
        rows_XD = torch.cat((query_XD, key_XD, value_XD))[turns.order_X]
        norm = _Norm(x_BTD, norm_D, rows_XD, eps, factor)
        y_BTX = products.project(norm.unit_BTD, norm.matrix_XD, kernel)
        rotated(y_BTX, turns.angle_TX).mul_(turns.angle_TX)
        widths = len(query_XD), len(key_XD), len(value_XD)
        q_NTK, k_NTK, v_NTK = (turns.by_head(part_BTX) for part_BTX in y_BTX.split(widths, dim=-1))
        p_NTT = torch.baddbmm(turns.mask_TT, q_NTK, k_NTK.mT).softmax(-1)
        out_BTX = turns.by_token(torch.bmm(p_NTT, v_NTK), len(x_BTD))
        ctx.norm, ctx.turns, ctx.widths, ctx.kernel = norm, turns, widths, kernel
        ctx.save_for_backward(output_DX, q_NTK, k_NTK, v_NTK, p_NTT, out_BTX)
        return products.project(out_BTX, output_DX, kernel, onto=x_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BTD,), turns = grads, ctx.turns
        output_DX, q_NTK, k_NTK, v_NTK, p_NTT, out_BTX = ctx.saved_tensors
        grad_out_BTX, grad_output_DX = products.gradients(grad_BTD, out_BTX, output_DX, ctx.kernel)
        grad_NTK = turns.by_head(grad_out_BTX)
        grad_p_NTT = torch.bmm(grad_NTK, v_NTK.mT)
        grad_s_NTT = torch._softmax_backward_data(grad_p_NTT, p_NTT, -1, p_NTT.dtype)
        by_head = torch.bmm(grad_s_NTT, k_NTK), torch.bmm(grad_s_NTT.mT, q_NTK), torch.bmm(p_NTT.mT, grad_NTK)
        grad_BTX = torch.cat([turns.by_token(part_NTK, len(grad_BTD)) for part_NTK in by_head], dim=-1)
        rotated(grad_BTX, turns.angle_TX).mul_(turns.angle_TX.conj())
        grad_x_BTD, grad_norm_D, grad_XD = ctx.norm.gradients(grad_BTX, grad_BTD, ctx.kernel)
        grads_XD = grad_XD[turns.back_X].split(ctx.widths)
        return grad_x_BTD, grad_norm_D, *grads_XD, grad_output_DX, *[None] * 4


class _SwiGLUBranch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD, norm_D, gate_FD, up_FD, down_DF, factor, eps, kernel):
        norm = _Norm(x_BTD, norm_D, torch.cat((gate_FD, up_FD)), eps, factor)
        gate_BTF, up_BTF = (products.project(norm.unit_BTD, part, kernel) for part in norm.matrix_XD.chunk(2))
        active_BTF = F.silu(gate_BTF)
        ctx.norm, ctx.kernel = norm, kernel
        ctx.save_for_backward(gate_BTF, up_BTF, active_BTF, down_DF)
        return products.project(active_BTF * up_BTF, down_DF, kernel, onto=x_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BTD,) = grads
        gate_BTF, up_BTF, active_BTF, down_DF = ctx.saved_tensors
        grad_BTF, grad_down_DF = products.gradients(grad_BTD, active_BTF * up_BTF, down_DF, ctx.kernel)
        grad_up_BTF = grad_BTF * active_BTF
        through_BTF = grad_BTF.mul_(up_BTF)
        grad_gate_BTF = torch.ops.aten.silu_backward.grad_input(through_BTF, gate_BTF, grad_input=through_BTF)
        grad_both_BTX = torch.cat((grad_gate_BTF, grad_up_BTF), dim=-1)
        grad_x_BTD, grad_norm_D, grad_XD = ctx.norm.gradients(grad_both_BTX, grad_BTD, ctx.kernel)
        return grad_x_BTD, grad_norm_D, *grad_XD.chunk(2), grad_down_DF, *[None] * 3


class _Turns:
    """What attention needs besides weights, the same in all layers: angles, of queries with 1/sqrt(K); the mask; the
    order of the matrices' rows, in which the two channels of a pair lie side by side, and the way back."""

    def __init__(self, rotary: tuple[Tensor, Tensor], n_heads: int, n_groups: int, window: int | None):
        n_tokens, self.d_head = rotary[0].shape
        angle_TK = torch.complex(*(part_TK[:, : self.d_head // 2].contiguous() for part_TK in rotary))
        query_TX = (angle_TK / math.sqrt(self.d_head)).repeat(1, n_heads)
        self.angle_TX = torch.cat((query_TX, angle_TK.repeat(1, n_groups)), dim=-1)
        self.n_groups = n_groups
        row_X = torch.arange((n_heads + 2 * n_groups) * self.d_head)
        turned_X, kept_X = row_X.split((2 * self.angle_TX.shape[-1], n_groups * self.d_head))
        self.order_X = torch.cat((paired(turned_X[:, None], self.d_head).flatten(), kept_X))
        self.back_X = self.order_X.argsort()
        hidden_TT = ~visible(n_tokens, window, None, row_X.device).repeat(n_heads // n_groups, 1)
        self.mask_TT = torch.zeros_like(hidden_TT, dtype=rotary[0].dtype).masked_fill_(hidden_TT, -math.inf)

    def by_head(self, x_BTX: Tensor) -> Tensor:
        """[G B, R T, K] of [B, T, G R K]: the query heads that a key serves are more queries of one head."""
        x_BTGRK = x_BTX.unflatten(-1, (self.n_groups, -1, self.d_head))
        return x_BTGRK.permute(2, 0, 3, 1, 4).flatten(2, 3).flatten(0, 1)

    def by_token(self, x_NTK: Tensor, n_sequences: int) -> Tensor:
        """[B, T, G R K] of [G B, R T, K]."""
        n_tokens = self.angle_TX.shape[0]
        x_GBRTK = x_NTK.view(self.n_groups, n_sequences, -1, n_tokens, self.d_head)
        return x_GBRTK.permute(1, 3, 0, 2, 4).flatten(2)


@functools.lru_cache(maxsize=2)  # one rotary serves all layers of a forward pass
def _turns(cos_TK: Tensor, sin_TK: Tensor, n_heads: int, n_groups: int, window: int | None) -> _Turns:
    return _Turns((cos_TK, sin_TK), n_heads, n_groups, window)


def attention_branch(
    x_BTD: Tensor,
    norm_D: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    *,
    eps: float,
    window: int | None = None,
    factor: Tensor | None = None,
    kernel: str = "blas",
) -> Tensor:
    """x + attention(norm(x)); weights query_XD, key_XD, value_XD, output_DX, and the tables of `Decoder.rotary`."""
    n_heads, n_groups = (len(weight) // rotary[0].shape[-1] for weight in weights[:2])
    turns = _turns(*rotary, n_heads, n_groups, window)
    return _AttentionBranch.apply(x_BTD, norm_D, *weights, turns, factor, eps, kernel)


def swiglu_branch(
    x_BTD: Tensor,
    norm_D: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    *,
    eps: float,
    factor: Tensor | None = None,
    kernel: str = "blas",
) -> Tensor:
    """x + swiglu(norm(x)); weights gate_FD, up_FD, down_DF."""
    return _SwiGLUBranch.apply(x_BTD, norm_D, *weights, factor, eps, kernel)
