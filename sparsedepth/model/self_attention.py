"""The attention module of a block: projections, q/k norm, RoPE, and a kernel (`attention`).

Shapes: B sequences, T tokens, D d_model, H query heads, G key/value heads, K head width, X heads
times K.
"""

from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import attention
from sparsedepth.model.context import Context, Rotary, rotate
from sparsedepth.model.linear import Linear, project_together
from sparsedepth.model.norms import RMSNorm


class Attention(nn.Module):
    """Attention, causal unless in a ViT; each of the G key/value heads serves H / G query heads.

    q/k norm, before RoPE, is an RMSNorm over the K channels of each head with a weight shared by
    all heads (Qwen3), or over all H K channels of a query and G K of a key (OLMoE).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.n_kv_heads is not None
        self.d_head, self.window = config.d_model // config.n_heads, config.sliding_window
        self.query = Linear(config.d_model, config.n_heads * self.d_head)
        self.key = Linear(config.d_model, config.n_kv_heads * self.d_head)
        self.value = Linear(config.d_model, config.n_kv_heads * self.d_head)
        self.output = Linear(config.n_heads * self.d_head, config.d_model)
        self.query_norm = self._norm(config, config.n_heads)
        self.key_norm = self._norm(config, config.n_kv_heads)
        self.kernel, self.dropout = "sdpa", config.attention_dropout
        self.causal = config.architecture == "decoder"

    def _norm(self, config: ModelConfig, n_heads: int) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(self.d_head * (n_heads if config.qk_norm_over == "all" else 1), config.norm_eps)

    def _heads(self, y_BTX: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """A projection, with the norm if given, by head: [B, T, heads, K]."""
        if norm is not None:
            # Under autocast the norm returns fp32, as its weight is; kernels need q and k in the
            # dtype of v.
            y_BTX = norm(y_BTX.unflatten(-1, (-1, norm.weight.shape[-1]))).flatten(-2).to(y_BTX.dtype)
        return y_BTX.unflatten(-1, (-1, self.d_head))

    def queries_keys(self, x_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """q_BHTK and k_BGTK after norm and RoPE; attention weights are softmax(q k / sqrt(K)) over
        the visible keys."""
        return self._positioned(*project_together(x_BTD, self.query, self.key), rotary)

    def _positioned(self, q_BTX: Tensor, k_BTX: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        q_BTHK = rotate(self._heads(q_BTX, self.query_norm), rotary)
        k_BTGK = rotate(self._heads(k_BTX, self.key_norm), rotary)
        return q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2)

    def values(self, x_BTD: Tensor) -> Tensor:
        """v_BGTK, before the value residual."""
        return self._heads(self.value(x_BTD)).transpose(1, 2)

    def mixed_values(self, v_BGTK: Tensor, context: Context) -> Tensor:
        """The values that attention sums."""
        return v_BGTK

    def attended(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, context: Context) -> Tensor:
        """The attended values of all heads side by side: input of the output projection."""
        v_BGTK, dropout = self.mixed_values(v_BGTK, context), self.dropout if self.training else 0.0
        kernel = attention.KERNELS[self.kernel]
        out_BHTK = kernel(q_BHTK, k_BGTK, v_BGTK, self.window, context.document_BT, dropout, self.causal)
        return out_BHTK.transpose(1, 2).flatten(2)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        q_BTX, k_BTX, v_BTX = project_together(x_BTD, self.query, self.key, self.value)
        heads = *self._positioned(q_BTX, k_BTX, context.rotary), self._heads(v_BTX).transpose(1, 2)
        return self.output(self.attended(*heads, context))
