"""Weight names of this decoder and of transformers, in one table for measuring, export and training from a model.

Families with Llama's layout share the names; Gemma-2 also has norms after its branches. GPT-2 and GPT-NeoX, which are
only measured, and all other measured types are in `probe.hf_types`.
"""

import re
from collections.abc import Mapping

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
"""Gemma-2's differences."""

VIT = {
    "attention_norm": "layernorm_before",
    "ffn_norm": "layernorm_after",
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
    "attention.output": "attention.o_proj",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
}
OUTSIDE_BLOCKS_VIT = {"norm": "vit.layernorm", "head": "classifier"}
"""The patch embedding has other parts in transformers (`exchange.vit`)."""


def hf_name(name: str, family: str) -> str | None:
    """A decoder parameter's name in this transformers family; None if the family has no such weight."""
    in_block = re.match(r"blocks\.(\d+)\.", name)
    if in_block is None:
        return _renamed(name, OUTSIDE_BLOCKS_VIT if family == "vit" else OUTSIDE_BLOCKS)
    names = {"vit": VIT, "gemma2": IN_BLOCK | GEMMA2}.get(family, IN_BLOCK)
    name_in_layer = _renamed(name[in_block.end() :], names)
    return name_in_layer and f"{'vit' if family == 'vit' else 'model'}.layers.{in_block[1]}.{name_in_layer}"


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    """The new name of a module's parameter, or of a parameter without a module."""
    module, _, parameter = name.rpartition(".")
    return names.get(name) or (f"{names[module]}.{parameter}" if module in names else None)
