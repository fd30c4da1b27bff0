"""Attention by flash-attn 2, where it is installed: https://github.com/Dao-AILab/flash-attention (2307.08691).

Its layout is [B, T, heads, K], groups of heads are native, and a window counts the positions to the left and to the
right that are seen besides the query's own. Packed documents go through its variable-length form: all sequences end to
end, with the offsets at which documents begin. It computes in fp16 or bf16 on CUDA only (`kernels.py` says why not).

Shapes: B sequences, H query heads, G key/value heads, T tokens, K width of a head, N = B T, C documents.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.model.documents import once_per_batch, starts
from sparsedepth.model.products import product_dtype


def load() -> ModuleType:
    """The package. Raises ImportError where it is absent, or was built for another torch."""
    return importlib.import_module("flash_attn")


def attend(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    window: int | None = None,
    document_BT: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """out_BHTK, in autocast's dtype where it is on. Raises ImportError without flash-attn."""
    package, dtype = load(), product_dtype(q_BHTK)
    q_BTHK, k_BTGK, v_BTGK = (x.to(dtype).transpose(1, 2) for x in (q_BHTK, k_BGTK, v_BGTK))
    seen: dict[str, Any] = {"causal": causal, "window_size": (-1, -1) if window is None else (window - 1, 0)}
    if dropout:
        seen["dropout_p"] = dropout
    if document_BT is None:
        return package.flash_attn_func(q_BTHK, k_BTGK, v_BTGK, **seen).transpose(1, 2)
    n_tokens = document_BT.shape[1]
    begin_C1 = offsets(document_BT)
    out_NHK = package.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK)),
        cu_seqlens_q=begin_C1,
        cu_seqlens_k=begin_C1,
        max_seqlen_q=n_tokens,  # the longest document is shorter, but to know it the host would have to wait
        max_seqlen_k=n_tokens,
        **seen,
    )
    return out_NHK.unflatten(0, (-1, n_tokens)).transpose(1, 2)


@once_per_batch
def offsets(document_BT: Tensor) -> Tensor:
    """int32 [C + 1]: where each document begins in the N tokens of the batch, then N.

    The number of documents is a shape, so the host waits for the device here: once a batch, not once a layer.
    """
    begin_C = starts(document_BT).flatten().nonzero().flatten().to(torch.int32)
    return F.pad(begin_C, (0, 1), value=document_BT.numel())
