"""The routed experts' computation, by three interchangeable kernels.

    out_n = sum_k gate_nk * down_e( silu(x_n gate_e) * (x_n up_e) ),   e = choice_nk     (Mixtral, 2401.04088)

`loop` follows the formula and is the reference; `grouped` sorts tokens by expert and multiplies all
groups with one call of `torch.nn.functional.grouped_mm`; `megablocks` moves the rows with Triton
kernels of MegaBlocks (2211.15841; github.com/databricks/megablocks). All are dropless. Gradients
agree with the loop to 1e-5 in fp32 and 2e-2 in bf16.

Shapes: N tokens, C experts chosen per token, S = N C routed copies, E experts, D d_model, F
d_expert."""

import functools
import importlib
import importlib.util
import sys
import warnings
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.model.linear import product_dtype

MEGABLOCKS_EXTENSION = "megablocks_ops"
"""the CUDA extension that megablocks imports, which does not build with current CUDA"""


def loop(x_ND: Tensor, gate_NC: Tensor, choice_NC: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """out_ND, expert by expert."""
    out_ND = torch.zeros_like(x_ND)
    for expert, (gate_up, down) in enumerate(zip(gate_up_E2FD.unbind(), down_EDF.unbind(), strict=True)):
        token, slot = torch.where(choice_NC == expert)
        gate, up = F.linear(x_ND[token], gate_up).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down)
        out_ND = out_ND.index_add(0, token, (y * gate_NC[token, slot, None]).to(out_ND.dtype))
    return out_ND


def grouped(x_ND: Tensor, gate_NC: Tensor, choice_NC: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """out_ND, all experts in two grouped matrix products; the host never waits for the device."""
    n_tokens, top_k = choice_NC.shape
    _, order_S, end_E = by_expert(choice_NC, len(down_EDF))
    # Copy first, then permute and unpermute: gradients need no nondeterministic atomics.
    copy_SD = x_ND.to(product_dtype(x_ND))[:, None].expand(-1, top_k, -1).reshape(n_tokens * top_k, -1)
    y_SD = _swiglu(copy_SD.index_select(0, order_S), gate_up_E2FD, down_EDF, end_E)
    inverse_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=x_ND.device))
    y_NCD = y_SD.index_select(0, inverse_S).view(n_tokens, top_k, -1)
    return (y_NCD * gate_NC[..., None]).sum(1).to(x_ND.dtype)


# Third-party kernels in custom autograd functions cannot be compiled. `torch.compiler.disable` is
# the public name, but imports the compiler here: 1.6 s for every command that loads a model.
@torch._disable_dynamo
def megablocks(x_ND: Tensor, gate_NC: Tensor, choice_NC: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """out_ND, gathered and scattered by MegaBlocks. Raises ImportError. Deviates: PyTorch sorts,
    counts and multiplies. Its sparse products do not compile with current Triton; its grouped ones
    need another compiled package and group sizes on the host."""
    ops = load_megablocks()
    dtype = product_dtype(x_ND)
    top_k = choice_NC.shape[1]
    expert_S, order_S, end_E = by_expert(choice_NC, len(down_EDF))
    places = order_S.int(), expert_S.int()
    y_SD = _swiglu(ops.gather(x_ND.to(dtype).contiguous(), *places, end_E, top_k), gate_up_E2FD, down_EDF, end_E)
    return ops.scatter(y_SD, *places, gate_NC.to(dtype).flatten(), end_E, top_k).to(x_ND.dtype)


def by_expert(choice_NC: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """expert_S in ascending order, order_S of the copies by expert, and in int32 end_E, where the
    copies of each expert end."""
    expert_S, order_S = choice_NC.flatten().sort(stable=True)
    experts_E = torch.arange(n_experts, device=choice_NC.device)
    return expert_S, order_S, torch.searchsorted(expert_S, experts_E, right=True, out_int32=True)


@functools.cache
def load_megablocks() -> ModuleType:
    """megablocks.ops, also without its extension: an empty module stands in for it during the
    import. Raises ImportError if the package, or a dependency, is missing or broken."""
    has_extension = MEGABLOCKS_EXTENSION in sys.modules or importlib.util.find_spec(MEGABLOCKS_EXTENSION) is not None
    if not has_extension:
        sys.modules[MEGABLOCKS_EXTENSION] = ModuleType(MEGABLOCKS_EXTENSION)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Grouped GEMM not available")  # its products are not used
            return importlib.import_module("megablocks.ops")
    finally:
        if not has_extension:
            del sys.modules[MEGABLOCKS_EXTENSION]  # other imports must not get the replacement


def _swiglu(sorted_SD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, end_E: Tensor) -> Tensor:
    """y_SD of rows sorted by expert; expert e's rows end before end_e. grouped_mm ignores autocast,
    so the weights are cast here to the dtype of the rows."""
    dtype = sorted_SD.dtype
    # The compiler supports grouped_mm in bf16 only.
    can_compile = dtype == torch.bfloat16 or not torch.compiler.is_compiling()
    product = F.grouped_mm if can_compile else torch.compiler.disable(F.grouped_mm)
    gate, up = product(sorted_SD, gate_up_E2FD.to(dtype).transpose(1, 2), offs=end_E).chunk(2, dim=-1)
    return product(F.silu(gate) * up, down_EDF.to(dtype).transpose(1, 2), offs=end_E)


KERNELS = {"loop": loop, "grouped": grouped, "megablocks": megablocks}
