"""A block of the decoder: attention, then the feed-forward part, each added to the residual stream.

    u = x + A(s N(x)),   y = u + F(s N'(u))                    pre-norm (2002.04745)
    s = 1/sqrt(l) in block l = 1..L with depth_scale lns, else 1                     LayerNorm Scaling (2502.05795, 3)

`Attention` A has grouped heads; F is a `FeedForward`, or with experts `Experts`. Other placements
of norms, gates, sources and scalars are classes of `model.variants`, which override a step of a
branch: its input (`branch_input`, `normed`), its output (`finish`), or the sum (`add_update`).

Shapes: B sequences, T tokens, D d_model (of x: all sources together)."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.role import changed
from sparsedepth.model import fused
from sparsedepth.model.attention import make_attention
from sparsedepth.model.context import Context
from sparsedepth.model.feedforward import Experts, FeedForward, RouterLoss
from sparsedepth.model.linear import times
from sparsedepth.model.norms import RMSNorm, make_norm

Part = Literal["attention", "ffn"]
PARTS = ("attention", "ffn")


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
        self.layer, self.n_layers, self.depth_scale = layer, config.n_layers, config.depth_scale
        # A buffer, not a float, so that compiled blocks share one graph.
        self.register_buffer("depth_factor", torch.tensor(1 / math.sqrt(layer)), persistent=False)

    def initialise(self) -> None:
        """Set the buffer, which is undefined on the meta device."""
        self.depth_factor.fill_(1 / math.sqrt(self.layer))

    def forward(self, x_BTD: Tensor, context: Context, router_loss: RouterLoss | None = None) -> Tensor:
        u_BTD = self.after_attention(x_BTD, context)
        return self.add_update("ffn", u_BTD, self.ffn_update(u_BTD, router_loss)).to(x_BTD.dtype)

    def after_attention(self, x_BTD: Tensor, context: Context) -> Tensor:
        """u_BTD, the stream between attention and the feed-forward part."""
        x_BTD = self.mix_with_start(x_BTD, context)
        return self.add_update("attention", x_BTD, self.attention_update(x_BTD, context))

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
        return times(x_BTD, self.depth_factor) if self.depth_scale == "lns" else x_BTD

    def finish(self, part: Part, branch_BTD: Tensor) -> Tensor:
        """A branch's output as it is added."""
        return branch_BTD

    def add_update(self, part: Part, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        return x_BTD + update_BTD


def is_supported(part: Part, config: ModelConfig) -> bool:
    """Whether the branch can be fused: of every field that acts in it, the value is computed here (`Role.fused`)."""
    acting = {name: role for name, role in changed(config).items() if role.touches("stream", part)}
    return all(getattr(config, name) in role.fused for name, role in acting.items())


class FusedBlock(Block):
    """The plain block with hand-written derivatives (`model.fused`): x + A(s N(x)), and with SwiGLU
    u + F(s N(u)). In eager fp32, in training and in inference mode; otherwise, as where a block is
    compiled or differentiated by a measure, the plain formulas of `Block` run. No module inside a
    fused branch is called: no hook of theirs runs."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.fuses_attention = is_supported("attention", config)
        self.fuses_ffn = is_supported("ffn", config) and isinstance(self.ffn, FeedForward)

    def _norm(self, norm: nn.Module) -> tuple[Tensor, float]:
        """Weight, times s, and eps of a norm."""
        assert isinstance(norm, RMSNorm)
        return times(norm.weight, self.depth_factor) if self.depth_scale == "lns" else norm.weight, norm.eps

    def attention_update(self, x_BTD: Tensor, context: Context) -> Tensor:
        if not (self.fuses_attention and fused.use_fused(x_BTD, self.training)):
            return super().attention_update(x_BTD, context)
        part = self.attention
        norm = self._norm(self.attention_norm)
        weights = part.query.weight, part.key.weight, part.value.weight
        n_heads = (part.query.out_features + part.key.out_features) // part.d_head
        angle_TX = context.once(fused.angles, *context.rotary, n_heads)
        heads = fused.rotated_heads(x_BTD, *norm, angle_TX, part.d_head, *weights)
        return part.output(part.attended(*heads, context))

    def ffn_update(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        if not (self.fuses_ffn and fused.use_fused(u_BTD, self.training)):
            return super().ffn_update(u_BTD, router_loss)
        part = self.ffn
        norm = self._norm(self.ffn_norm)
        assert isinstance(part, FeedForward) and part.gate is not None
        return part.down(fused.swiglu(u_BTD, *norm, part.gate.weight, part.up.weight))
