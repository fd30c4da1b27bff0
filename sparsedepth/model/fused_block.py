"""The plain block with hand-written derivatives (`model.fused`): fewer operations than autograd's, the same values.

For eager fp32, in training and in inference mode; otherwise, as where a block is compiled or differentiated by a
measure, the plain formulas of `Block` run. No module inside a fused branch is called: no hook of theirs runs.
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
    "n_layers", "loops", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "seq_len", "tie_embeddings",
    "norm_eps", "init", "init_std", "base_width", "weight_density", "residual_scalars", "value_residual",
    "rope_theta", "sliding_window", "mask_documents", "eod", "attention_dropout", "n_experts", "top_k", "d_expert",
    "n_shared_experts", "n_dense_layers", "renormalise_gates", "balance_loss", "router_z_loss", "allow",
}
# fmt: on
SUPPORTED: dict[Part, set[str]] = {
    "attention": BOTH | {"activation", "ffn_dropout"},
    "ffn": BOTH | {"qk_norm", "qk_norm_over"},
}
"""Fields that may have any value in a block whose branch is fused; every other one must be at its default, or have a
value of CHOICES."""
CHOICES = {"depth_scale": {"lns"}, "parametrisation": {"mup"}}


def is_supported(part: Part, config: ModelConfig) -> bool:
    """Whether the branch can be fused: every field has a value known to be computed here. A new field is not."""
    changed = {
        name
        for name, field in ModelConfig.model_fields.items()
        if name not in SUPPORTED[part] and getattr(config, name) not in {field.default, *CHOICES.get(name, ())}
    }
    return not changed


class FusedBlock(Block):
    """x + A(s N(x)), and with SwiGLU u + F(s N(u)), by `fused` where it applies."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.fuses_attention, self.fuses_ffn = is_supported("attention", config), is_supported("ffn", config)

    def _norm(self, norm: nn.Module) -> fused.Norm:
        """A norm with s as part of its weight."""
        assert isinstance(norm, RMSNorm)
        return fused.Norm(times(norm.weight, self.depth_factor) if self.is_scaled else norm.weight, norm.eps)

    def after_attention(self, x_BTD: Tensor, context: Context) -> Tensor:
        if not (self.fuses_attention and fused.use_fused(x_BTD, self.training)):
            return super().after_attention(x_BTD, context)
        assert context.rotary is not None
        x_BTD, part = self.mix_with_start(x_BTD, context), self.attention
        matrices, norm = (part.query.matrix, part.key.matrix, part.value.matrix), self._norm(self.attention_norm)
        heads = fused.rotated_heads(x_BTD, *matrices, context.rotary, norm, part.query.kernel)
        return fused.add_product(x_BTD, part.attended(*heads, context), part.output.matrix, part.output.kernel)

    def after_ffn(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        part = self.ffn
        if not (self.fuses_ffn and isinstance(part, FeedForward) and fused.use_fused(u_BTD, self.training)):
            return super().after_ffn(u_BTD, router_loss)
        assert part.gate is not None
        norm = self._norm(self.ffn_norm)
        hidden_BTF = fused.swiglu(u_BTD, part.gate.matrix, part.up.matrix, norm, part.up.kernel)
        return fused.add_product(u_BTD, hidden_BTF, part.down.matrix, part.down.kernel)
