"""What all blocks of a forward pass read beside the stream.

Rotary position embeddings (2104.09864): the angle of position t in pair i of a head is t *
theta^(-2i/K).

Shapes: B sequences, T tokens, D d_model (of x_0 all sources together), G key/value heads, K head
width, X heads.
"""

# ruff: noqa: N815 (shapes in names of fields)

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor] | None
"""cos_TK and sin_TK of the positions 0..T-1; None where positions are learned."""


@dataclass(eq=False)
class Context:
    """Positions, which keys a query sees, x_0 and v_1. Not a tuple: FSDP hands copies of tuples to
    its modules."""

    rotary: Rotary = None
    causal: bool = True
    """whether a token sees only itself and earlier ones, or all"""
    window: int | None = None
    """keys that a token sees, itself included; None: all before it"""
    document_BT: Tensor | None = None
    """a number per token that changes with the document; a token sees only its own document"""
    first_BTD: Tensor | None = None
    """x_0, for blocks that read it"""
    value_BGTK: Tensor | None = None
    """v_1, the values of block 1; with `value_residual` set by block 1"""
    _shared: dict[Callable[..., Tensor], Tensor] = field(default_factory=dict, init=False)

    def once(self, compute: Callable[..., Tensor], *args: object) -> Tensor:
        """compute(*args), such as a mask: once for all layers, whose arguments are equal. Compiled
        blocks compute their own, so that they share one graph."""
        if torch.compiler.is_compiling():
            return compute(*args)
        if compute not in self._shared:
            with torch.inference_mode(False):  # a measure may differentiate a block later
                self._shared[compute] = compute(*args)
        return self._shared[compute]

    def repeated(self, copies: int) -> "Context":
        """For several copies of the batch, one after the other."""
        own = {name: getattr(self, name) for name in ("document_BT", "first_BTD", "value_BGTK")}
        return replace(self, **{n: x.repeat(copies, *[1] * (x.ndim - 1)) for n, x in own.items() if x is not None})


def rotary_tables(n_tokens: int, d_head: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos_TK and sin_TK in fp32."""
    rate = theta ** (-torch.arange(0, d_head, 2, device=device, dtype=torch.float32) / d_head)
    angle_TK = torch.arange(n_tokens, device=device, dtype=torch.float32)[:, None] * rate.repeat(2)
    return angle_TK.cos(), angle_TK.sin()


def rotate(x_BTXK: Tensor, rotary: Rotary) -> Tensor:
    """Llama's pairing of halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    if rotary is None:
        return x_BTXK
    first, second = x_BTXK.chunk(2, dim=-1)
    # Both halves have the same angles. Rotating halves lets a compiler write each one in place.
    cos, sin = (part.to(x_BTXK.dtype)[:, None, : first.shape[-1]] for part in rotary)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
