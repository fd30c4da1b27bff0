"""Stand-ins for optional packages: their signatures and layouts, computed by our readable references."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from sparsedepth.model import attention
from sparsedepth.model.context import Context


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> ModuleType:
    """Make `import name` find a module with this content."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """[B, T, heads, K]; query t sees the keys from t - left to t + right, -1 for no bound; fp16 or bf16 only."""
    assert causal and all(x.dtype in (torch.bfloat16, torch.float16) and x.stride(-1) == 1 for x in (q, k, v))
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[2] % k.shape[2] == 0
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return attention.reference(*heads_first, Context(window=None if left < 0 else left + 1)).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """[tokens, heads, K], one sequence after the other; int32 offsets from 0 to the number of tokens."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    sizes = cu_seqlens_q.diff().tolist()
    assert cu_seqlens_q[0] == 0 and sum(sizes) == len(q) and 0 < max(sizes) <= max_seqlen_q == max_seqlen_k
    parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    seen = {"causal": causal, "window_size": window_size}
    return torch.cat([flash_attn_func(*(x[None] for x in part), **seen)[0] for part in parts])


def flash_attn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    return install(monkeypatch, "flash_attn", **functions)


def megablocks_ops() -> SimpleNamespace:
    """What is used of megablocks.ops, in PyTorch."""

    def gather(x_ND: Tensor, order_S: Tensor, bin_S: Tensor, end_E: Tensor, top_k: int) -> Tensor:
        assert x_ND.is_contiguous() and order_S.shape == bin_S.shape == (len(x_ND) * top_k,) and end_E.ndim == 1
        return x_ND[order_S // top_k]

    def scatter(y_SD: Tensor, order_S: Tensor, bin_S: Tensor, gate_S: Tensor, end_E: Tensor, top_k: int) -> Tensor:
        assert gate_S.shape == order_S.shape and {x.dtype for x in (order_S, bin_S, end_E)} == {torch.int32}
        y_SD = y_SD[order_S.long().argsort()] * gate_S[:, None]
        return y_SD.unflatten(0, (-1, top_k)).sum(1)

    return SimpleNamespace(gather=gather, scatter=scatter)
