"""The config of a ViT (2010.11929) and of its images, `corpus: images:...`; `model` is a ModelConfig.

A sequence is one image: the class token, then its patches row by row, so seq_len = 1 + (image_size / patch_size)^2. The
only target is the class, at the class token. vocab_size is the number of classes.
"""

from collections.abc import Mapping
from typing import Any

from sparsedepth.config.corpus import DIGITS, IMAGES, corpus_name
from sparsedepth.config.role import Role

OF_VIT = ("architecture", "vit")
IMAGE_SIZE = Role(kind="data", cost_scope="step", only_with=OF_VIT)

_DEFAULTS = {"image_size": 224, "patch_size": 16, "n_channels": 3, "norm_kind": "layer", "activation": "gelu"}
_DEFAULTS_OF_DIGITS = {"image_size": 8, "patch_size": 2, "n_channels": 1, "vocab_size": 10}

_OF_TOKENS = {
    "tie_embeddings": (False, "a ViT embeds pixels, and its head is of classes"),
    "sliding_window": (None, "patches stand in rows and columns, not in one line"),
    "mask_documents": (False, "an image is one sequence"),
    "rope_theta": (10000.0, "the positions of a ViT are learned"),
}
"""Field -> its default, and why a ViT has no other value."""


def with_vit_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with a ViT's missing fields; values of another type are left to the checks."""
    if values.get("architecture") != "vit":
        return dict(values)
    defaults = _DEFAULTS | (_DEFAULTS_OF_DIGITS if values.get("corpus") == IMAGES.prefix + DIGITS else {})
    filled = dict(values) | {name: default for name, default in defaults.items() if values.get(name) is None}
    image_size, patch_size = filled["image_size"], filled["patch_size"]
    if filled.get("seq_len") is None and isinstance(image_size, int) and isinstance(patch_size, int) and patch_size > 0:
        filled["seq_len"] = 1 + (image_size // patch_size) ** 2
    return filled


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
    for name, (default, reason) in _OF_TOKENS.items():
        if (value := getattr(model, name)) != default:
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
