"""The cost of a decoder from its config: parameters and FLOPs.

    forward FLOPs per token = 2 (active matrix parameters without the embedding) + 4 T H K per layer

2 per multiply-add; the second term is q k and a v over a full T x T matrix, as FLOP counters do. Entries that some
kernels skip are counted: the causal half, keys outside a window or document. Norms, gates, softmax, activations and
rotation are not: under 1% from d_model 64 on. Weights shared by `loops` are one parameter each, and count in the FLOPs
of every pass. Training = 3 x forward (2001.08361, section 2.1)."""

from dataclasses import dataclass
from typing import NamedTuple

from sparsedepth.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Cost:
    params_total: int
    params_blocks: int
    """those in matrices of blocks"""
    params_active: int
    """those used for one token: without the experts it is not routed to"""
    flops_per_token: int
    """forward pass, FLOP"""

    def train_flops(self, tokens: int) -> int:
        """FLOP of training on so many tokens, the backward pass counting twice a forward pass."""
        return 3 * self.flops_per_token * tokens


def cost(config: ModelConfig) -> Cost:
    """Exact parameter counts, and forward FLOPs per token at seq_len."""
    assert config.n_kv_heads is not None and config.d_ff is not None
    d_model = config.d_model
    n_routed = config.n_layers - config.n_dense_layers if config.n_experts else 0
    gates = {"none": 0, "channel": d_model, "head": config.n_heads}[config.gated_attention]
    attention = 2 * d_model * d_model + 2 * d_model * config.n_kv_heads * config.d_head + gates * d_model
    expert = 3 * d_model * (config.d_expert or 0)
    always = d_model * config.n_experts + config.n_shared_experts * expert  # router and shared experts
    ffn = (3 if config.is_gated else 2) * d_model * config.d_ff
    dense = config.n_layers * attention + (config.n_layers - n_routed) * ffn
    used = dense + n_routed * (always + (config.top_k or 0) * expert)  # by a token
    head = config.vocab_size * d_model
    n_readers = 2 * config.n_layers + 1 if config.attention_residuals else 0  # of sources: branches, and the head
    attended = 2 * config.stream_width  # multiply-adds of a reader per token: scores, and their sum
    mixed = 2 * config.n_layers * _of_streams(config).used
    outside = _vectors(config) + (1 if config.tie_embeddings else 2) * head
    in_blocks = (dense + n_routed * (always + config.n_experts * expert)) // config.loops
    return Cost(
        params_total=outside + in_blocks,
        params_blocks=in_blocks,
        params_active=outside + used // config.loops,
        flops_per_token=2 * (used + head + n_readers * attended + mixed)
        + 4 * config.n_layers * config.seq_len * d_model,
    )


class _OfStreams(NamedTuple):
    """Cost of hyper-connections for one branch."""

    params: int = 0
    used: int = 0
    """multiply-adds per token: for the coefficients, and for mixing"""


def _of_streams(config: ModelConfig) -> _OfStreams:
    n, d_model = config.n_streams, config.d_model
    if n == 1:
        return _OfStreams()
    n_inputs = n if config.stream_mixing == "manifold" else 1  # streams from which one coefficient is computed
    matrix = n_inputs * (n + 2) * n_inputs * d_model
    params = matrix + n_inputs * d_model + n * (n + 2) + (3 if n_inputs > 1 else 2)
    return _OfStreams(params, n // n_inputs * matrix + n * n * d_model)


def _vectors(config: ModelConfig) -> int:
    """Parameters of norms, gates, scalars, queries of sources and coefficients of streams."""
    d_model = config.d_model
    n_layers = config.n_blocks
    norm_params = 2 * d_model if config.norm_kind == "layer" else d_model  # LayerNorm has a bias
    norms = 4 if config.norm in ("sandwich", "peri", "keel") else 2
    gates = {"none": 0, "layerscale": 2 * d_model, "skipinit": 2, "admin": 2 * d_model}[config.residual_gate]
    assert config.n_kv_heads is not None
    normed_heads = config.n_heads + config.n_kv_heads if config.qk_norm_over == "all" else 2
    qk_norm = normed_heads * config.d_head if config.qk_norm else 0
    outside = 2 if config.norm == "peri" else 1  # the final norm, and that of the embedding
    scalars = n_layers * (2 * config.residual_scalars + config.gpas) + 2 * (n_layers - 1) * config.value_residual
    scalars += n_layers // 2 * config.stream_skips
    scalars += 2 * n_layers * _of_streams(config).params
    if config.attention_residuals:
        scalars += (2 * n_layers + 1) * 2 * d_model  # a query and a norm of each branch and the head
    return n_layers * (norms * norm_params + gates + qk_norm) + outside * norm_params + scalars
