"""Images in place of text: `corpus: images:...` with `architecture: vit`.

    images:FOLDER             image files in one subfolder for each class (PNG, JPEG, BMP, GIF, TIFF, WebP)
    images:hub:NAME[:CONFIG]  the train split of a data set of the Hugging Face hub: its one image and one class column
    images:digits             the 1797 handwritten digits of scikit-learn, 8 x 8 pixels, 10 classes

A sequence is one image: the class token, then its patches row by row, so seq_len = 1 + (image_size / patch_size)^2. The
only target is the class, at the class token. vocab_size is the number of classes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sparsedepth.config.corpus import DIGITS, IMAGES, corpus_name, kind_of
from sparsedepth.config.model import ModelConfig

_DIGITS_SIZES = {"image_size": 8, "patch_size": 2, "n_channels": 1, "vocab_size": 10}


def unit_for(unit: str, corpora: Iterable[object]) -> str:
    """A unit per token, or per image if all corpora are images, which have one target each."""
    return unit.replace("/token", "/image") if {kind_of(corpus) for corpus in corpora} == {IMAGES} else unit


def with_sizes_of_digits(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the missing sizes of images:digits."""
    is_digits = values.get("architecture") == "vit" and values.get("corpus") == IMAGES.prefix + DIGITS
    sizes = _DIGITS_SIZES if is_digits else {}
    return dict(values) | {name: size for name, size in sizes.items() if values.get(name) is None}


def check_images(corpus: str, model: ModelConfig) -> None:
    """Raises ValueError for a ViT without images, and images without a ViT."""
    is_vit = model.architecture == "vit"
    name = corpus_name(corpus)
    if is_vit and name.kind is not IMAGES:
        raise ValueError(
            f"architecture='vit' reads images, and corpus={corpus!r} holds none; set corpus to 'images:FOLDER', "
            f"'images:hub:NAME' or 'images:digits', or leave architecture out"
        )
    if name.kind is not IMAGES:
        return
    if not is_vit:
        raise ValueError(
            f"corpus={corpus!r} holds images, and architecture={model.architecture!r} reads tokens; set "
            f"architecture='vit'"
        )
    if not name.place:
        raise ValueError(f"corpus={corpus!r} names no images; write 'images:FOLDER', or 'images:digits'")
