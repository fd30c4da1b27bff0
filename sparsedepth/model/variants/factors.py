"""Factors on a branch F or on the stream, fixed or learned, and dropout of what a branch adds.

    depth_scale        s = 1/sqrt(l) in block l at one place, the same for both branches    (2502.05795, Table 8)
    parametrisation    completep: x + (base_depth / L) F                                    (2505.01618)
    residual_gate      layerscale: x + g F with a vector g, initially gate_init             (2103.17239)
                       skipinit: x + g F with a number g, initially 0                       (2002.10444)
                       admin: N(w x + F x) with a vector w for each branch                  (2004.08249)
    residual_scalars   a_l x + b_l x_0 is read by block l; a and b start at 1 and 0    (nanochat; modded-nanogpt)
    stream_skips       x + c_l x_(L + 1 - l) is read by block l > L / 2; c_l starts at 1          (modded-nanogpt)
    gpas               x - silu(p_l) x after each sum; p_l starts at 0                      (2506.22049)

LNS proper, s on the output of every norm of the block, is in `Block.normed`. The norms of the
embedding, of queries and keys, and before the head are never scaled."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import PARTS, Block, Part
from sparsedepth.model.context import Context
from sparsedepth.model.linear import times


class BeforeNorm(Block):
    """LNS before the norms: s on the input of every norm."""

    def normed(self, name: str, x_BTD: Tensor) -> Tensor:
        return super().normed(name, times(x_BTD, self.depth_factor))


class AfterBranch(Block):
    """LNS after the branches: s on the output of both, or of one: after_branch, after_attention,
    after_ffn."""

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        branch_BTD = super().finish(part, branch_BTD)
        is_here = self.depth_scale in ("after_branch", f"after_{part}")
        return times(branch_BTD, self.depth_factor) if is_here else branch_BTD


class AfterResidual(Block):
    """LNS on the stream, s (x + F): s on each sum of stream and branch."""

    is_sum = False

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return times(super().add_update(part, x_BTD, update_BTD), self.depth_factor)


class CompleteP(Block):
    """The branch factor of CompleteP."""

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


class BranchGate(Block):
    """LayerScale and SkipInit."""

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
    authors' code, which also includes Var[x_0]."""
    weight = torch.ones_like(x_BTD[0, 0, 0])
    variance = x_BTD.var()
    for block in blocks:
        for part in PARTS:
            block.get_parameter(f"{part}_gate").fill_(weight)
            is_attention = part == "attention"
            update_BTD = block.attention_update(x_BTD, context) if is_attention else block.ffn_update(x_BTD)
            x_BTD = block.add_update(part, x_BTD, update_BTD)
            variance = variance + update_BTD.var()
            weight = variance.sqrt()


class ResidualScalars(Block):
    """Learned weights of stream and embedding. Skipping, swapping or replacing a block does not
    change x_0."""

    is_sum = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.stream_scalar = nn.Parameter(torch.empty(1))
        self.first_scalar = nn.Parameter(torch.empty(1))

    def mix_with_start(self, x_BTD: Tensor, context: Context) -> Tensor:
        assert context.first_BTD is not None
        return times(x_BTD, self.stream_scalar) + times(context.first_BTD, self.first_scalar)


class StreamSkips(Block):
    """Skips from the first half: x_i is what block i + 1 reads, kept by the first pass over the tokens. Skipping,
    swapping or replacing a block does not change it."""

    is_sum = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.source = config.n_layers + 1 - layer
        if self.source < layer:
            self.skip_scalar = nn.Parameter(torch.empty(1))

    def mix_with_start(self, x_BTD: Tensor, context: Context) -> Tensor:
        if 1 < self.layer <= self.source + 1:  # of an even number of layers, block L / 2 + 1 reads its own input again
            context.states_BTD.setdefault(self.layer - 1, x_BTD)
        if self.source < self.layer:
            x_BTD = x_BTD + times(context.states_BTD[self.source], self.skip_scalar)
        return super().mix_with_start(x_BTD, context)


class Gpas(Block):
    """GPAS; if a norm follows the sum, the stream shrinks before it, as in the authors' code. The
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
