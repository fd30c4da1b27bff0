"""Fixed factors inside a block, and dropout of what a branch adds.

`depth_scale` multiplies by s = 1/sqrt(l) in block l at one place (2502.05795, section 3 and Table
8), the same for both branches: with lns the output of every norm of the block (`Block.normed`),
else by one of these classes. The norms of the embedding, of queries and keys, and before the head
are never scaled.
"""

import torch.nn.functional as F
from torch import Tensor

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import Block, Part
from sparsedepth.model.stacked import times


class BeforeNorm(Block):
    """LNS before the norms: s on the input of every norm."""

    def normed(self, name: str, x_BTD: Tensor) -> Tensor:
        return super().normed(name, times(x_BTD, self.depth_factor))


class AfterBranch(Block):
    """LNS after the branches: s on the output of both branches, or of one: after_branch,
    after_attention, after_ffn."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.place = config.depth_scale

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        branch_BTD = super().finish(part, branch_BTD)
        return times(branch_BTD, self.depth_factor) if self.place in ("after_branch", f"after_{part}") else branch_BTD


class AfterResidual(Block):
    """LNS on the stream, s (x + F): s on each sum of stream and branch."""

    is_sum = False

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return times(super().add_update(part, x_BTD, update_BTD), self.depth_factor)


class CompleteP(Block):
    """The branch factor of CompleteP: x + (base_depth / L) F, with `parametrisation` completep
    (2505.01618)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.branch_factor = 1 / config.depth_multiplier

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        return self.branch_factor * super().finish(part, branch_BTD)


class ResidualDropout(Block):
    """Dropout of single entries of F's output, in training only (1706.03762, 5.4). Deviates: not on
    the embedding."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.dropout = config.residual_dropout

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        return super().finish(part, F.dropout(branch_BTD, self.dropout, self.training))
