"""The plain block with hand-written derivatives (`model.fused`): fewer operations than autograd's,
the same values.

For eager fp32, in training and in inference mode; otherwise, as where a block is compiled or
differentiated by a measure, the plain formulas of `Block` run. No module inside a fused branch is
called: no hook of theirs runs.
"""

from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import fused
from sparsedepth.model.block import Block, Part
from sparsedepth.model.context import Context
from sparsedepth.model.feedforward import FeedForward, RouterLoss
from sparsedepth.model.norms import RMSNorm
from sparsedepth.model.stacked import times

# fmt: off
BOTH = {
    "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "seq_len", "tie_embeddings",
    "norm_eps", "init", "init_std", "base_width", "residual_scalars", "value_residual",
    "rope_theta", "sliding_window", "mask_documents", "eod", "attention_dropout", "n_experts", "top_k", "d_expert",
    "n_shared_experts", "n_dense_layers", "renormalise_gates", "balance_loss", "router_z_loss", "allow",
}
# fmt: on
SUPPORTED: dict[Part, set[str]] = {
    "attention": BOTH | {"activation", "ffn_dropout"},
    "ffn": BOTH | {"qk_norm", "qk_norm_over"},
}
"""Fields that may have any value in a block whose branch is fused; every other one must be at its
default, or have a value of CHOICES."""
CHOICES = {"depth_scale": {"lns"}, "parametrisation": {"mup"}}


def is_supported(part: Part, config: ModelConfig) -> bool:
    """Whether the branch can be fused: every field has a value known to be computed here. A new
    field is not."""
    changed = {
        name
        for name, field in ModelConfig.model_fields.items()
        if name not in SUPPORTED[part] and getattr(config, name) not in {field.default, *CHOICES.get(name, ())}
    }
    return not changed


class FusedBlock(Block):
    """The plain block with fused branches: x + A(s N(x)), and with SwiGLU u + F(s N(u))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.fuses_attention = is_supported("attention", config)
        self.fuses_ffn = is_supported("ffn", config) and isinstance(self.ffn, FeedForward)

    def _norm(self, norm: nn.Module) -> fused.Norm:
        """A norm with s as part of its weight."""
        assert isinstance(norm, RMSNorm)
        return fused.Norm(times(norm.weight, self.depth_factor) if self.is_scaled else norm.weight, norm.eps)

    def _attended(self, x_BTD: Tensor, context: Context) -> Tensor:
        """The attended values of all heads, from the stream."""
        assert context.rotary is not None
        part, norm = self.attention, self._norm(self.attention_norm)
        matrices = part.query.weight, part.key.weight, part.value.weight
        return part.attended(*fused.rotated_heads(x_BTD, *matrices, context.rotary, norm, part.query.kernel), context)

    def _hidden(self, u_BTD: Tensor) -> Tensor:
        """The hidden units, from the stream."""
        part, norm = self.ffn, self._norm(self.ffn_norm)
        assert isinstance(part, FeedForward) and part.gate is not None
        return fused.swiglu(u_BTD, part.gate.weight, part.up.weight, norm, part.up.kernel)

    def attention_update(self, x_BTD: Tensor, context: Context) -> Tensor:
        if not (self.fuses_attention and fused.use_fused(x_BTD, self.training)):
            return super().attention_update(x_BTD, context)
        return self.attention.output(self._attended(x_BTD, context))

    def ffn_update(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        if not (self.fuses_ffn and fused.use_fused(u_BTD, self.training)):
            return super().ffn_update(u_BTD, router_loss)
        return self.ffn.get_submodule("down")(self._hidden(u_BTD))
