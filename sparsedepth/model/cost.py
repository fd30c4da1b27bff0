"""What a decoder costs, from its config alone: parameters and FLOPs, by kind.

    forward FLOPs per token = 2 (active matrix parameters without the embedding) + 4 T H K per layer

2 per multiply-add; the second term is q k and a v over a full T x T matrix, as FLOP counters count it (a causal kernel
does half). Norms, softmax, activations and the rotation are left out: under 1% from d_model 64 on.
Training = 3 x forward (2001.08361, section 2.1).
"""

from dataclasses import dataclass

from sparsedepth.config.run import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Cost:
    params_total: int
    params_active: int
    """parameters that touch one token: all but the experts it is not routed to"""
    flops_per_token: int
    """forward pass, FLOP"""


def cost(config: ModelConfig) -> Cost:
    """Exact parameter counts, and forward FLOPs per token at seq_len."""
    assert config.n_kv_heads is not None and config.d_ff is not None
    d_model, d_head = config.d_model, config.d_model // config.n_heads
    attention = 2 * d_model * d_model + 2 * d_model * config.n_kv_heads * d_head
    if config.n_experts:
        assert config.top_k is not None and config.d_expert is not None
        expert = 3 * d_model * config.d_expert
        router = d_model * config.n_experts
        ffn_total, ffn_active = router + config.n_experts * expert, router + config.top_k * expert
    else:
        ffn_total = ffn_active = 3 * d_model * config.d_ff
    norms = (2 * config.n_layers + 1) * d_model
    embedding = config.vocab_size * d_model
    tables = embedding if config.tie_embeddings else 2 * embedding
    matrices = config.n_layers * (attention + ffn_active)
    return Cost(
        params_total=tables + norms + config.n_layers * (attention + ffn_total),
        params_active=tables + norms + matrices,
        flops_per_token=2 * (matrices + embedding) + 4 * config.n_layers * config.seq_len * d_model,
    )
