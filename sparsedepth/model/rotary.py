"""Rotary position embeddings (2104.09864): the angle of position t in pair i of a head is t * theta^(-2i/K).

Shapes: B sequences, T tokens, X heads, K head width.
"""

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor] | None
"""cos_TK and sin_TK of the positions 0..T-1; None where positions are learned."""


def tables(n_tokens: int, d_head: int, theta: float, device: torch.device) -> Rotary:
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
