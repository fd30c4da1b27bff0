"""Attention, softmax(q k' / sqrt(K)) v over the visible keys, by interchangeable kernels.

    out_t = sum_s p_ts v_s,   p_ts = exp(q_t k_s / sqrt(K)) / sum over the visible s

Query t sees keys s <= t; with a `window` W only t - W < s; with `document_BT` (a number per token
that changes where a new document begins in a packed sequence) only those of its own document. With
causal=False it sees all keys.

Dropout p sets each p_ts to 0 with probability p, and multiplies the others by 1 / (1 - p).

`reference` is the formula in fp32; `sdpa` is PyTorch's kernel, `flash` that of flash-attn 2
(2307.08691; https://github.com/Dao-AILab/flash-attention), if installed. Gradients agree with the
reference to 1e-5 in fp32 and 2e-2 in bf16.

Shapes: B sequences, H query heads, G key/value heads (each serves H / G query heads), T tokens, K
head width, N = B T, C documents.
"""

import functools
import importlib
import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.model.cache import once_per_tensor
from sparsedepth.model.products import product_dtype


def sdpa(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    window: int | None = None,
    document_BT: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """out_BHTK by PyTorch's scaled_dot_product_attention; a mask is passed only for a window or
    documents."""
    n_repeats, n_tokens = q_BHTK.shape[1] // k_BGTK.shape[1], q_BHTK.shape[2]
    is_masked = document_BT is not None or (window is not None and window < n_tokens)
    # The CUDA kernel that takes a mask or fp32 has no grouped heads; the one with grouped heads
    # stores T x T scores.
    if n_repeats > 1 and (is_masked or (q_BHTK.device.type != "cpu" and q_BHTK.dtype == torch.float32)):
        k_BGTK, v_BGTK = (x.repeat_interleave(n_repeats, dim=1) for x in (k_BGTK, v_BGTK))
        n_repeats = 1
    if not is_masked:
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGTK, v_BGTK, dropout_p=dropout, is_causal=causal, enable_gqa=n_repeats > 1
        )
    mask = visible(n_tokens, window, document_BT, q_BHTK.device)
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, attn_mask=mask, dropout_p=dropout)


def reference(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    window: int | None = None,
    document_BT: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """out_BHTK by the formula, in fp32 (or fp64) also under autocast."""
    n_repeats, n_tokens, width = q_BHTK.shape[1] // k_BGTK.shape[1], *q_BHTK.shape[2:]
    dtype = torch.promote_types(q_BHTK.dtype, torch.float32)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        k_BHTK, v_BHTK = (x.to(dtype).repeat_interleave(n_repeats, dim=1) for x in (k_BGTK, v_BGTK))
        score_BHTT = q_BHTK.to(dtype) @ k_BHTK.transpose(2, 3) / math.sqrt(width)
        if causal:
            hidden = ~visible(n_tokens, window, document_BT, q_BHTK.device)
            score_BHTT = score_BHTT.masked_fill(hidden, -math.inf)
        weight_BHTT = F.dropout(score_BHTT.softmax(-1), dropout)
        return (weight_BHTT @ v_BHTK).to(v_BGTK.dtype)


def load_flash() -> ModuleType:
    """The package. Raises ImportError if it is missing, or built for another torch."""
    return importlib.import_module("flash_attn")


def flash(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    window: int | None = None,
    document_BT: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """out_BHTK, in autocast's dtype if enabled; fp16 or bf16 on CUDA only (checked in `kernels`).
    Raises ImportError without flash-attn.

    Its layout is [B, T, heads, K] with native grouped heads; a window counts positions to the left
    and right of the query's own. Packed documents use its variable-length form: all sequences
    concatenated, with offsets of documents.
    """
    package, dtype = load_flash(), product_dtype(q_BHTK)
    q_BTHK, k_BTGK, v_BTGK = (x.to(dtype).transpose(1, 2) for x in (q_BHTK, k_BGTK, v_BGTK))
    options: dict[str, Any] = {"causal": causal, "window_size": (-1, -1) if window is None else (window - 1, 0)}
    if dropout:
        options["dropout_p"] = dropout
    if document_BT is None:
        return package.flash_attn_func(q_BTHK, k_BTGK, v_BTGK, **options).transpose(1, 2)
    n_tokens = document_BT.shape[1]
    begin_C1 = offsets(document_BT)
    out_NHK = package.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK)),
        cu_seqlens_q=begin_C1,
        cu_seqlens_k=begin_C1,
        max_seqlen_q=n_tokens,  # an upper bound: the longest document's length would make the host wait
        max_seqlen_k=n_tokens,
        **options,
    )
    return out_NHK.unflatten(0, (-1, n_tokens)).transpose(1, 2)


def visible(n_tokens: int, window: int | None, document_BT: Tensor | None, device: torch.device) -> Tensor:
    """True where query t (row) sees key s (column): [T, T], or [B, 1, T, T] with documents. All
    layers of a forward pass share one mask, which their backward passes keep alive."""
    if document_BT is not None:
        return _document_mask(document_BT, window)
    # A CUDA graph needs a mask of its own: a cached one may be freed while the graph still reads
    # its memory.
    inside_graph = torch.compiler.is_compiling() or is_captured(device)
    return (_band if inside_graph else _cached_band)(n_tokens, window, device)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _band(n_tokens: int, window: int | None, device: torch.device) -> Tensor:
    distance_TT = torch.arange(n_tokens, device=device)[:, None] - torch.arange(n_tokens, device=device)
    return (distance_TT >= 0) & (distance_TT < (window or n_tokens))


@functools.lru_cache(maxsize=2)
@torch.inference_mode(False)  # the mask outlives the pass that first computes it
def _cached_band(n_tokens: int, window: int | None, device: torch.device) -> Tensor:
    return _band(n_tokens, window, device)


def starts(document_BT: Tensor) -> Tensor:
    """True at the first token of each document: at the start of a sequence, and where the document
    number changes."""
    first_B1 = torch.ones_like(document_BT[:, :1], dtype=torch.bool)
    return torch.cat((first_B1, document_BT[:, 1:] != document_BT[:, :-1]), dim=1)


@once_per_tensor
def _document_mask(document_BT: Tensor, window: int | None) -> Tensor:
    index_BT = starts(document_BT).cumsum(1)
    same_BTT = index_BT[:, :, None] == index_BT[:, None, :]
    return (same_BTT & _band(document_BT.shape[1], window, document_BT.device))[:, None]


@once_per_tensor
def offsets(document_BT: Tensor) -> Tensor:
    """int32 [C + 1]: the first token of each document in the N tokens of the batch, then N. The
    number of documents is a shape, so the host waits for the device: once per batch, not per
    layer."""
    begin_C = starts(document_BT).flatten().nonzero().flatten().to(torch.int32)
    return F.pad(begin_C, (0, 1), value=document_BT.numel())


KERNELS = {"sdpa": sdpa, "flash": flash, "reference": reference}
