"""MegaBlocks (github.com/databricks/megablocks, 2211.15841) if installed, also without its compiled
extension.

Its permutations are Triton kernels and need no compiler; sorting and counting are a CUDA extension,
`megablocks_ops`, which the package imports and which does not build with current CUDA. If it is
missing, PyTorch versions of the three functions that we use replace it; `MegaBlocks.compiled` says
which are in use.

Shapes: S routed copies of tokens, E experts.
"""

import functools
import importlib
import importlib.util
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

COMPILED = "megablocks_ops"


@dataclass(frozen=True)
class MegaBlocks:
    """The loaded package."""

    ops: ModuleType
    """megablocks.ops: sort, histogram, inclusive_cumsum, gather, scatter."""
    compiled: bool
    """Whether its compiled extension is used, not the functions below."""


@functools.cache
def load() -> MegaBlocks:
    """The package's operations. Raises ImportError if it, or a dependency, is missing or broken."""
    compiled = COMPILED in sys.modules or importlib.util.find_spec(COMPILED) is not None
    if not compiled:
        sys.modules[COMPILED] = substitute()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Grouped GEMM not available")  # its products are not used
            return MegaBlocks(importlib.import_module("megablocks.ops"), compiled)
    finally:
        if not compiled:
            del sys.modules[COMPILED]  # other imports must not get the replacement


def substitute() -> ModuleType:
    """A module that replaces the compiled one, with the functions that `moe_kernels.megablocks`
    uses."""
    module = ModuleType(COMPILED, "PyTorch in place of MegaBlocks' compiled functions.")
    for function in (sort, histogram, inclusive_cumsum):
        setattr(module, function.__name__, function)
    return module


def sort(keys_S: Tensor, end_bit: int, sorted_S: Tensor, order_S: Tensor) -> None:
    """Write the keys in ascending order, and their indices; `end_bit`, a bound on the keys, is not
    needed."""
    result = keys_S.sort(stable=True)
    sorted_S.copy_(result.values)
    order_S.copy_(result.indices)


def histogram(keys_S: Tensor, n_experts: int) -> Tensor:
    """int32 [E]: count of each key. Unlike torch.bincount it never makes the host wait."""
    ones_S = torch.ones_like(keys_S, dtype=torch.int32)
    count_E = torch.zeros(n_experts, dtype=torch.int32, device=keys_S.device)
    return count_E.scatter_add_(0, keys_S.long(), ones_S)


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the cumulative sum along a dimension."""
    out.copy_(x.cumsum(dim))
