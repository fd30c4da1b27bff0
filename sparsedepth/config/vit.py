"""The config of a ViT (2010.11929): sizes derived from image and patches, and fields that only decoders have.

`model` is a ModelConfig, whose module imports this one.
"""

from typing import Any

from sparsedepth.config.role import Role

OF_VIT = ("architecture", "vit")

IMAGE_SIZE = Role(kind="data", cost_scope="step", only_with=OF_VIT)

_DEFAULTS = {"image_size": 224, "patch_size": 16, "n_channels": 3, "norm_kind": "layer", "activation": "gelu"}

_OF_TOKENS = {
    "tie_embeddings": (False, "a ViT embeds pixels, and its head is of classes"),
    "sliding_window": (None, "patches stand in rows and columns, not in one line"),
    "mask_documents": (False, "an image is one sequence"),
    "rope_theta": (10000.0, "the positions of a ViT are learned"),
}
"""Field -> its default, and why a ViT has no other value."""


def n_positions(image_size: int, patch_size: int) -> int:
    """Positions of an image: the class token and the patches."""
    return 1 + (image_size // patch_size) ** 2


def with_vit_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with a ViT's missing fields; values of another type are left to the checks."""
    filled = dict(values)
    if filled.get("architecture") != "vit":
        return filled
    filled |= {name: default for name, default in _DEFAULTS.items() if filled.get(name) is None}
    image_size, patch_size = filled["image_size"], filled["patch_size"]
    if filled.get("seq_len") is None and isinstance(image_size, int) and isinstance(patch_size, int) and patch_size > 0:
        filled["seq_len"] = n_positions(image_size, patch_size)
    return filled


def check_vit(model: Any) -> None:
    """Raises ValueError for patches that do not divide the image, another seq_len, and fields of decoders."""
    if model.image_size % model.patch_size:
        divisors = [size for size in range(1, model.image_size + 1) if model.image_size % size == 0]
        raise ValueError(
            f"patch_size={model.patch_size} does not divide image_size={model.image_size}; choose one of {divisors}"
        )
    n_tokens = n_positions(model.image_size, model.patch_size)
    if model.seq_len != n_tokens:
        raise ValueError(
            f"seq_len={model.seq_len}: an image of image_size={model.image_size} is a class token and {n_tokens - 1} "
            f"patches of patch_size={model.patch_size}; leave seq_len out"
        )
    for name, (default, reason) in _OF_TOKENS.items():
        if (value := getattr(model, name)) != default:
            raise ValueError(f"{name}={value!r} with architecture='vit': {reason}; leave {name} out")
