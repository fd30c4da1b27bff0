"""What all blocks of a forward pass read beside the stream.

Rotary positions (2104.09864): the angle of position t in pair i of a head is t * theta^(-2i/K).

Shapes: B sequences, T tokens, D d_model (of x_0 all sources together), G key/value heads, K head
width, X heads."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]
"""cos_TK and sin_TK of the positions 0..T-1."""


class Context:
    """Positions, which keys a query sees, x_0 and v_1. No tuple or dataclass: FSDP copies those."""

    def __init__(
        self,
        rotary: Rotary | None = None,
        document_BT: Tensor | None = None,
        first_BTD: Tensor | None = None,
        value_BGTK: Tensor | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        is_causal: bool = True,
    ):
        self.rotary = cast(Rotary, rotary)
        self.window = window  # None where a kernel is called alone
        """`window`: the tokens that one sees, itself included; None = all before it, too"""
        self.softcap = softcap
        """bound of the scores of a foreign model; None = no cap"""
        self.is_causal = is_causal
        """whether later tokens are hidden; not in an encoder"""
        self.document_BT = document_BT
        """a number per token that changes with the document; a token sees only its own document"""
        self.first_BTD = first_BTD
        self.value_BGTK = value_BGTK
        """x_0, for blocks that read it, and v_1; with `value_residual` set by block 1"""
        self.states_BTD: dict[int, Tensor] = {}
        """x_l of the first half, for `stream_skips`; set by the blocks"""
        self._unlimited: Context | None = None
        self._shared: dict[Callable[..., Tensor], Tensor] = {}

    def once(self, compute: Callable[..., Tensor], *args: object) -> Tensor:
        """compute(*args), such as a mask: once for all layers, whose arguments are equal. Compiled
        blocks compute their own, so that they share one graph."""
        if torch.compiler.is_compiling():
            return compute(*args)
        if compute not in self._shared:
            with torch.inference_mode(False):  # a measure may differentiate a block later
                self._shared[compute] = compute(*args)
        return self._shared[compute]

    @property
    def unlimited(self) -> "Context":
        """The same without a window."""
        if self.window is None:
            return self
        self._unlimited = self._unlimited or Context(self.rotary, self.document_BT)
        return self._unlimited

    def repeated(self, copies: int) -> "Context":
        """For several copies of the batch, one after the other."""
        parts = (self.document_BT, self.first_BTD, self.value_BGTK)
        repeated = (None if x is None else x.repeat(copies, *[1] * (x.ndim - 1)) for x in parts)
        context = Context(self.rotary, *repeated, window=self.window)
        context.states_BTD = {layer: x_BTD.repeat(copies, 1, 1) for layer, x_BTD in self.states_BTD.items()}
        return context


def rotary_tables(n_tokens: int, d_head: int, theta: float, device: torch.device) -> Rotary:
    """cos_TK and sin_TK in fp32."""
    rate = theta ** (-torch.arange(0, d_head, 2, device=device, dtype=torch.float32) / d_head)
    angle_TK = torch.arange(n_tokens, device=device, dtype=torch.float32)[:, None] * rate.repeat(2)
    return angle_TK.cos(), angle_TK.sin()


def rotate(x_BTXK: Tensor, rotary: Rotary) -> Tensor:
    """Llama's pairing of halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = x_BTXK.chunk(2, dim=-1)
    # Both halves have the same angles. Rotating halves lets a compiler write each one in place.
    cos, sin = (part.to(x_BTXK.dtype)[:, None, : first.shape[-1]] for part in rotary)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
