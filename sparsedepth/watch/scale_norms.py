"""LNS for a model of another library: `scale_norms(model)` before training, beside `watch` (2502.05795).

    norm of block l  ->  norm / sqrt(l),   l = 1..L

Every norm that a block applies to its stream: those of full width, and not of queries and keys."""

import re
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsedepth.watch.adapt import blocks_of, original

MARK = "_sparsedepth_scaled"
_OF_ATTENTION = re.compile(r"(^|[._])(q|k|query|key)_\w*$")
"""Names of norms of queries and keys, which over all heads are of full width, too (OLMo-2, OLMoE)."""


def scale_norms(
    model: nn.Module, scale: Literal["lns"] = "lns", *, layers: str | None = None, fold: bool = False
) -> list[str]:
    """Divide the norms of block l by sqrt(l); returns their names. By a forward hook, so that the factor is no weight
    and stays; with `fold` in the weights once, as initial values that training may change. Raises ValueError for a
    model without norms in its blocks, or scaled already, for a norm of several blocks, and where `fold` has no weights
    for it."""
    if scale != "lns":
        raise ValueError(f"scale={scale!r} is not known; the only one is 'lns'")
    module = original(model)
    found = []
    names = {part: name for name, part in module.named_modules()}
    for layer, block in enumerate(blocks_of(module, layers), start=1):
        of_stream = (part for name, part in block.named_modules() if _is_norm(part) and not _OF_ATTENTION.search(name))
        sizes = {part: part.weight.numel() for part in of_stream}
        width = getattr(getattr(module, "config", None), "hidden_size", max(sizes.values(), default=0))
        found += [(names[part], layer, part) for part, size in sizes.items() if size == width]
    if not found:
        raise ValueError(
            f"the blocks of this {type(module).__name__} have no norms with weights; "
            "divide what its norms return by sqrt(layer) in its own code"
        )
    if fold and not _is_multiple(found[-1][2]):
        raise ValueError(
            f"{found[-1][0]} multiplies by more than its weights (1 + w, as Gemma's), which cannot hold the factor; "
            "leave fold out"
        )
    parts = [norm for *_, norm in found]
    for name, _, norm in found:
        if hasattr(norm, MARK):
            raise ValueError(f"{name} is scaled already; scale_norms is called once, after the model is made")
        if parts.count(norm) > 1:
            raise ValueError(
                f"{name} is the norm of several blocks, each with a factor of its own; give each block a norm"
            )
    for _, layer, norm in found:
        setattr(norm, MARK, True)
        factor = layer**-0.5
        if fold:
            with torch.no_grad():
                for weight in norm.parameters():
                    weight.mul_(factor)
        else:
            norm.register_forward_hook(partial(_scaled, factor))
    return [name for name, *_ in found]


def _is_norm(part: Any) -> bool:
    return "norm" in type(part).__name__.lower() and isinstance(getattr(part, "weight", None), Tensor)


@torch.no_grad()
def _is_multiple(norm: Any) -> bool:
    """Whether half its weights give half its output."""
    x_11D = torch.linspace(-1, 1, norm.weight.numel())[None, None].to(norm.weight)
    half = functional_call(norm, {name: weight / 2 for name, weight in norm.named_parameters()}, (x_11D,))
    return torch.allclose(2 * half, norm(x_11D))


def _scaled(factor: float, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * factor
