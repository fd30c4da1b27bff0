"""The model types of transformers that can be measured: one row a type, with the names of its parts. And the names of
this decoder's weights there, for measuring, export and training from a model.

Rows are data: the adapter (`probe.hf_adapter`) has no case for any type. A parity test compares each row with the
model's own states, logits, attention weights and matrices."""

import re
from collections.abc import Collection, Iterable, Mapping
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

_KINDS = {"query", "key", "value", "output", "gate", "up", "down"}

LLAMA = {hf: own.partition(".")[2] for own, hf in IN_BLOCK.items() if own.rpartition(".")[2] in _KINDS} | {
    "mlp.experts.gate_up_proj": "gate up",
    "mlp.experts.down_proj": "down",
}
"""Llama's names and those of experts in its place; a type may lack some, such as the gate."""

_GATE_AND_UP = LLAMA | {"mlp.gate_up_proj": "gate up"}
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


# fmt: off
TYPES: dict[str, Parts] = {
    **dict.fromkeys((
        "apertus", "arcee", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "helium",
        "hunyuan_v1_dense", "llama", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
        "olmo3", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm",
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


def check_type(model_type: object, source: str, types: Collection[str] = TYPES) -> None:
    """Raises ValueError for a type that is not one of `types`, with the reason if there is one."""
    if not isinstance(model_type, str) or model_type not in types:
        reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
        raise ValueError(
            f"{source} has model_type={model_type!r}, which is not supported{f': {reason}' if reason else ''}; "
            f"supported: {', '.join(sorted(types))}"
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
