"""`value_residual`: attention of blocks 2..L sums c_l v_l + d_l v_1, its own values and block 1's;
c and d start at 1/2 (2410.17897, Learnable-ResFormer over all layers). Skipping, swapping or
replacing a block does not change v_1.

Shapes: B sequences, G key/value heads, T tokens, K head width.
"""

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.context import Context
from sparsedepth.model.self_attention import Attention
from sparsedepth.model.stacked import times


class FirstValues(Attention):
    """Attention of block 1, which leaves its values to the later ones."""

    def mixed_values(self, v_BGTK: Tensor, context: Context) -> Tensor:
        if context.value_BGTK is None:
            context.value_BGTK = v_BGTK
        return v_BGTK


class ValueResidual(Attention):
    """Attention that sums c v + d v_1."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.value_scalar, self.first_value_scalar = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def mixed_values(self, v_BGTK: Tensor, context: Context) -> Tensor:
        assert context.value_BGTK is not None
        mixed_BGTK = times(v_BGTK, self.value_scalar) + times(context.value_BGTK, self.first_value_scalar)
        return mixed_BGTK.to(v_BGTK.dtype)  # under autocast the scalars are fp32; kernels need one dtype


def make_attention(config: ModelConfig, layer: int) -> Attention:
    """The attention of a block."""
    if not config.value_residual:
        return Attention(config)
    return FirstValues(config) if layer == 1 else ValueResidual(config)
