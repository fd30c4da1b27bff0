"""A block of the decoder: attention, then the feed-forward part, each added to the residual stream.

    u = x + A(s N(x)),   y = u + F(s N'(u))                    pre-norm (2002.04745)
    s = 1/sqrt(l) in block l = 1..L with depth_scale lns, else 1                     LayerNorm Scaling (2502.05795, 3)

`Attention` A has grouped heads; F is a `FeedForward`, or with experts `Experts`. Other placements
of norms, gates, sources and scalars are classes of `model.variants`, which override a step of a
branch: its input (`branch_input`, `normed`), its output (`finish`), or the sum (`add_update`).

Shapes: B sequences, T tokens, D d_model (of x: all sources together).
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.attention import make_attention
from sparsedepth.model.context import Context
from sparsedepth.model.feedforward import FeedForward, RouterLoss
from sparsedepth.model.moe import Experts
from sparsedepth.model.norms import make_norm
from sparsedepth.model.products import times

Part = Literal["attention", "ffn"]
PARTS: tuple[Part, ...] = ("attention", "ffn")


class Block(nn.Module):
    """The plain pre-norm block."""

    depth_factor: Tensor
    is_sum = True
    """whether y is x + attention update + feed-forward update"""
    norms_sum = False
    """whether a norm follows each sum"""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        has_experts = config.n_experts > 0 and layer > config.n_dense_layers
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config, layer)
        self.ffn_norm = make_norm(config)
        self.ffn = Experts(config) if has_experts else FeedForward(config)
        self.layer, self.is_scaled = layer, config.depth_scale == "lns"
        # A buffer, not a float, so that compiled blocks share one graph.
        self.register_buffer("depth_factor", torch.tensor(1 / math.sqrt(layer)), persistent=False)

    def initialise(self) -> None:
        """Set the buffer, which is undefined on the meta device."""
        self.depth_factor.fill_(1 / math.sqrt(self.layer))

    def forward(self, x_BTD: Tensor, context: Context, router_loss: RouterLoss | None = None) -> Tensor:
        u_BTD = self.after_attention(x_BTD, context)
        return self.after_ffn(u_BTD, router_loss)

    def after_attention(self, x_BTD: Tensor, context: Context) -> Tensor:
        """u_BTD, the stream between attention and the feed-forward part."""
        x_BTD = self.mix_with_start(x_BTD, context)
        return self.add_update("attention", x_BTD, self.attention_update(x_BTD, context))

    def after_ffn(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        """The stream after the block."""
        return self.add_update("ffn", u_BTD, self.ffn_update(u_BTD, router_loss))

    def attention_update(self, x_BTD: Tensor, context: Context) -> Tensor:
        """a_BTD, what attention adds to the stream."""
        return self.finish("attention", self.attention(self.branch_input("attention", x_BTD), context))

    def ffn_update(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        """f_BTD, what the feed-forward part adds to the stream after attention."""
        return self.finish("ffn", self.ffn(self.branch_input("ffn", u_BTD), router_loss))

    def mix_with_start(self, x_BTD: Tensor, context: Context) -> Tensor:
        """The block's input."""
        return x_BTD

    def branch_input(self, part: Part, x_BTD: Tensor) -> Tensor:
        """What a branch reads of the stream: s N(x)."""
        return self.normed(f"{part}_norm", x_BTD)

    def normed(self, name: str, x_BTD: Tensor) -> Tensor:
        """A norm of this block, with LNS times s."""
        x_BTD = getattr(self, name)(x_BTD)
        return times(x_BTD, self.depth_factor) if self.is_scaled else x_BTD

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        """A branch's output as it is added."""
        return branch_BTD

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        """The stream after adding a branch's update."""
        return x_BTD + update_BTD
