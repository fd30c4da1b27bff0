"""Attention by flash-attn 2, if installed: https://github.com/Dao-AILab/flash-attention (2307.08691).

Its layout is [B, T, heads, K] with native grouped heads; a window counts positions to the left and right of the query's
own. Packed documents use its variable-length form: all sequences concatenated, with the offsets of documents. It
computes in fp16 or bf16 on CUDA only (checked in `kernels.py`).

Shapes: B sequences, H query heads, G key/value heads, T tokens, K head width, N = B T, C documents.
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
    """The package. Raises ImportError if it is missing, or built for another torch."""
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
    """out_BHTK, in autocast's dtype if enabled. Raises ImportError without flash-attn."""
    package, dtype = load(), product_dtype(q_BHTK)
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


@once_per_batch
def offsets(document_BT: Tensor) -> Tensor:
    """int32 [C + 1]: the first token of each document in the N tokens of the batch, then N. The number of documents is
    a shape, so the host waits for the device: once per batch, not per layer."""
    begin_C = starts(document_BT).flatten().nonzero().flatten().to(torch.int32)
    return F.pad(begin_C, (0, 1), value=document_BT.numel())
