"""Attention, softmax(q k' / sqrt(K)) v over the visible keys, by interchangeable kernels.

    out_t = sum_s p_ts v_s,   p_ts = exp(q_t k_s / sqrt(K)) / sum over the visible s

Query t sees keys s <= t; with a `window` W only t - W < s; with `document_BT` (a number per token that changes where a
new document begins in a packed sequence) only those of its own document. With causal=False it sees all keys.

Dropout p sets each p_ts to 0 with probability p, and multiplies the others by 1 / (1 - p).

`reference` is the formula in fp32; `sdpa` is PyTorch's kernel, `flash` flash-attn's (`flash.py`). Gradients agree with
the reference to 1e-5 in fp32 and 2e-2 in bf16.

Shapes: B sequences, H query heads, G key/value heads (each serves H / G query heads), T tokens, K head width.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.model import flash
from sparsedepth.model.documents import once_per_batch, starts


def sdpa(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    window: int | None = None,
    document_BT: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """out_BHTK by PyTorch's scaled_dot_product_attention; a mask is passed only for a window or documents."""
    n_repeats, n_tokens = q_BHTK.shape[1] // k_BGTK.shape[1], q_BHTK.shape[2]
    is_masked = document_BT is not None or (window is not None and window < n_tokens)
    # The CUDA kernel that takes a mask or fp32 has no grouped heads; the one with grouped heads stores T x T scores.
    if n_repeats > 1 and (is_masked or (q_BHTK.device.type == "cuda" and q_BHTK.dtype == torch.float32)):
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


def visible(n_tokens: int, window: int | None, document_BT: Tensor | None, device: torch.device) -> Tensor:
    """True where query t (row) sees key s (column): [T, T], or [B, 1, T, T] with documents. All layers of a forward
    pass share one mask, which their backward passes keep alive."""
    if document_BT is not None:
        return _document_mask(document_BT, window)
    # A CUDA graph needs a mask of its own: a cached one may be freed while the graph still reads its memory.
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


@once_per_batch
def _document_mask(document_BT: Tensor, window: int | None) -> Tensor:
    index_BT = starts(document_BT).cumsum(1)
    same_BTT = index_BT[:, :, None] == index_BT[:, None, :]
    return (same_BTT & _band(document_BT.shape[1], window, document_BT.device))[:, None]


KERNELS = {"sdpa": sdpa, "flash": flash.attend, "reference": reference}
