"""`residual_gate`: learned weights of the residual sum.

layerscale  x + g F with a vector g, initially gate_init        (2103.17239)
skipinit    x + g F with a number g, initially 0                (2002.10444)
admin       N(w x + F x) with a vector w for each branch        (2004.08249)
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import PARTS, Block, Part
from sparsedepth.model.context import Context
from sparsedepth.model.stacked import times


class BranchGate(Block):
    """LayerScale and SkipInit: x + g F."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        width = 1 if config.residual_gate == "skipinit" else config.d_model
        self.attention_gate, self.ffn_gate = (nn.Parameter(torch.empty(width)) for _ in PARTS)

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        return times(super().finish(part, branch_BTD), self.get_parameter(f"{part}_gate"))


class Admin(Block):
    """Admin: w x + F x, under the norm of `model.variants.placement.PostNorm`."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention_gate, self.ffn_gate = (nn.Parameter(torch.empty(config.d_model)) for _ in PARTS)

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return super().add_update(part, times(x_BTD, self.get_parameter(f"{part}_gate")), update_BTD)


def profile(blocks: Iterable[Block], x_BTD: Tensor, context: Context) -> None:
    """Set Admin's weights from a batch x_0: w_1 = 1, w_i^2 = Var[x_0] + sum_(j<i) Var[branch j], i
    = 1..2L.

    Variances are over all entries. w_1 .. w_i are set before branch i is profiled, as in the
    authors' code, which also includes Var[x_0].
    """
    weight, variance = torch.ones_like(x_BTD[0, 0, 0]), x_BTD.var()
    for block in blocks:
        for part in PARTS:
            block.get_parameter(f"{part}_gate").fill_(weight)
            is_attention = part == "attention"
            update_BTD = block.attention_update(x_BTD, context) if is_attention else block.ffn_update(x_BTD)
            x_BTD = block.add_update(part, x_BTD, update_BTD)
            variance = variance + update_BTD.var()
            weight = variance.sqrt()
