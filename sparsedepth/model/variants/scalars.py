"""Learned numbers on the residual stream: `residual_scalars` and `gpas`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import Block, Part
from sparsedepth.model.context import Context
from sparsedepth.model.stacked import times


class ResidualScalars(Block):
    """Learned weights of stream and embedding: block l reads a_l x + b_l x_0; a and b start at 1
    and 0 (nanochat; modded-nanogpt). Skipping, swapping or replacing a block does not change
    x_0."""

    is_sum = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.stream_scalar, self.first_scalar = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def mix_with_start(self, x_BTD: Tensor, context: Context) -> Tensor:
        assert context.first_BTD is not None
        return times(x_BTD, self.stream_scalar) + times(context.first_BTD, self.first_scalar)


class Gpas(Block):
    """GPAS: each sum shrinks to x - silu(p_l) x with a learned number p_l, initially 0
    (2506.22049); if a norm follows, the stream before the sum, as in the authors' code. The
    training gradient ignores the factor; in evaluation, where measures differentiate, the
    derivative is exact."""

    is_sum = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.gpas_scalar = nn.Parameter(torch.empty(1))

    def _shrunk(self, x_BTD: Tensor) -> Tensor:
        return x_BTD - times(x_BTD.detach() if self.training else x_BTD, F.silu(self.gpas_scalar))

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        if self.norms_sum:
            return super().add_update(part, self._shrunk(x_BTD), update_BTD)
        return self._shrunk(super().add_update(part, x_BTD, update_BTD))
