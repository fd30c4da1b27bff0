"""The names of weights: this decoder's and transformers', in one table that reading, exporting and training from use.

Families laid out as Llama share the names; Gemma-2 has norms after its branches too. A ViT's (`exchange.vit`) and those
of GPT-2 and GPT-NeoX (`probe.hf`), which are read only, are their own.
"""

import re

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

OF_GEMMA2 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "ffn_out_norm": "post_feedforward_layernorm",
}
"""Where Gemma-2 differs."""

MATRIX_KINDS = {f"{theirs}.weight": ours.partition(".")[2] for ours, theirs in IN_BLOCK.items()}
"""The name of a parameter inside its layer there -> what `ProbedModel.matrices` calls it."""


def hf_name(name: str, family: str) -> str | None:
    """What transformers calls a parameter of the decoder in this family; None where it has no such weight."""
    in_block = re.match(r"blocks\.(\d+)\.", name)
    names = (IN_BLOCK | OF_GEMMA2 if family == "gemma2" else IN_BLOCK) if in_block else OUTSIDE_BLOCKS
    own = name[in_block.end() :] if in_block else name
    module, _, parameter = own.rpartition(".")
    theirs = names.get(own) or (f"{names[module]}.{parameter}" if module in names else None)
    return f"model.layers.{in_block[1]}.{theirs}" if in_block and theirs else theirs
