"""`weight_density`: a fixed random mask on the matrices of the blocks.

The mask is the zero pattern of the initial weights (`model.init`), so it is not stored: with gradient 0 an entry has no
AdamW moment and no decay, and stays 0.
"""

from collections.abc import Callable

from torch import Tensor

from sparsedepth.config.model import ModelConfig


def gradient_mask(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """What a matrix passes through before its product."""
    return without_masked_gradient if config.weight_density < 1 else unmasked


def without_masked_gradient(weight: Tensor) -> Tensor:
    """The matrix itself; entries that are 0 get no gradient."""
    return weight * (weight != 0)


def unmasked(weight: Tensor) -> Tensor:
    return weight
