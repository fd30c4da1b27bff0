"""Combinations of fields that are self-defeating or not implemented, with reasons (c, model: a ModelConfig)."""

import warnings
from collections.abc import Iterator
from typing import Any

from sparsedepth.config.corpus import IMAGES, corpus_name
from sparsedepth.config.section import Mistakes

_OF_TOKENS = {
    "tie_embeddings": "a ViT embeds pixels, and its head is of classes",
    "sliding_window": "patches stand in rows and columns, not in one line",
    "mask_documents": "an image is one sequence",
    "rope_theta": "the positions of a ViT are learned",
}
"""Field -> why a ViT has its default alone."""


def check_combinations(c: Any) -> None:
    """Raises ValueError with all rejected combinations."""
    if mistakes := [*_experts(c), *_stream(c), *_attended_sources(c), *_parametrisation(c)]:
        raise Mistakes(mistakes)
    if c.depth_scale == "lns" and c.init == "scaled":
        warnings.warn("depth_scale='lns' with init='scaled' defeats LNS (2502.05795, Table 6)", stacklevel=2)


def _experts(c: Any) -> Iterator[str]:
    if c.n_experts == 0:
        return
    if c.top_k is None:
        yield f"n_experts={c.n_experts} needs top_k, from 1 to {c.n_experts}"
    elif c.top_k > c.n_experts:
        yield f"top_k={c.top_k} is more than n_experts={c.n_experts}; choose top_k <= {c.n_experts}"
    if c.n_experts > 1 and c.top_k == 1 and c.renormalise_gates:
        reason = "the one gate of a token is then always 1, and the loss teaches the router nothing (2101.03961, eq. 2)"
        yield f"top_k=1 with renormalise_gates=true: {reason}; set renormalise_gates=false"
    if c.activation != "swiglu":
        of_dense = f"activation={c.activation!r} is of the dense feed-forward part, and experts are SwiGLU"
        yield f"{of_dense} in every kernel; use activation='swiglu', or n_experts=0"
    if c.ffn_dropout > 0:
        of_dense = f"ffn_dropout={c.ffn_dropout:g} is of the dense feed-forward part, and the kernels of experts drop"
        yield f"{of_dense} no hidden units; use residual_dropout, or n_experts=0"
    if c.n_dense_layers >= c.n_layers:
        none_left = f"n_dense_layers={c.n_dense_layers} leaves no layer of n_layers={c.n_layers} to the experts"
        yield f"{none_left}; choose a smaller one, or n_experts=0"


def _stream(c: Any) -> Iterator[str]:
    if c.residual_gate == "admin" and c.norm != "post":
        weighs = "residual_gate='admin' weighs the stream against a branch before their norm (2004.08249)"
        yield f"{weighs}, and norm={c.norm!r} has none there or weights of its own; use norm='post'"
    for name in ("residual_scalars", "gpas"):
        if c.residual_gate == "admin" and getattr(c, name):
            yield f"{name} with residual_gate='admin' weighs the stream twice; choose one of them"
    if c.value_residual and c.n_layers == 1:
        yield f"value_residual gives block 1's values to later ones, and n_layers={c.n_layers} has none"
    if c.depth_scale == "lns" and c.init == "scaled" and "lns_with_scaled_init" not in c.allow:
        undoes = "depth_scale='lns' with init='scaled' damps the residual stream twice and undoes the gain of LNS"
        fix = "use init='normal', or ask for it: allow=['lns_with_scaled_init']"
        yield f"{undoes} (2502.05795, Table 6); {fix}"


def _attended_sources(c: Any) -> Iterator[str]:
    given = f"attention_residuals={c.attention_residuals}"
    if c.attention_residuals and 2 * c.n_layers % c.attention_residuals:
        yield f"{given} does not divide the branches, 2 x n_layers={c.n_layers}, into sums of equally many"
    norms_or_weighs = {
        "norm": c.n_post_layers > 0,
        "depth_scale": c.depth_scale == "after_residual",
        "residual_scalars": c.residual_scalars,
        "gpas": c.gpas,
    }
    for name in (name for name, applies in norms_or_weighs.items() if c.attention_residuals and applies):
        fix = f"use {name}={type(c).model_fields[name].default!r}, or attention_residuals=0"
        yield f"{given} with {name}={getattr(c, name)!r}, which norms or weighs the one stream after a sum; {fix}"


def _parametrisation(c: Any) -> Iterator[str]:
    """mup and completep have no rule for some fields."""
    fields = type(c).model_fields
    if c.parametrisation == "standard":
        if c.base_width != fields["base_width"].default:
            no_meaning = f"base_width={c.base_width} has no meaning with parametrisation='standard'"
            yield f"{no_meaning}; set parametrisation='mup' or 'completep', or leave base_width out"
        return
    for name, is_unfit, reason in (
        ("n_experts", c.n_experts > 0, "its rules are of dense blocks"),
        ("tie_embeddings", c.tie_embeddings, "embedding and head follow different rules"),
        ("norm", c.n_post_layers > 0, "its rules are of blocks that add to the stream"),
        ("attention_residuals", c.attention_residuals > 0, "it has no rule for what attends over sources"),
        ("init", c.init not in ("normal", "zero_outputs"), "it sets the size of the outputs itself"),
    ):
        if is_unfit:
            given = f"parametrisation={c.parametrisation!r} with {name}={getattr(c, name)!r}"
            yield f"{given}: {reason}; use {name}={fields[name].default!r}"


def check_vit(model: Any) -> None:
    """Raises ValueError for patches that do not divide the image, another seq_len, and fields of decoders."""
    if model.architecture != "vit":
        return
    if model.image_size % model.patch_size:
        divisors = [size for size in range(1, model.image_size + 1) if model.image_size % size == 0]
        told = f"patch_size={model.patch_size} does not divide image_size={model.image_size}"
        raise ValueError(f"{told}; choose one of {divisors}")
    n_patches = (model.image_size // model.patch_size) ** 2
    if model.seq_len != 1 + n_patches:
        image = f"an image of image_size={model.image_size} is a class token and {n_patches} patches"
        raise ValueError(f"seq_len={model.seq_len}: {image}; leave seq_len out")
    for name, reason in _OF_TOKENS.items():
        if (value := getattr(model, name)) != type(model).model_fields[name].default:
            raise ValueError(f"{name}={value!r} with architecture='vit': {reason}; leave {name} out")


def check_images(corpus: str, architecture: str) -> None:
    """Raises ValueError for a ViT without images, and images without a ViT."""
    name = corpus_name(corpus)
    if architecture == "vit" and name.kind is not IMAGES:
        fix = "set corpus to 'images:FOLDER', 'images:hub:NAME' or 'images:digits', or leave architecture out"
        raise ValueError(f"architecture='vit' reads images, and corpus={corpus!r} holds none; {fix}")
    if name.kind is IMAGES and architecture != "vit":
        raise ValueError(f"corpus={corpus!r} holds images, and a decoder reads tokens; set architecture='vit'")
    if name.kind is IMAGES and not name.place:
        raise ValueError(f"corpus={corpus!r} names no images; write 'images:FOLDER', or 'images:digits'")


def check_parallel(config: Any, parallel: str) -> None:
    """Raises ValueError for a RunConfig that cannot be trained with this kind of parallelism."""
    if parallel == "fsdp" and config.optimizer == "muon":
        raise ValueError("optimizer='muon' needs whole matrices, and parallel='fsdp' shards them; use parallel='ddp'")
