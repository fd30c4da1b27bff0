"""The model types of transformers that can be measured: one row a type, with the names of its parts. And the names of
this decoder's weights there, for measuring, export and training from a model.

Rows are data: the adapter (`probe.hf_adapter`) has no case for any type. A parity test compares each row with the
model's own states, logits, attention weights and matrices."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

OUTSIDE_BLOCKS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "ffn.router": "mlp.gate",
    "ffn.gate_up_E2FD": "mlp.experts.gate_up_proj",
    "ffn.down_EDF": "mlp.experts.down_proj",
    "ffn.shared.gate": "mlp.shared_expert.gate_proj",
    "ffn.shared.up": "mlp.shared_expert.up_proj",
    "ffn.shared.down": "mlp.shared_expert.down_proj",
}

GEMMA2 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "ffn_out_norm": "post_feedforward_layernorm",
}

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of their number in configurations."""
_KINDS = {"query", "key", "value", "output", "gate", "up", "down"}

LLAMA = {hf: own.partition(".")[2] for own, hf in IN_BLOCK.items() if own.rpartition(".")[2] in _KINDS} | {
    "mlp.experts.gate_up_proj": "gate up",
    "mlp.experts.down_proj": "down",
}
"""Llama's names and those of experts in its place; a type may lack some, such as the gate."""

_GATE_AND_UP = LLAMA | {"mlp.gate_up_proj": "gate up"}
_MLA = (
    LLAMA
    | {"self_attn.q_a_proj": "a.query", "self_attn.q_b_proj": "query"}
    | {"self_attn.kv_a_proj_with_mqa": "a.other", "self_attn.kv_b_proj": "b.other"}
)
_FUSED = {"self_attention.dense": "output", "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"}
_SHARED = {f"mlp.shared_experts.{kind}_proj": f"shared.{kind}" for kind in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Names of a type's parts in transformers; the defaults are Llama's."""

    layers: str = "layers"
    final_norm: str = "norm"
    router_scores: str = "softmax"
    """of its logits: 'softmax' or 'sigmoid'"""
    matrices: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    """module, or parameter, in a layer -> the kinds of matrices in it, one below the other"""
    others: tuple[str, ...] = ("mlp.gate", "mlp.shared_expert_gate")
    """modules whose weight has two dimensions and is no matrix of the block: routers, gains of norms by head"""
    is_transposed: bool = False
    """whether weights are stored as [inputs, outputs]"""
    is_by_head: bool = False
    """whether query, key and value are one below the other within each head"""
    ffn: str | None = "mlp"
    """module that a layer adds after its attention; None where it has no such"""
    has_tables: bool = False
    """whether layers hold tables that the dtype of their weights would round, so that they are read in fp32"""
    n_further: int = 0
    """what a layer returns beside the stream"""
    shows_attention: bool = True
    """whether queries and keys, as transformers' attention functions get them, give the attention weights: else those
    measures are missing (a function of its own, sinks, no attention)"""


# fmt: off
TYPES: dict[str, Parts] = {
    **dict.fromkeys((
        "apertus", "arcee", "cohere2", "ernie4_5", "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "granite",
        "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral", "ministral3", "mistral", "mixtral", "nemotron",
        "olmo", "olmo2", "olmo3", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
        "stablelm",
    ), Parts()),
    "cohere": Parts(others=("self_attn.q_norm", "self_attn.k_norm")),
    "glm": Parts(matrices=_GATE_AND_UP),
    "glm4": Parts(matrices=_GATE_AND_UP),
    "glm4_moe": Parts(matrices=LLAMA | _SHARED, router_scores="sigmoid"),
    "gpt2": Parts(layers="h", final_norm="ln_f", is_transposed=True, matrices={
        "attn.c_attn": "query key value", "attn.c_proj": "output", "mlp.c_fc": "up", "mlp.c_proj": "down",
    }),
    "gpt_neox": Parts(final_norm="final_layer_norm", is_by_head=True, matrices={
        "attention.query_key_value": "query key value", "attention.dense": "output",
        "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down",
    }),
    "bloom": Parts(layers="h", final_norm="ln_f", is_by_head=True, ffn=None, n_further=1, shows_attention=False,
        matrices=_FUSED | {"self_attention.query_key_value": "query key value"}),
    "deepseek_v2": Parts(matrices=_MLA | _SHARED),
    "deepseek_v3": Parts(matrices=_MLA | _SHARED, router_scores="sigmoid"),
    "dots1": Parts(matrices=LLAMA | _SHARED, router_scores="sigmoid"),
    "falcon": Parts(layers="h", final_norm="ln_f", n_further=1, shows_attention=False,
        matrices=_FUSED | {"self_attention.query_key_value": "qkv.other"}),
    "gpt_oss": Parts(ffn=None, shows_attention=False, matrices=LLAMA | {"mlp.experts.gate_up_proj": "gate_up.other"},
        others=("mlp.router", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias")),
    "gptj": Parts(layers="h", final_norm="ln_f", has_tables=True, n_further=1, shows_attention=False, matrices={
        "attn.q_proj": "query", "attn.k_proj": "key", "attn.v_proj": "value", "attn.out_proj": "output",
        "mlp.fc_in": "up", "mlp.fc_out": "down",
    }),
    "mamba2": Parts(final_norm="norm_f", ffn=None, shows_attention=False, others=("mixer.conv1d",),
        matrices={"mixer.in_proj": "in.other", "mixer.out_proj": "output"}),
    "opt": Parts(layers="decoder.layers", final_norm="decoder.final_layer_norm", ffn=None,
        matrices=LLAMA | {"self_attn.out_proj": "output", "fc1": "up", "fc2": "down"}),
    "phi": Parts(final_norm="final_layernorm",
        matrices=LLAMA | {"self_attn.dense": "output", "mlp.fc1": "up", "mlp.fc2": "down"}),
    "qwen3_next": Parts(others=("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d"), matrices=LLAMA | {
        f"linear_attn.{name}": f"{name}.other" for name in ("in_proj_qkvz", "in_proj_ba")
    } | {"self_attn.q_proj": "gated.query", "linear_attn.out_proj": "output"}),
    "phi3": Parts(matrices=_GATE_AND_UP | {"self_attn.qkv_proj": "query key value"}),
    "starcoder2": Parts(matrices=LLAMA | {"mlp.c_fc": "up", "mlp.c_proj": "down"}),
}
# fmt: on
"""model_type -> its parts."""

ENCODERS = {"bert": "encoder.layer", "vit": "layers", "dinov2": "encoder.layer"}
"""model_type without a causal mask -> its list of blocks in the base model. Only `watch` measures them."""

REFUSED = dict.fromkeys(
    ("gemma4", "gemma4_text", "gemma3n", "gemma3n_text"),
    "its layers also read tokens, and keys and values of other layers, so none is a function of the residual stream",
)
"""model_type -> why it is not measured; all others are only not known here."""


def check_type(model_type: object, source: str) -> None:
    """Raises ValueError for a type that is not one of TYPES, with the reason if there is one."""
    if not isinstance(model_type, str) or model_type not in TYPES:
        reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
        raise ValueError(
            f"{source} has model_type={model_type!r}, which is not supported{f': {reason}' if reason else ''}; "
            f"supported: {', '.join(sorted(TYPES))}"
        )


def hf_names(names: Iterable[str], family: str) -> dict[str, str]:
    """The names of a decoder's parameters in this transformers family, without those that it has not."""
    in_layer, found = IN_BLOCK | GEMMA2 if family == "gemma2" else IN_BLOCK, {}
    for name in names:
        in_block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        known, own = (in_layer, in_block[2]) if in_block else (OUTSIDE_BLOCKS, name)
        module, _, parameter = own.rpartition(".")
        if theirs := known.get(own) or (module in known and f"{known[module]}.{parameter}"):
            found[name] = f"model.layers.{in_block[1]}.{theirs}" if in_block else theirs
    return found
