"""A CUDA graph's stand-in on a CPU: PyTorch's operations of a step are recorded and done again, none of its Python.

As there, a replay reads and writes the memory that the recorded step read and wrote, whatever numbers Python held then
are held forever, and what brings a number to the host, or takes one from it, cannot be recorded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsedepth.train import loop

aten = torch.ops.aten

SIZE = "has a result of which the host must know the size"
WAITING = {
    **dict.fromkeys((aten._local_scalar_dense, aten.equal), "brings a number to the host"),
    **dict.fromkeys((aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount), SIZE),
    aten.lift_fresh: "takes numbers from the host",
}


class Waits(Exception):
    """An operation that no graph can hold."""


def pointers(values: Any) -> set[int]:
    """Where the tensors among these lie."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


def aliases(values: Any) -> Any:
    """The same with tensors of the same memory whose shape nothing else changes (`unsqueeze_`)."""
    return tree_map_only(Tensor, Tensor.detach, values)


class Recorder(TorchDispatchMode):
    """While it is open, operations are noted; refused if the host would wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict[str, Any], list[tuple[int, Tensor]]]] = []
        """each with what it was given, and what it made: which of its results, and where they lie"""
        self.made: set[int] = set()
        self.outside: set[int] = set()
        """where what was read lies that no operation has made"""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket in WAITING:
            raise Waits(f"{func} {WAITING[func.overloadpacket]}")
        if func.overloadpacket in (aten.index, aten.index_put_) and torch.bool in {
            i.dtype for i in args[1] if i is not None
        }:
            raise Waits(f"{func} with a mask {SIZE}")
        read = pointers((args, kwargs))
        self.outside |= read - self.made
        given = aliases((args, kwargs))
        result = func(*args, **kwargs)
        leaves = [(index, leaf) for index, leaf in enumerate(tree_leaves(result)) if isinstance(leaf, Tensor)]
        made = [(index, leaf.detach()) for index, leaf in leaves if not pointers(leaf) & read]
        self.made |= pointers([leaf for _, leaf in made])
        is_writing = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if "profiler" not in str(func) and (made or is_writing):  # a view has nothing to be done again
            self.operations.append((func, *given, made))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            again = tree_leaves(func(*args, **kwargs)) if made else func(*args, **kwargs)
            for index, old in made:
                old.copy_(again[index])


class RecordedCapture:
    """In the place of `CudaCapture`."""

    lr_dtype = torch.float64
    """as exact as the number that the plain step hands to the CPU's kernel"""
    recorders: list[Recorder] = []

    def __init__(self, device: torch.device):
        self.is_warm = False

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        self.is_warm = True
        return step()

    def capture(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Recording takes the step once, which a GPU's does not: that is what the first replay returns."""
        assert self.is_warm, "nothing has warmed up"
        recorder, first = Recorder(), [True]
        self.recorders.append(recorder)
        with recorder:
            row = step()

        def replay() -> Tensor:
            if not first:
                recorder.replay()
            first.clear()
            return row.clone()

        return replay


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Have training capture by recording; the recorders of what it captures."""
    recorders: list[Recorder] = []
    kind = type("RecordedHere", (RecordedCapture,), {"recorders": recorders})
    monkeypatch.setattr(loop, "CudaCapture", kind)
    return recorders
