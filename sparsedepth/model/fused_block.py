"""The plain block with hand-written derivatives (`model.fused`), in eager fp32, in training and in
inference mode; otherwise, as where a block is compiled or differentiated by a measure, the plain
formulas of `Block` run. No module inside a fused branch is called: no hook of theirs runs.
"""

from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import fused
from sparsedepth.model.block import Block, Part
from sparsedepth.model.context import Context
from sparsedepth.model.feedforward import FeedForward, RouterLoss
from sparsedepth.model.norms import RMSNorm
from sparsedepth.model.products import times

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
"""Fields of any value in a fused branch; others have their default, or one of CHOICES."""
CHOICES = {"depth_scale": {"lns"}, "parametrisation": {"mup"}}


def is_supported(part: Part, config: ModelConfig) -> bool:
    """Whether the branch can be fused: every field has a value known to be computed here."""
    return all(
        name in SUPPORTED[part] or getattr(config, name) in {field.default, *CHOICES.get(name, ())}
        for name, field in ModelConfig.model_fields.items()
    )


class FusedBlock(Block):
    """The plain block with fused branches: x + A(s N(x)), and with SwiGLU u + F(s N(u))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.fuses_attention = is_supported("attention", config)
        self.fuses_ffn = is_supported("ffn", config) and isinstance(self.ffn, FeedForward)

    def _norm(self, norm: nn.Module) -> tuple[Tensor, float]:
        """Weight, times s, and eps of a norm."""
        assert isinstance(norm, RMSNorm)
        return times(norm.weight, self.depth_factor) if self.is_scaled else norm.weight, norm.eps

    def attention_update(self, x_BTD: Tensor, context: Context) -> Tensor:
        if not (self.fuses_attention and fused.use_fused(x_BTD, self.training)):
            return super().attention_update(x_BTD, context)
        assert context.rotary is not None
        part, norm = self.attention, self._norm(self.attention_norm)
        weights = part.query.weight, part.key.weight, part.value.weight
        n_heads = (part.query.out_features + part.key.out_features) // part.d_head
        angle_TX = context.once(fused.angles, *context.rotary, n_heads)
        heads = fused.rotated_heads(x_BTD, *norm, angle_TX, part.d_head, *weights)
        return part.output(part.attended(*heads, context))

    def ffn_update(self, u_BTD: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        if not (self.fuses_ffn and fused.use_fused(u_BTD, self.training)):
            return super().ffn_update(u_BTD, router_loss)
        part, norm = self.ffn, self._norm(self.ffn_norm)
        assert isinstance(part, FeedForward) and part.gate is not None
        return part.down(fused.swiglu(u_BTD, *norm, part.gate.weight, part.up.weight))
