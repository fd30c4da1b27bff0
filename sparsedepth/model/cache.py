"""Results that all layers of a forward pass share: masks of documents, angles of rotary
positions."""

import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor


def once_per_tensor(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache the last result as long as the first argument is alive and unchanged. It is looked up
    by the identity of tensors: comparing values would make the host wait for the device."""
    cache: dict[tuple, tuple[weakref.ref, Tensor]] = {}

    @functools.wraps(compute)
    def cached(tensor: Tensor, *args: object) -> Tensor:
        if torch.compiler.is_compiling():
            return compute(tensor, *args)
        key = (0 if tensor.is_inference() else tensor._version, *args)
        source, result = cache.get(key, (lambda: None, None))
        if result is None or source() is not tensor:
            with torch.inference_mode(False):  # a measure may compute it first, and training reuse it
                result = compute(tensor, *args)
            cache.clear()
            cache[key] = (weakref.ref(tensor, lambda _: cache.clear()), result)
        return result

    return cached
