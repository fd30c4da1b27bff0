"""Images in place of text: `corpus: images:...` with `architecture: vit`.

    images:FOLDER             image files in one subfolder for each class (PNG, JPEG, BMP, GIF, TIFF, WebP)
    images:hub:NAME[:CONFIG]  the train split of a data set of the Hugging Face hub: its one image and one class column
    images:digits             the 1797 handwritten digits of scikit-learn, 8 x 8 pixels, 10 classes

A sequence is one image: the class token, then its patches row by row, so seq_len = 1 + (image_size / patch_size)^2. The
only target is the class, at the class token. vocab_size is the number of classes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.task import task_name

IMAGES = "images:"

DIGITS = "digits"

_DIGITS_SIZES = {"image_size": 8, "patch_size": 2, "n_channels": 1, "vocab_size": 10}


def is_images(corpus: Any) -> bool:
    """Whether a corpus is made of images and their classes."""
    return isinstance(corpus, str) and corpus.startswith(IMAGES)


def is_text(corpus: str) -> bool:
    """Whether a corpus is tokenised text: running text, or prompts and answers."""
    return task_name(corpus) is None and not is_images(corpus)


def unit_for(unit: str, corpora: Iterable[object]) -> str:
    """A unit per token, or per image if all corpora are images, which have one target each."""
    corpora = [*corpora]
    return unit.replace("/token", "/image") if corpora and all(map(is_images, corpora)) else unit


def with_sizes_of_digits(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the missing sizes of images:digits."""
    is_digits = values.get("architecture") == "vit" and values.get("corpus") == IMAGES + DIGITS
    sizes = _DIGITS_SIZES if is_digits else {}
    return dict(values) | {name: size for name, size in sizes.items() if values.get(name) is None}


def check_images(corpus: str, model: ModelConfig) -> None:
    """Raises ValueError for a ViT without images, and images without a ViT."""
    is_vit = model.architecture == "vit"
    if is_vit and not is_images(corpus):
        raise ValueError(
            f"architecture='vit' reads images, and corpus={corpus!r} holds none; set corpus to '{IMAGES}FOLDER', "
            f"'{IMAGES}hub:NAME' or '{IMAGES}{DIGITS}', or leave architecture out"
        )
    if not is_images(corpus):
        return
    if not is_vit:
        raise ValueError(
            f"corpus={corpus!r} holds images, and architecture={model.architecture!r} reads tokens; set "
            f"architecture='vit'"
        )
    if corpus == IMAGES:
        raise ValueError(f"corpus={corpus!r} names no images; write '{IMAGES}FOLDER', or '{IMAGES}{DIGITS}'")
