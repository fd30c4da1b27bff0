"""Tiny random models of every Hugging Face family, with weights large enough that every part matters."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedModel

_COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.25,
}
_HEAD = {"head_dim": 12}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", _HEAD),
    "gemma2": ("Gemma2", {**_HEAD, "query_pre_attn_scalar": 7, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gpt2": ("GPT2", {"n_inner": 48, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt_neox_sequential": ("GPTNeoX", {"use_parallel_residual": False}),
    "llama": ("Llama", {"attention_bias": True}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {**_HEAD, "sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 5}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_ROUTED, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen3": ("Qwen3", _HEAD),
    "qwen3_moe": ("Qwen3Moe", {**_HEAD, **_ROUTED}),
}
"""Name -> prefix of the classes in transformers, and what the config adds to the common sizes."""


def tiny(name: str, attention: str | None = None, **fields: Any) -> PreTrainedModel:
    """A model of the family; every parameter drawn at random, norms and biases too."""
    prefix, own = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **own, **fields})
    if attention is None:
        attention = "eager" if own.get("attn_logit_softcapping") else "sdpa"
    config._attn_implementation = attention
    head = "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
    model = getattr(transformers, head)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model.eval()


def tiny_folder(folder: Path) -> Path:
    """A tiny Qwen3 with a tokenizer of 34 words, as transformers saves them."""
    tiny("qwen3").save_pretrained(folder)
    words = ["</s>", "<unk>", "times", "is", *map(str, range(30))]
    save_tokenizer(folder, {word: index for index, word in enumerate(words)})
    return folder


def save_tokenizer(folder: Path, words: dict[str, int]) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
