"""The attention module of a block: projections, q/k norm, RoPE, value residual, and a kernel (`attention`).

Shapes: B sequences, T tokens, D d_model, H query heads, G key/value heads, K head width, X heads times K.
"""

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import attention, fused
from sparsedepth.model.linear import Linear
from sparsedepth.model.norms import RMSNorm
from sparsedepth.model.rotary import Rotary, rotate
from sparsedepth.model.stacked import times
from sparsedepth.model.stream_start import StreamStart


class Attention(nn.Module):
    """Attention, causal unless in a ViT; each of the G key/value heads serves H / G query heads.

    q/k norm, before RoPE, is an RMSNorm over the K channels of each head with a weight shared by all heads (Qwen3), or
    over all H K channels of a query and G K of a key (OLMoE).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        assert config.n_kv_heads is not None
        self.d_head, self.window = config.d_model // config.n_heads, config.sliding_window
        self.query = Linear(config.d_model, config.n_heads * self.d_head, config)
        self.key = Linear(config.d_model, config.n_kv_heads * self.d_head, config)
        self.value = Linear(config.d_model, config.n_kv_heads * self.d_head, config)
        self.output = Linear(config.n_heads * self.d_head, config.d_model, config)
        self.query_norm = self._norm(config, config.n_heads)
        self.key_norm = self._norm(config, config.n_kv_heads)
        self.gives_values = config.value_residual and layer == 1
        mixes_values = config.value_residual and layer > 1
        self.value_scalar = nn.Parameter(torch.empty(1)) if mixes_values else None
        self.first_value_scalar = nn.Parameter(torch.empty(1)) if mixes_values else None
        self.kernel, self.dropout = "sdpa", config.attention_dropout
        self.causal = config.architecture == "decoder"

    def _norm(self, config: ModelConfig, n_heads: int) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(self.d_head * (n_heads if config.qk_norm_over == "all" else 1), config.norm_eps)

    def _heads(self, x_BTD: Tensor, projection: Linear, norm: RMSNorm | None = None) -> Tensor:
        """The projection of x, with the norm if given, by head: [B, T, heads, K]."""
        y_BTX = projection(x_BTD)
        if norm is not None:
            # Under autocast the norm returns fp32, as its weight is; kernels need q and k in the dtype of v.
            y_BTX = norm(y_BTX.unflatten(-1, (-1, norm.weight.shape[-1]))).flatten(-2).to(y_BTX.dtype)
        return y_BTX.unflatten(-1, (-1, self.d_head))

    def queries_keys(self, x_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """q_BHTK and k_BGTK after norm and RoPE; attention weights are softmax(q k / sqrt(K)) over the visible keys."""
        q_BTHK = rotate(self._heads(x_BTD, self.query, self.query_norm), rotary)
        k_BTGK = rotate(self._heads(x_BTD, self.key, self.key_norm), rotary)
        return q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2)

    def _queries_keys_values(self, x_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """q_BHTK, k_BGTK and v_BGTK; the fused path permutes the channels of a head, in q and k alike."""
        can_fuse = fused.use_fused(x_BTD) if self.training else fused.is_inference(x_BTD)
        if can_fuse and self.query_norm is None and rotary is not None:
            matrices_XD = (projection.matrix for projection in (self.query, self.key, self.value))
            kernel = self.query.kernel if self.training else "blas"
            return fused.rotated_heads(x_BTD, *matrices_XD, rotary, kernel)
        return *self.queries_keys(x_BTD, rotary), self.values(x_BTD)

    def values(self, x_BTD: Tensor) -> Tensor:
        """v_BGTK, before the value residual."""
        return self._heads(x_BTD, self.value).transpose(1, 2)

    def _with_value_residual(self, v_BGTK: Tensor, start: StreamStart | None) -> Tensor:
        """The values that attention sums: with `value_residual`, a weighted sum with block 1's."""
        if self.gives_values and start is not None and start.value_BGTK is None:
            start.value_BGTK = v_BGTK
        if self.value_scalar is None:
            return v_BGTK
        assert start is not None and start.value_BGTK is not None and self.first_value_scalar is not None
        mixed_BGTK = times(v_BGTK, self.value_scalar) + times(start.value_BGTK, self.first_value_scalar)
        return mixed_BGTK.to(v_BGTK.dtype)  # under autocast the scalars are fp32; kernels need one dtype

    def forward(
        self, x_BTD: Tensor, rotary: Rotary, document_BT: Tensor | None = None, start: StreamStart | None = None
    ) -> Tensor:
        q_BHTK, k_BGTK, v_BGTK = self._queries_keys_values(x_BTD, rotary)
        v_BGTK = self._with_value_residual(v_BGTK, start)
        dropout = self.dropout if self.training else 0.0
        kernel = attention.KERNELS[self.kernel]
        out_BHTK = kernel(q_BHTK, k_BGTK, v_BGTK, self.window, document_BT, dropout, self.causal)
        return self.output(out_BHTK.transpose(1, 2).flatten(2))
