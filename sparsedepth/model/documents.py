"""First tokens of documents in packed sequences; masks computed once for all layers of a forward pass.

Shapes: B sequences, T tokens.
"""

import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor


def starts(document_BT: Tensor) -> Tensor:
    """True at the first token of each document: at the start of a sequence, and where the document number changes."""
    first_B1 = torch.ones_like(document_BT[:, :1], dtype=torch.bool)
    return torch.cat((first_B1, document_BT[:, 1:] != document_BT[:, :-1]), dim=1)


def once_per_batch(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache the last result as long as its `document_BT`, the first argument, is alive and unchanged. Results are
    looked up by tensor identity: comparing values would make the host wait for the device."""
    cache: dict[tuple, tuple[weakref.ref, Tensor]] = {}

    @functools.wraps(compute)
    def cached(document_BT: Tensor, *args: object) -> Tensor:
        if torch.compiler.is_compiling():
            return compute(document_BT, *args)
        key = (0 if document_BT.is_inference() else document_BT._version, *args)
        source, result = cache.get(key, (lambda: None, None))
        if result is None or source() is not document_BT:
            with torch.inference_mode(False):  # a measure may compute it first, and training reuse it
                result = compute(document_BT, *args)
            cache.clear()
            cache[key] = (weakref.ref(document_BT, lambda _: cache.clear()), result)
        return result

    return cached
