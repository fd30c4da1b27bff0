"""Where the norms N of a branch F stand; `pre` is the plain block.

    post, mix   N(x + F x); with mix in the first `mix_frac` of the blocks             (1706.03762; 2412.13795)
    deepnorm    N(alpha x + F x),  alpha = (2L)^(1/4), initial weights by (8L)^(-1/4)  (2203.00555, decoder only)
    keel        N(2L x + F(N' x)),  2L = the number of branches                        (2601.19895)
    sandwich    x + N'(F(N x));  peri the same, and x_0 = N(embedding)                 (2105.13290; 2502.02732)

LNS multiplies all these norms but that of the embedding by s. Deviates: post and deepnorm keep the
final norm before the head, as the code of 2502.05795 does; it only adds a gain there. That code
also has alpha = 8^(1/2) at any depth and multiplies initial weights by (8L)^(+1/4); we follow the
paper."""

from torch import Tensor

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.block import PARTS, Block, Part
from sparsedepth.model.norms import make_norm


class PostNorm(Block):
    """Post-norm, also in the first blocks of Mix-LN: N(x + F x)."""

    is_sum, norms_sum = False, True

    def branch_input(self, part: Part, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return self.normed(f"{part}_norm", super().add_update(part, x_BTD, update_BTD))


class DeepNorm(PostNorm):
    """DeepNorm: N((2L)^(1/4) x + F x)."""

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return super().add_update(part, (2 * self.n_layers) ** 0.25 * x_BTD, update_BTD)


class Keel(Block):
    """Keel: N(2L x + F(N' x))."""

    is_sum, norms_sum = False, True

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention_sum_norm = make_norm(config)
        self.ffn_sum_norm = make_norm(config)

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return self.normed(f"{part}_sum_norm", super().add_update(part, 2.0 * self.n_layers * x_BTD, update_BTD))


class Sandwich(Block):
    """Sandwich norms, also those of peri: x + N'(F(N x))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        for part in PARTS:
            setattr(self, f"{part}_out_norm", make_norm(config))

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        return self.normed(f"{part}_out_norm", super().finish(part, branch_BTD))
