"""Tiny random models of every Hugging Face family, with weights large enough that every part matters."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedModel

_COMMON = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.25},
}
_HEAD = {"head_dim": 12}
_BY_LAYER = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {"rope_parameters": _LLAMA3}),
    "arcee": ("Arcee", {**_HEAD, "mlp_bias": True}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("Cohere2", {**_BY_LAYER, "logit_scale": 0.3}),
    "ernie4_5": ("Ernie4_5", {**_HEAD, "use_bias": True}),
    "exaone4": ("Exaone4", _BY_LAYER),
    "gemma": ("Gemma", _HEAD),
    "gemma2": ("Gemma2", {**_HEAD, "query_pre_attn_scalar": 7, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gemma3_text": (
        "Gemma3", {**_HEAD, **_BY_LAYER, "query_pre_attn_scalar": 7, "final_logit_softcapping": 2.0}
    ),
    "glm": ("Glm", _HEAD),
    "glm4": ("Glm4", _HEAD),
    "glm4_moe": (
        "Glm4Moe",
        {
            "use_qk_norm": True, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
            "n_routed_experts": 4, "n_group": 2, "routed_scaling_factor": 1.5, "num_mtp_layers": 0, **_HEAD,
        },
    ),
    "granite": (
        "Granite",
        {
            "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        },
    ),
    "gpt2": ("GPT2", {"n_inner": 48, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt_neox_sequential": ("GPTNeoX", {"use_parallel_residual": False}),
    "helium": ("Helium", {"head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", _HEAD),
    "llama": ("Llama", {"attention_bias": True}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "ministral": ("Ministral", {**_HEAD, **_BY_LAYER}),
    "ministral3": ("Ministral3", {**_HEAD, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}}),
    "mistral": ("Mistral", {**_HEAD, "sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 5}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": ("Nemotron", {**_HEAD, "hidden_act": "relu2"}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _BY_LAYER),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_ROUTED, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen3": ("Qwen3", _HEAD),
    "qwen3_moe": ("Qwen3Moe", {**_HEAD, **_ROUTED}),
    "seed_oss": ("SeedOss", _HEAD),
    "smollm3": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1, 0]}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm_parallel": ("StableLm", {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
}  # fmt: skip
"""Name -> prefix of the classes in transformers, and what the config adds to the common sizes."""


_GPT = {"vocab_size": 40, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "n_inner": 48, "eos_token_id": 1}
_EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
_SSM = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {}),
    "deepseek_v2": ("DeepseekV2", {**_EXPERTS, **_MLA}),
    "deepseek_v3": ("DeepseekV3", {**_EXPERTS, **_MLA}),
    "dots1": ("Dots1", {**_EXPERTS, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}),
    "falcon_alibi": ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", {**_HEAD, **_BY_LAYER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptj": ("GPTJ", {**_GPT, "rotary_dim": 4}),
    "jais2": ("Jais2", {}),
    "mamba2": ("Mamba2", _SSM),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_HEAD, **_ROUTED, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
}  # fmt: skip
"""Types whose blocks are of another make: `tests/probe/test_more_types.py`."""


def tiny(name: str, attention: str | None = None, **fields: Any) -> PreTrainedModel:
    """A model of the family; every parameter drawn at random, norms and biases too."""
    prefix, own = (FAMILIES | OTHERS)[name]
    config = getattr(transformers, f"{prefix}{'Text' if prefix == 'Gemma3' else ''}Config")(
        **{**_COMMON, **own, **fields}
    )
    if attention is None:
        attention = "eager" if hasattr(config, "attn_logit_softcapping") else "sdpa"  # as loading does
    head = getattr(transformers, "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    config._attn_implementation = attention if head._supports_sdpa else "eager"
    with torch.random.fork_rng():  # vectors are near their initial values, of which some are drawn
        torch.manual_seed(0)
        model = head(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model.eval()


WORDS = {word: index for index, word in enumerate(["</s>", "<unk>", "times", "is", *map(str, range(30))])}


def tiny_folder(folder: Path, name: str = "qwen3") -> Path:
    """A tiny model with a tokenizer of 34 words, as transformers saves them."""
    tiny(name).save_pretrained(folder)
    save_tokenizer(folder, WORDS)
    return folder


def save_tokenizer(folder: Path, words: dict[str, int]) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
