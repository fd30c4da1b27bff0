"""Reference models of transformers that carry the weights of our decoder."""

import torch
import transformers

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder


def _shared(config: ModelConfig) -> dict:
    heads = {"num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads}
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.d_model, "num_hidden_layers": config.n_layers}
    sizes |= {"intermediate_size": config.d_expert or config.d_ff, "max_position_embeddings": config.seq_len}
    numbers = {"rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta}
    return heads | sizes | numbers | {"tie_word_embeddings": config.tie_embeddings, "attn_implementation": "eager"}


def reference(config: ModelConfig, family: str = "llama") -> torch.nn.Module:
    """A fresh reference model of the same shape."""
    routed = {"num_experts_per_tok": config.top_k, "output_router_logits": True}
    own = {
        "llama": {},
        "mistral": {"sliding_window": config.sliding_window},
        "qwen3": {"head_dim": config.d_model // config.n_heads},
        "mixtral": {"num_local_experts": config.n_experts, **routed},
        "olmoe": {"num_experts": config.n_experts, "norm_topk_prob": config.renormalise_gates, **routed},
    }[family]
    config_of, model_of = (getattr(transformers, family.capitalize() + end) for end in ("Config", "ForCausalLM"))
    return model_of(config_of(**own, **_shared(config)))


def ours_to_reference(model: Decoder) -> dict[str, str]:
    """Our parameter's name -> the reference's."""
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not model.config.tie_embeddings:
        names["head.weight"] = "lm_head.weight"
    parts = {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        **{f"attention.{n}.weight": f"self_attn.{n[0]}_proj.weight" for n in ("query", "key", "value", "output")},
        **{f"attention.{n}_norm.weight": f"self_attn.{n[0]}_norm.weight" for n in ("query", "key")},
        **{f"ffn.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
        "ffn.router.weight": "mlp.gate.weight",
        "ffn.gate_up_E2FD": "mlp.experts.gate_up_proj",
        "ffn.down_EDF": "mlp.experts.down_proj",
    }
    own = dict(model.named_parameters())
    for layer in range(model.config.n_layers):
        names |= {
            f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
            for ours, theirs in parts.items()
            if f"blocks.{layer}.{ours}" in own
        }
    return names


def carry(model: Decoder, other: torch.nn.Module) -> torch.nn.Module:
    """Copy our weights into the reference; every reference parameter must be named."""
    own, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    names = ours_to_reference(model)
    assert set(names.values()) == set(theirs) and set(names) == set(own)
    with torch.no_grad():
        for ours, name in names.items():
            theirs[name].copy_(own[ours])
    return other.eval()
