"""Export of a ViT as transformers' ViTForImageClassification, or the reasons why it is not possible.

    FOLDER/  model.safetensors  config.json  preprocessor_config.json  README.md

LNS, gates and branch factors are folded as for decoders (`architecture`), LNS also into the bias of a norm. What the
model does not have is 0 there: the class vector (its position replaces it) and the biases of all matrices.

Shapes: B images, T positions, P numbers of a patch, C channels, D d_model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification

from sparsedepth.config.model import ModelConfig
from sparsedepth.exchange.architecture import Architecture, Weights, folded_weights, notes
from sparsedepth.files import write_json
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.folder import check_folder
from sparsedepth.probe.hf_types import hf_name

FAMILY = "vit"

REFUSED: tuple[tuple[Callable[[ModelConfig], bool], str], ...] = (
    (lambda c: c.norm != "pre", "norm={c.norm!r}: its blocks have a norm before each branch, and no other"),
    (lambda c: c.norm_kind != "layer", "norm_kind={c.norm_kind!r}: its norms are LayerNorms"),
    (lambda c: c.depth_scale == "after_residual", "depth_scale='after_residual': it shrinks the stream itself"),
    (lambda c: c.n_experts > 0, "n_experts={c.n_experts}: it has no experts"),
    (lambda c: c.is_gated, "activation={c.activation!r}: its feed-forward part has no gate"),
    (lambda c: c.n_kv_heads != c.n_heads, "n_kv_heads={c.n_kv_heads}: each of its heads has its own keys and values"),
    (lambda c: c.qk_norm, "qk_norm=True: it has no q/k norm"),
    (lambda c: c.reads_stream_start, "residual_scalars or value_residual: its blocks read only the stream"),
    (lambda c: c.gpas, "gpas=True: it shrinks the stream itself"),
    (lambda c: c.attention_residuals > 0, "attention_residuals={c.attention_residuals}: its blocks sum branches"),
)
"""Conditions under which a ViT cannot be exported, with the reason."""


def vit_architecture(config: ModelConfig) -> Architecture:
    """The fields of ViTConfig except class names. Raises ValueError with all reasons if the model is no such ViT."""
    if reasons := [reason.format(c=config) for applies, reason in REFUSED if applies(config)]:
        raise ValueError(f"this model cannot be exported to transformers, whose ViT differs: {'; '.join(reasons)}")
    values = {
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_eps,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.n_channels,
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": config.init_std,
    }
    vit_notes = ("the class vector and the biases of all matrices are 0, as in the run, which has none",)
    return Architecture(family=FAMILY, values=values, notes=notes(config, FAMILY) + vit_notes)


@torch.no_grad()
def vit_weights(model: Decoder) -> Weights:
    """The model's weights with the names of ViTForImageClassification, in fp32, computed in fp64."""
    config, positions_TD = model.config, model.get_parameter("embed.positions")
    named = {hf: weight for name, weight in folded_weights(model).items() if (hf := hf_name(name, FAMILY))}
    patches = "vit.embeddings.patch_embeddings.projection.weight"
    named[patches] = model.embed.weight.view(-1, config.n_channels or 0, *[config.patch_size or 0] * 2)
    biases = {name: weight.new_zeros(len(weight)) for name, weight in named.items() if weight.ndim > 1}
    named |= {f"{name.removesuffix('weight')}bias": bias for name, bias in biases.items()}
    named["vit.embeddings.cls_token"] = positions_TD.new_zeros(1, 1, config.d_model)
    named["vit.embeddings.position_embeddings"] = positions_TD[None]
    return {name: weight.detach().float().contiguous() for name, weight in named.items()}


def save_processor(config: ModelConfig, folder: Path) -> None:
    """Write the image preprocessing: resizing, and scaling to -1..1."""
    size, middle = config.image_size, [0.5] * (config.n_channels or 0)
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "ViTImageProcessor",
            **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
            "size": {"height": size, "width": size},
            "resample": 3,  # bicubic
            "rescale_factor": 1 / 255,
            "image_mean": middle,
            "image_std": middle,
        },
    )


def pixel_values(patches_BTP: Tensor, config: ModelConfig) -> Tensor:
    """The images [B, C, size, size], from -1 to 1, of these patches; position 0 is the class token."""
    channels, patch, size = config.n_channels or 0, config.patch_size or 0, config.image_size or 0
    per_side = size // patch
    pixels = patches_BTP[:, 1:].view(-1, per_side, per_side, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return pixels.reshape(-1, channels, size, size).float() / 127.5 - 1


@torch.no_grad()
def vit_parity(model: Decoder, folder: Path, inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference of logits of each patches_BTP: those of a folder, loaded as a third-party model, and the
    model's."""
    check_folder(folder, types=(FAMILY,))
    exported: Any = AutoModelForImageClassification.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    differences = {}
    for name, patches_BTP in inputs.items():
        hf = exported(pixel_values(patches_BTP, model.config)).logits
        differences[name] = (model(patches_BTP)[:, 0] - hf).abs().max().item()
    return differences
