"""Two devices on one CPU: tensors know whether they are on the host or on the 'device', and the two do not mix.

As on a GPU: a tensor that is made without `device=` is on the host; only 0-dimensional tensors of the host may be used
with tensors of the device, and only indices may be on another device than what they index; a tensor of the device has
no `numpy()`. What runs is the CPU's arithmetic, so values are those of the CPU. The device calls itself an 'xpu', a
type that the package has no branches for. Gradients, which no Python makes, belong to no side until they are used.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

DEVICE, HOST = torch.device("xpu", 0), torch.device("cpu")

MADE = {
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros, torch.tensor),
    *(torch.as_tensor, torch.rand, torch.randn, torch.randint, torch.randperm, torch.tril_indices),
}
"""What makes a tensor without being given one; with random numbers only from the host's generator."""
INDEXED = {Tensor.__getitem__, Tensor.__setitem__, torch.Tensor.index_put_}
COPIED = {Tensor.copy_}
"""What copies from one device to another."""


class MixedDevices(AssertionError):
    """Tensors of two devices in one operation."""


class TwoDevices(TorchFunctionMode):
    """While it is open. `place` brings a module's parameters and buffers to the device."""

    def __enter__(self):
        self.from_numpy = torch.from_numpy  # no function that a mode sees

        def from_numpy(array: np.ndarray) -> Tensor:
            tensor = self.from_numpy(array)
            mark(tensor, HOST)
            return tensor

        torch.from_numpy = from_numpy
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.from_numpy = self.from_numpy
        super().__exit__(*error)

    def place(self, module: torch.nn.Module) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in (*module.parameters(), *module.buffers()):
                mark(tensor, DEVICE)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return side(args[0]) or HOST
        if func in (Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):
            return func(*args) and side(args[0]) != DEVICE
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return moved(func, args, kwargs)
        if func is Tensor.numpy and side(args[0]) == DEVICE:
            raise MixedDevices("a tensor of the device has no numpy(); call cpu() first")
        return self.computed(func, args, kwargs)

    def computed(self, func, args: tuple, kwargs: dict[str, Any]):
        target = None
        if "device" in kwargs:
            target = torch.device(kwargs["device"]) if kwargs["device"] is not None else None
            if target is not None:
                kwargs["device"] = HOST
        sides = {side(tensor) for tensor in tensors((args, kwargs)) if counts(func, tensor, args)} - {None}
        if len(sides) > 1 and func not in COPIED and func not in MADE:
            raise MixedDevices(f"{resolve_name(func) or func} of tensors of two devices")
        result = func(*args, **kwargs)
        if target is not None:
            place = DEVICE if target.type == DEVICE.type else HOST
        elif func in MADE:
            place = HOST
        else:
            place = side(args[0]) if func in COPIED else next(iter(sides), None)
        for tensor in tensors(result):
            if place is not None:
                mark(tensor, place)
        return result


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def side(tensor: Tensor) -> torch.device | None:
    return tensor.__dict__.get("side")


def mark(tensor: Tensor, place: torch.device) -> None:
    tensor.__dict__["side"] = place


def counts(func, tensor: Tensor, args: tuple) -> bool:
    """Whether the tensor must be on the side of the others."""
    with torch._C.DisableTorchFunction():
        is_number = tensor.ndim == 0
    is_index = func in INDEXED and any(tensor is index for index in tensors(args[1]))
    return not is_index and not (is_number and side(tensor) == HOST)


def moved(func, args: tuple, kwargs: dict[str, Any]):
    """`to`, `cpu` and `cuda`: the side that is asked for; the same side where only a dtype is."""
    tensor, place = args[0], side(args[0])
    given = []
    for value in args[1:]:
        if isinstance(value, Tensor):
            place = side(value) or HOST
            value = value.dtype
        elif isinstance(value, str | torch.device):
            place = torch.device(value)
            value = HOST
        given.append(value)
    if kwargs.get("device") is not None:
        place = torch.device(kwargs["device"])
        kwargs["device"] = HOST
    if func is not Tensor.to:
        place = HOST if func is Tensor.cpu else DEVICE
    with torch._C.DisableTorchFunction():
        result = tensor.to(*given, **kwargs) if func is Tensor.to else tensor
        result = result.view_as(result) if result is tensor and place != side(tensor) else result
    if place is not None:
        mark(result, DEVICE if place.type == DEVICE.type else HOST)
    return result
