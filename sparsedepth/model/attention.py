"""Attention, softmax(q k' / sqrt(K)) v over the visible keys: its kernels, and a block's module.

    out_t = sum_s p_ts v_s,   p_ts = softmax over the visible s of cap(q_t k_s / sqrt(K))

The context says which they are: keys s <= t; with a window W only t - W < s; with documents only
those of the query's own; and the cap c of a foreign model, cap(z) = c tanh(z / c) (2408.00118), else
cap(z) = z. Dropout p sets each p_ts to 0 with probability p,
and multiplies the others by 1 / (1 - p).

`reference` is the formula in fp32; `sdpa` is PyTorch's kernel, `flash` that of flash-attn 2
(2307.08691; https://github.com/Dao-AILab/flash-attention), if installed. Gradients agree with the
reference to 1e-5 in fp32 and 2e-2 in bf16.

Shapes: B sequences, H query heads, G key/value heads (each serves H / G query heads), T tokens, K
head width, X heads times K, N = B T, C documents; D d_model."""

import importlib
import math
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.context import Context, Rotary, rotate
from sparsedepth.model.linear import Linear, TensorPair, product_dtype, project_together, times
from sparsedepth.model.norms import RMSNorm


def sdpa(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, context: Context, dropout: float = 0.0) -> Tensor:
    """out_BHTK by PyTorch's scaled_dot_product_attention, with a mask only if one is needed."""
    n_repeats = q_BHTK.shape[1] // k_BGTK.shape[1]
    n_tokens = q_BHTK.shape[2]
    window = context.window
    is_masked = context.document_BT is not None or (window is not None and window < n_tokens)
    # The CUDA kernel for masks and fp32 has no grouped heads; that with them stores T x T scores.
    if n_repeats > 1 and (is_masked or (q_BHTK.device.type != "cpu" and q_BHTK.dtype == torch.float32)):
        k_BGTK, v_BGTK = (x.repeat_interleave(n_repeats, dim=1) for x in (k_BGTK, v_BGTK))
        n_repeats = 1
    mask, is_causal = (visible(n_tokens, context, q_BHTK.device), False) if is_masked else (None, True)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, mask, dropout, is_causal=is_causal, enable_gqa=n_repeats > 1
    )


def reference(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, context: Context, dropout: float = 0.0) -> Tensor:
    """out_BHTK by the formula, in fp32 (or fp64) also under autocast."""
    n_repeats = q_BHTK.shape[1] // k_BGTK.shape[1]
    n_tokens = q_BHTK.shape[2]
    dtype = torch.promote_types(q_BHTK.dtype, torch.float32)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        weight_BHTT = attention_rows(q_BHTK.to(dtype), k_BGTK.to(dtype), 0, n_tokens, context)
        v_BHTK = v_BGTK.to(dtype).repeat_interleave(n_repeats, dim=1)
        return (F.dropout(weight_BHTT, dropout) @ v_BHTK).to(v_BGTK.dtype)


def attention_rows(q_BHTK: Tensor, k_BGTK: Tensor, start: int, stop: int, context: Context) -> Tensor:
    """p_BHRS of the queries start .. stop - 1 over the S = stop keys before stop, in an encoder over all; M = H / G
    heads per group. The one source of attention's weights: `reference` sums values by them, `sdpa` and `flash`
    agree with it, and measures read them."""
    q_BGMRK = q_BHTK[:, :, start:stop].unflatten(1, (k_BGTK.shape[1], -1))
    k_BG1KS = k_BGTK[:, :, None, : stop if context.is_causal else None].transpose(-1, -2)
    score_BHRS = (q_BGMRK @ k_BG1KS).flatten(1, 2)
    score_BHRS = score_BHRS.to(torch.promote_types(score_BHRS.dtype, torch.float32)) / math.sqrt(q_BHTK.shape[-1])
    if context.softcap is not None:
        score_BHRS = context.softcap * torch.tanh(score_BHRS / context.softcap)
    if context.is_causal:
        seen = _mask(start, stop, context.window, context.document_BT, q_BHTK.device)
        score_BHRS = score_BHRS.masked_fill(~seen, -math.inf)
    return score_BHRS.softmax(-1)


def load_flash() -> ModuleType:
    """The package. Raises ImportError if it is missing, or built for another torch."""
    return importlib.import_module("flash_attn")


def flash(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, context: Context, dropout: float = 0.0) -> Tensor:
    """out_BHTK, in autocast's dtype if enabled; fp16 or bf16 on CUDA only (checked in `kernels`).
    Its layout is [B, T, heads, K]; a window counts positions to the left and right of the query's
    own; packed documents are one long sequence, with their offsets. Raises ImportError without it.
    """
    package = load_flash()
    dtype = product_dtype(q_BHTK)
    window = context.window
    q_BTHK, k_BTGK, v_BTGK = (x.to(dtype).transpose(1, 2) for x in (q_BHTK, k_BGTK, v_BGTK))
    options = {"causal": True, "window_size": (-1, -1) if window is None else (window - 1, 0)}
    if dropout:
        options["dropout_p"] = dropout
    if context.document_BT is None:
        return package.flash_attn_func(q_BTHK, k_BTGK, v_BTGK, **options).transpose(1, 2)
    n_tokens = q_BTHK.shape[1]
    begin_C1 = context.once(offsets, context.document_BT)
    out_NHK = package.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK)),
        cu_seqlens_q=begin_C1,
        cu_seqlens_k=begin_C1,
        max_seqlen_q=n_tokens,  # an upper bound: the longest document's length would make the host wait
        max_seqlen_k=n_tokens,
        **options,
    )
    return out_NHK.unflatten(0, (-1, n_tokens)).transpose(1, 2)


def visible(n_tokens: int, context: Context, device: torch.device) -> Tensor:
    """True where query t (row) sees key s (column): [T, T], or [B, 1, T, T] with documents. All
    layers of a forward pass share one mask, which their backward passes keep alive."""
    return context.once(_mask, 0, n_tokens, context.window, context.document_BT, device)


def _mask(start: int, stop: int, window: int | None, document_BT: Tensor | None, device: torch.device) -> Tensor:
    """Its rows start .. stop - 1, over the keys before stop."""
    distance_RS = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)
    seen_RS = (distance_RS >= 0) & (distance_RS < (window or stop))
    if document_BT is None:
        return seen_RS
    index_BT = starts(document_BT).cumsum(1)
    return (seen_RS & (index_BT[:, start:stop, None] == index_BT[:, None, :stop]))[:, None]


def starts(document_BT: Tensor) -> Tensor:
    """True at the first token of each document."""
    first_B1 = torch.ones_like(document_BT[:, :1], dtype=torch.bool)
    return torch.cat((first_B1, document_BT[:, 1:] != document_BT[:, :-1]), dim=1)


def offsets(document_BT: Tensor) -> Tensor:
    """int32 [C + 1]: the first token of each document in the N tokens of the batch, then N. Their
    number is a shape, for which the host waits."""
    begin_C = starts(document_BT).flatten().nonzero().flatten().to(torch.int32)
    return F.pad(begin_C, (0, 1), value=document_BT.numel())


class KernelInputs(Exception):
    """q_BHTK and k_BGTK, on their way out of a module in place of its output."""


def _inputs(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, context: Context, dropout: float = 0.0) -> Tensor:
    raise KernelInputs(q_BHTK, k_BGTK)


KERNELS = {"sdpa": sdpa, "flash": flash, "reference": reference}
INPUTS = "inputs"
"""In place of a kernel's name: what a kernel would get."""


class Attention(nn.Module):
    """Attention; each of the G key/value heads serves H / G query heads.

    q/k norm, before RoPE, is an RMSNorm over the K channels of each head with a weight shared by
    all heads (Qwen3), or over all H K channels of a query and G K of a key (OLMoE)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.n_kv_heads is not None
        self.d_head = config.d_head
        self.query = Linear(config.d_model, config.n_heads * self.d_head)
        self.key = Linear(config.d_model, config.n_kv_heads * self.d_head)
        self.value = Linear(config.d_model, config.n_kv_heads * self.d_head)
        self.output = Linear(config.n_heads * self.d_head, config.d_model)
        self.query_norm = self._norm(config, config.n_heads)
        self.key_norm = self._norm(config, config.n_kv_heads)
        self.kernel = "sdpa"
        self.dropout = config.attention_dropout

    def _norm(self, config: ModelConfig, n_heads: int) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(self.d_head * (n_heads if config.qk_norm_over == "all" else 1), config.norm_eps)

    def _heads(self, y_BTX: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """A projection, with the norm if given, by head: [B, T, heads, K]."""
        if norm is not None:
            # Under autocast the norm returns fp32; kernels need q and k in the dtype of v.
            y_BTX = norm(y_BTX.unflatten(-1, (-1, norm.weight.shape[-1]))).flatten(-2).to(y_BTX.dtype)
        return y_BTX.unflatten(-1, (-1, self.d_head))

    def kernel_inputs(self, x_BTD: Tensor, context: Context) -> TensorPair:
        """q_BHTK and k_BGTK as the kernel gets them, by the forward pass itself, whatever it does to
        them: their `attention_rows` are the weights."""
        kernel = self.kernel
        self.kernel = INPUTS
        try:
            self.forward(x_BTD, context)
        except KernelInputs as inputs:
            return inputs.args
        finally:
            self.kernel = kernel
        raise AssertionError("attention runs its kernel")

    def _positioned(self, q_BTX: Tensor, k_BTX: Tensor, rotary: Rotary) -> TensorPair:
        q_BTHK = rotate(self._heads(q_BTX, self.query_norm), rotary)
        k_BTGK = rotate(self._heads(k_BTX, self.key_norm), rotary)
        return q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2)

    def values(self, x_BTD: Tensor) -> Tensor:
        """v_BGTK, before the value residual."""
        return self._heads(self.value(x_BTD)).transpose(1, 2)

    def seen(self, context: Context) -> Context:
        """Which tokens this layer sees."""
        return context

    def mixed_values(self, v_BGTK: Tensor, context: Context) -> Tensor:
        """The values that attention sums."""
        return v_BGTK

    def attended(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, context: Context) -> Tensor:
        """The attended values of all heads side by side: input of the output projection."""
        v_BGTK = self.mixed_values(v_BGTK, context)
        dropout = self.dropout if self.training else 0.0
        kernel = _inputs if self.kernel == INPUTS else KERNELS[self.kernel]
        return kernel(q_BHTK, k_BGTK, v_BGTK, self.seen(context), dropout).transpose(1, 2).flatten(2)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        q_BTX, k_BTX, v_BTX = project_together(x_BTD, self.query, self.key, self.value)
        v_BTX = v_BTX.contiguous()  # a view of the joined product would keep q and k as they were before RoPE
        heads = *self._positioned(q_BTX, k_BTX, context.rotary), self._heads(v_BTX).transpose(1, 2)
        return self.output(self.gated(self.attended(*heads, context), x_BTD))

    def gated(self, attended_BTX: Tensor, x_BTD: Tensor) -> Tensor:
        """The input of the output projection."""
        return attended_BTX


class GatedAttention(Attention):
    """`gated_attention`: attended values times sigmoid(W x) of the block's normed input, by channel or by head
    (2505.06708, G1)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        by_head = config.gated_attention == "head"
        self.gating = Linear(config.d_model, config.n_heads if by_head else config.d_model)

    def gated(self, attended_BTX: Tensor, x_BTD: Tensor) -> Tensor:
        gate_BTX = torch.sigmoid(self.gating(x_BTD))
        by_head = attended_BTX.unflatten(-1, (gate_BTX.shape[-1], -1))
        return (by_head * gate_BTX.unsqueeze(-1)).flatten(-2)


class LongAttention(Attention):
    """A layer of `window_pattern` without a window."""

    def seen(self, context: Context) -> Context:
        return context.unlimited


class FirstValues(Attention):
    """`value_residual` in block 1, which leaves its values to the later ones."""

    def mixed_values(self, v_BGTK: Tensor, context: Context) -> Tensor:
        if context.value_BGTK is None:
            context.value_BGTK = v_BGTK
        return v_BGTK


class ValueResidual(Attention):
    """`value_residual` in blocks 2..L: attention sums c_l v_l + d_l v_1, its own values and block
    1's; c and d start at 1/2 (2410.17897, Learnable-ResFormer over all layers). Skipping, swapping
    or replacing a block does not change v_1."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.value_scalar = nn.Parameter(torch.empty(1))
        self.first_value_scalar = nn.Parameter(torch.empty(1))

    def mixed_values(self, v_BGTK: Tensor, context: Context) -> Tensor:
        assert context.value_BGTK is not None
        mixed_BGTK = times(v_BGTK, self.value_scalar) + times(context.value_BGTK, self.first_value_scalar)
        return mixed_BGTK.to(v_BGTK.dtype)  # under autocast the scalars are fp32; kernels need one dtype


def make_attention(config: ModelConfig, layer: int) -> Attention:
    kinds = (GatedAttention,) if config.gated_attention != "none" else ()
    kinds += (LongAttention,) if config.sliding_window and not config.has_window(layer) else ()
    if config.value_residual:
        kinds += (FirstValues,) if layer == 1 else (ValueResidual,)
    return composed(Attention, *kinds)(config)


@cache
def composed(plain: type[nn.Module], *variants: type[nn.Module]) -> Any:
    """One class of several variants; blocks of one class share compiled code."""
    return type("".join(kind.__name__ for kind in variants), (*variants, plain), {}) if variants else plain
