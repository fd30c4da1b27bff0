"""What all blocks of a forward pass read beside the stream.

Rotary position embeddings (2104.09864): the angle of position t in pair i of a head is t *
theta^(-2i/K).

Shapes: B sequences, T tokens, D d_model (of x_0 all sources together), G key/value heads, K head
width, X heads.
"""

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor] | None
"""cos_TK and sin_TK of the positions 0..T-1; None where positions are learned."""


class Context:
    """What blocks read beside the stream: positions, documents, x_0 and v_1. Not a tuple: FSDP
    hands copies of tuples to its modules."""

    def __init__(
        self,
        rotary: Rotary = None,
        document_BT: Tensor | None = None,
        first_BTD: Tensor | None = None,
        value_BGTK: Tensor | None = None,
    ):
        self.rotary, self.document_BT = rotary, document_BT
        self.first_BTD = first_BTD
        """x_0, for blocks that read it"""
        self.value_BGTK = value_BGTK
        """v_1, the values of block 1; with `value_residual` set by block 1"""

    def repeated(self, copies: int) -> "Context":
        """For several copies of the batch, one after the other."""
        parts = (self.document_BT, self.first_BTD, self.value_BGTK)
        return Context(self.rotary, *(None if x is None else x.repeat(copies, *[1] * (x.ndim - 1)) for x in parts))


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
