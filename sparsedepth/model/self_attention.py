"""The attention module of a block: projections, q/k norm, RoPE, value residual, and a kernel (`attention`).

Rotary position embeddings (2104.09864): the angle of position t in pair i of a head is t * theta^(-2i/K).

x_0 and v_1, the embedding and the first block's values, can be read by every later block (`StreamStart`):

    residual_scalars   block l reads a_l x + b_l x_0;  a and b start at 1 and 0               (nanochat; modded-nanogpt)
    value_residual     attention uses c_l v_l + d_l v_1 in place of its values v_l, l > 1;  c and d start at 1/2
                       (2410.17897, Learnable-ResFormer over all layers)

Skipping, swapping or replacing a block does not change x_0 and v_1.

Shapes: B sequences, T tokens, D d_model (of x_0 all streams together), H query heads, G key/value heads, K head width,
X heads times K (in `rotate` heads).
"""

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import attention, fused
from sparsedepth.model.linear import Linear, project_together
from sparsedepth.model.norms import RMSNorm
from sparsedepth.model.stacked import times

Rotary = tuple[Tensor, Tensor] | None
"""cos_TK and sin_TK of the positions 0..T-1; None where positions are learned."""


def tables(n_tokens: int, d_head: int, theta: float, device: torch.device) -> Rotary:
    """cos_TK and sin_TK in fp32."""
    rate = theta ** (-torch.arange(0, d_head, 2, device=device, dtype=torch.float32) / d_head)
    angle_TK = torch.arange(n_tokens, device=device, dtype=torch.float32)[:, None] * rate.repeat(2)
    return angle_TK.cos(), angle_TK.sin()


def rotate(x_BTXK: Tensor, rotary: Rotary) -> Tensor:
    """Llama's pairing of halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    if rotary is None:
        return x_BTXK
    first, second = x_BTXK.chunk(2, dim=-1)
    # Both halves have the same angles. Rotating halves lets a compiler write each one in place.
    cos, sin = (part.to(x_BTXK.dtype)[:, None, : first.shape[-1]] for part in rotary)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class StreamStart:
    """x_0 and v_1. Not a tuple: FSDP hands copies of tuples to its modules."""

    def __init__(self, x_BTD: Tensor, value_BGTK: Tensor | None = None):
        self.x_BTD = x_BTD
        """x_0"""
        self.value_BGTK = value_BGTK
        """v_1; with `value_residual` set by block 1"""

    def repeated(self, copies: int) -> "StreamStart":
        """Repeated for several copies of the batch, one after the other."""
        v_BGTK = self.value_BGTK
        return StreamStart(self.x_BTD.repeat(copies, 1, 1), None if v_BGTK is None else v_BGTK.repeat(copies, 1, 1, 1))


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
        self.can_fuse = self.causal and not config.qk_norm
        """whether `fused` can compute the heads: rotary positions, no q/k norm"""

    def _norm(self, config: ModelConfig, n_heads: int) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(self.d_head * (n_heads if config.qk_norm_over == "all" else 1), config.norm_eps)

    def _heads(self, y_BTX: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """A projection, with the norm if given, by head: [B, T, heads, K]."""
        if norm is not None:
            # Under autocast the norm returns fp32, as its weight is; kernels need q and k in the dtype of v.
            y_BTX = norm(y_BTX.unflatten(-1, (-1, norm.weight.shape[-1]))).flatten(-2).to(y_BTX.dtype)
        return y_BTX.unflatten(-1, (-1, self.d_head))

    def queries_keys(self, x_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """q_BHTK and k_BGTK after norm and RoPE; attention weights are softmax(q k / sqrt(K)) over the visible keys."""
        return self._finish_queries_keys(*project_together(x_BTD, self.query, self.key), rotary)

    def _finish_queries_keys(self, q_BTX: Tensor, k_BTX: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        q_BTHK = rotate(self._heads(q_BTX, self.query_norm), rotary)
        k_BTGK = rotate(self._heads(k_BTX, self.key_norm), rotary)
        return q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2)

    def _queries_keys_values(self, x_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """q_BHTK, k_BGTK and v_BGTK; the fused path permutes the channels of a head, in q and k alike."""
        use_fused = fused.use_fused(x_BTD) if self.training else fused.is_inference(x_BTD)
        if use_fused and self.can_fuse:
            return self._fused_heads(x_BTD, rotary)
        q_BTX, k_BTX, v_BTX = project_together(x_BTD, self.query, self.key, self.value)
        return *self._finish_queries_keys(q_BTX, k_BTX, rotary), self._heads(v_BTX).transpose(1, 2)

    def _fused_heads(
        self, x_BTD: Tensor, rotary: Rotary, norm: fused.Norm | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.can_fuse and rotary is not None
        matrices = self.query.matrix, self.key.matrix, self.value.matrix
        return fused.rotated_heads(x_BTD, *matrices, rotary, self.query.kernel, norm)

    def values(self, x_BTD: Tensor) -> Tensor:
        """v_BGTK, before the value residual."""
        return self._heads(self.value(x_BTD)).transpose(1, 2)

    def _with_value_residual(self, v_BGTK: Tensor, start: StreamStart | None) -> Tensor:
        """The values that attention sums: with `value_residual`, a weighted sum with block 1's."""
        if self.gives_values and start is not None and start.value_BGTK is None:
            start.value_BGTK = v_BGTK
        if self.value_scalar is None:
            return v_BGTK
        assert start is not None and start.value_BGTK is not None and self.first_value_scalar is not None
        mixed_BGTK = times(v_BGTK, self.value_scalar) + times(start.value_BGTK, self.first_value_scalar)
        return mixed_BGTK.to(v_BGTK.dtype)  # under autocast the scalars are fp32; kernels need one dtype

    def _attended(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        document_BT: Tensor | None,
        start: StreamStart | None,
    ) -> Tensor:
        """The attended values of all heads side by side, from queries, keys and values: input of the output
        projection."""
        q_BHTK, k_BGTK, v_BGTK = heads
        v_BGTK = self._with_value_residual(v_BGTK, start)
        dropout = self.dropout if self.training else 0.0
        kernel = attention.KERNELS[self.kernel]
        out_BHTK = kernel(q_BHTK, k_BGTK, v_BGTK, self.window, document_BT, dropout, self.causal)
        return out_BHTK.transpose(1, 2).flatten(2)

    def forward(
        self, x_BTD: Tensor, rotary: Rotary, document_BT: Tensor | None = None, start: StreamStart | None = None
    ) -> Tensor:
        return self.output(self._attended(self._queries_keys_values(x_BTD, rotary), document_BT, start))

    def added(
        self,
        x_BTD: Tensor,
        norm: fused.Norm,
        rotary: Rotary,
        document_BT: Tensor | None,
        start: StreamStart | None,
    ) -> Tensor:
        """x + attention(norm(x)), by `fused`; only if `can_fuse`."""
        heads_BTX = self._attended(self._fused_heads(x_BTD, rotary, norm), document_BT, start)
        return fused.add_product(x_BTD, heads_BTX, self.output.matrix, self.output.kernel)
