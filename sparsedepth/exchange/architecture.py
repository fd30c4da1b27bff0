"""The transformers architecture that computes the same as a decoder, and its weights; or the reasons why none does.

The config fields select an architecture (`architecture`); what it has no field for is folded into its weights:

    depth_scale lns               s_l into the weights of the block's norms                              exact
    depth_scale after_branch ...  s_l into the output projections, or into the norm after the branch     exact
    residual_gate                 the same                                                               exact
    depth_scale before_norm       nothing: N(s x) = N(x), except that epsilon has a weight of 1/s^2      to epsilon
    norm peri                     the embedding's norm into its rows                                     exact
    n_shared_experts              Qwen2-MoE's gated expert, its gate held at sigmoid(0) = 1/2, doubled   exact

Sandwich norms are exported as Gemma-2 without its attention cap; its embedding scale sqrt(D) and norm weights 1 + w are
folded too. Experts with q/k norm over all heads are exported as OLMoE, per head as Qwen3-MoE; raw gates without q/k
norm as Qwen2-MoE, since OLMoE requires its norm.

Shapes: D d_model, E experts, F d_expert, V vocabulary."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedepth.config.corpus import kind_of
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.role import COMPUTED, changed
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.model.block import PARTS, Block, Part
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.feedforward import Experts, FeedForward
from sparsedepth.model.init import OUTPUTS
from sparsedepth.probe.hf_types import hf_names
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.export import export_notes

Weights = dict[str, Tensor]

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""transformers' name of the gate's activation."""

TOLERANCE = 1e-4
"""maximum difference of a logit, in fp32"""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    family: str
    """model_type of transformers"""
    values: Fields
    """fields of its config"""
    notes: tuple[str, ...]
    """what was folded, and other notes for users of the weights"""


Refusal = tuple[Callable[[ModelConfig], bool], str]


def _away(name: str, reason: str) -> Refusal:
    """Of a field that is away from its default."""
    return lambda c: name in changed(c), f"{name}={{c.{name}!r}}: {reason}"


# fmt: off
REFUSED: tuple[Refusal, ...] = (
    (lambda c: c.n_post_layers > 0, "norm={c.norm!r}: no architecture has an RMSNorm after the residual sum"),
    _away("norm_kind", "all matching architectures have RMSNorm"),
    (lambda c: c.depth_scale == "after_residual",
     "depth_scale='after_residual': it scales the stream itself; folded, weights would grow like n_layers!"),
    (lambda c: not c.is_gated,
     "activation={c.activation!r}: all matching architectures have a gated feed-forward part"),
    (lambda c: c.mask_documents and not _has_pairs(c),
     "mask_documents=True: no architecture limits attention to a document; tokens would see earlier documents"),
    _away("residual_scalars", "in no architecture blocks read the embedding"),
    _away("gpas", "it scales the stream itself; folded, weights would grow with every layer"),
    _away("attention_residuals", "all architectures sum their branches"),
    _away("value_residual", "no architecture reuses the first block's values"),
    _away("n_streams", "no architecture has several residual streams"),
    _away("stream_skips", "in no architecture blocks read those of the first half"),
    _away("loops", "no architecture runs a block again; copies of it would train apart"),
    _away("gated_attention", "only Qwen3-Next has it, whose other layers are linear attention"),
    _away("window_pattern", "architectures with windows have them in every layer, or in every other"),
    (lambda c: _has_out_norms(c) and c.n_experts > 0,
     "norm={c.norm!r} with n_experts={c.n_experts}: no mixture of experts has norms on both sides of a branch"),
    (lambda c: _has_out_norms(c) and c.qk_norm, "norm={c.norm!r} with qk_norm=True: Gemma-2 has no q/k norm"),
    (lambda c: c.qk_norm and c.n_shared_experts > 0,
     "qk_norm=True with n_shared_experts={c.n_shared_experts}: Qwen2-MoE has no q/k norm, and Qwen3-MoE and OLMoE "
     "have no shared expert"),
    (lambda c: c.qk_norm_over == "all" and c.n_experts == 0,
     "qk_norm_over='all' without experts: OLMo-2 has no norm before the branches; qk_norm_over='head' gives Qwen3"),
    (lambda c: c.qk_norm_over == "all" and (c.n_dense_layers > 0 or c.sliding_window is not None),
     "qk_norm_over='all' with n_dense_layers={c.n_dense_layers}, sliding_window={c.sliding_window}: OLMoE has "
     "experts in every layer and no window"),
)
# fmt: on
"""Conditions under which a decoder cannot be exported, with the reason."""


def architecture(config: ModelConfig) -> Architecture:
    """The architecture for these fields. Raises ValueError with all reasons if there is none."""
    reasons = [reason.format(c=config) for applies, reason in REFUSED if applies(config)]
    for name, role in changed(config).items():
        if role.touches(*COMPUTED) and not role.exported:
            reasons.append(f"{name}={getattr(config, name)!r}: no architecture is known to have it")
    if reasons:
        raise ValueError(f"this model cannot be exported to transformers: {'; '.join(reasons)}")
    family = _family(config)
    return Architecture(
        family=family,
        values={**_common(config), **_OWN[family](config)},
        notes=export_notes(config, family, _has_pairs(config)),
    )


def _family(config: ModelConfig) -> str:
    if _has_out_norms(config):
        return "gemma2"
    if config.n_experts == 0:
        return "qwen3" if config.qk_norm else "llama" if config.sliding_window is None else "mistral"
    if config.qk_norm:
        return "olmoe" if config.qk_norm_over == "all" else "qwen3_moe"
    is_plain = config.renormalise_gates and not (config.n_shared_experts or config.n_dense_layers)
    return "mixtral" if is_plain else "qwen2_moe"


def _has_pairs(config: ModelConfig) -> bool:
    """Whether the run is trained on prompts and answers: one is used by itself, and document masks have no effect."""
    return isinstance(config, RunConfig) and kind_of(config.corpus).packs_documents


def _has_out_norms(config: ModelConfig) -> bool:
    return config.norm in ("sandwich", "peri")


def _common(config: ModelConfig) -> Fields:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "hidden_act": ACTIVATIONS.get(config.activation),
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _every_layer(config: ModelConfig) -> Named:
    """The same window, or none, in all layers, for families that choose by layer."""
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0,
        "layer_types": [kind] * config.n_layers,
    }


def _gemma2(config: ModelConfig) -> Named:
    return {
        "hidden_activation": ACTIVATIONS.get(config.activation),
        "query_pre_attn_scalar": config.d_head,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "tie_word_embeddings": False,
        "layer_types": _every_layer(config)["layer_types"],
        "sliding_window": config.sliding_window or config.seq_len,  # read even where no layer has a window
    }


def _experts(config: ModelConfig) -> Named:
    """transformers' balance loss is top_k, not 1, for balanced experts."""
    assert config.top_k is not None
    return {
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.renormalise_gates,
        "router_aux_loss_coef": config.balance_loss / config.top_k,
        "intermediate_size": config.d_expert,
    }


def _mixtral(config: ModelConfig) -> Named:
    """Its gates are always renormalised."""
    experts = {"num_local_experts": config.n_experts, **_experts(config), "sliding_window": config.sliding_window}
    del experts["num_experts"], experts["norm_topk_prob"]
    return experts


def _qwen_moe(config: ModelConfig) -> Named:
    assert config.d_expert is not None
    shared = {"shared_expert_intermediate_size": config.n_shared_experts * config.d_expert, "qkv_bias": False}
    return {
        **_experts(config),
        **_every_layer(config),
        **(shared if _family(config) == "qwen2_moe" else {}),
        "intermediate_size": config.d_ff,
        "moe_intermediate_size": config.d_expert,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.n_dense_layers)),
    }


_OWN: dict[str, Callable[[ModelConfig], Named]] = {
    "llama": lambda config: {},
    "mistral": lambda config: {"sliding_window": config.sliding_window},
    "qwen3": _every_layer,
    "gemma2": _gemma2,
    "mixtral": _mixtral,
    "olmoe": _experts,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
}


@torch.no_grad()
def weights(model: Decoder) -> Weights:
    """The model's weights with the architecture's names, in fp32, computed in fp64."""
    own = folded_weights(model)
    config = model.config
    family = _family(config)
    if config.norm == "peri":
        own["embed.weight"] = model.embed_norm(own["embed.weight"].double())
    if family == "gemma2":
        own["embed.weight"] = own["embed.weight"].double() / math.sqrt(config.d_model)
        # its norms multiply by 1 + w
        own |= {name: weight.double() - 1 for name, weight in own.items() if name.endswith("norm.weight")}
    elif config.tie_embeddings:
        del own["head.weight"]
    named = {theirs: own[name] for name, theirs in hf_names(own, family).items()}
    if family == "qwen2_moe":
        for index, block in enumerate(model.blocks):
            named |= {f"model.layers.{index}.mlp.{name}": weight for name, weight in _shared_gate(block.ffn).items()}
    return {name: weight.detach().float().contiguous() for name, weight in named.items()}


def folded_weights(model: Decoder) -> Weights:
    """With the decoder's names, including what has to be folded for any architecture."""
    own = {**model.state_dict(), "head.weight": model.head.weight.double() / model.config.width_multiplier}
    for index, block in enumerate(model.blocks):
        own |= {f"blocks.{index}.{name}": weight for name, weight in _folded(block, model.config).items()}
    return own


def _folded(block: Block, config: ModelConfig) -> Weights:
    """The weights of norms, and of output projections without a norm after them."""
    after_norm = block.depth_factor.double() if config.depth_scale == "lns" else 1.0
    folded = {}
    for part in PARTS:
        norm = f"{part}_norm"
        factor = branch_factor(block, config, part)
        folded |= {name: weight * after_norm for name, weight in block.get_submodule(norm).named_parameters(norm)}
        if _has_out_norms(config):
            name = f"{part}_out_norm.weight"
            folded[name] = block.get_parameter(name) * after_norm * factor
            continue
        for name, weight in block.get_submodule(part).named_parameters(part):
            if name.endswith(OUTPUTS):
                # Qwen2-MoE halves its shared expert by a gate
                folded[name] = weight * (2 * factor if ".shared." in name else factor).reshape(-1, 1)  # by output
    return folded


def branch_factor(block: Block, config: ModelConfig, part: Part) -> Tensor:
    """The factor on a branch's output: one number, or one per channel."""
    factor = torch.ones_like(block.depth_factor, dtype=torch.float64)
    if config.depth_scale in ("after_branch", f"after_{part}"):
        factor = block.depth_factor.double()
    factor = factor / config.depth_multiplier
    return factor if config.residual_gate == "none" else factor * block.get_parameter(f"{part}_gate").double()


def _shared_gate(ffn: FeedForward | Experts) -> Weights:
    """Weights that Qwen2-MoE requires: the gate of the shared expert, and if there is none an expert of width 0."""
    if isinstance(ffn, FeedForward):
        return {}
    width = ffn.router.in_features
    empty = {"gate_proj": (0, width), "up_proj": (0, width), "down_proj": (width, 0)} if ffn.shared is None else {}
    shapes = {f"shared_expert.{name}": shape for name, shape in empty.items()} | {"shared_expert_gate": (1, width)}
    return {f"{name}.weight": ffn.router.weight.new_zeros(shape) for name, shape in shapes.items()}


def random_documents(config: ModelConfig, n: int) -> Tensor:
    """tokens_NT, each sequence a single document: without `eod`, after which a mask would begin another."""
    tokens_NT = torch.randint(config.vocab_size, (n, config.seq_len), generator=torch.Generator().manual_seed(0))
    if config.eod is not None:
        tokens_NT[tokens_NT == config.eod] = (config.eod + 1) % config.vocab_size
    return tokens_NT
