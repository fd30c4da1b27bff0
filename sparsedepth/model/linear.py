"""Linear layers and embeddings of a decoder, optionally with a fixed random mask on the weights (`weight_density`).

A weight with an extra first dimension holds those of several runs (`sparsedepth.model.stacked`).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import fused, stacked


def without_masked_gradient(weight: Tensor) -> Tensor:
    """A matrix with a random mask (`weight_density`): entries that are 0 get no gradient.

    The mask is the zero pattern of the initial weights, so it is not stored: with gradient 0 an entry has no AdamW
    moment and no decay, and stays 0.
    """
    return weight * (weight != 0)


class Linear(nn.Linear):
    """x W' without bias; `weight_density` applies."""

    def __init__(self, n_inputs: int, n_outputs: int, config: ModelConfig):
        super().__init__(n_inputs, n_outputs, bias=False)
        self.is_masked, self.kernel = config.weight_density < 1, "blas"

    @property
    def matrix(self) -> Tensor:
        """The weight, with the gradient of masked entries removed."""
        return without_masked_gradient(self.weight) if self.is_masked else self.weight

    def forward(self, input: Tensor) -> Tensor:
        is_plain = self.weight.ndim == 2 and self.kernel == "blas"
        if self.training and not is_plain and fused.use_fused(input, compiled=self.weight.ndim == 2):
            return fused.product(input, self.matrix, self.kernel)
        return F.linear(input, self.matrix) if self.weight.ndim == 2 else stacked.linear(input, self.matrix)


class Embedding(nn.Embedding):
    """Token embeddings."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.weight.ndim == 2 else stacked.embedding(input, self.weight)
