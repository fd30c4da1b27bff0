"""Linear layers and embeddings of a decoder, of one run or of a stack (`model.products`).

Shapes: B sequences, T positions, D d_model; S runs of a stack.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import products


class Linear(nn.Linear):
    """A matrix without bias: x W'."""

    def __init__(self, n_inputs: int, n_outputs: int):
        super().__init__(n_inputs, n_outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return products.project(input, self.weight)


def project_together(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """x W' for each W. In training under autocast as one product, which casts and stores x once and
    sums the gradients of the parts; no hook of the layers runs."""
    x = x.to(products.product_dtype(x))
    is_mixed = torch.is_autocast_enabled(x.device.type)
    if not (is_mixed and linears[0].training and linears[0].weight.ndim == 2):
        return tuple(linear(x) for linear in linears)
    matrix_XD = torch.cat([linear.weight for linear in linears])
    return F.linear(x, matrix_XD).split([linear.out_features for linear in linears], dim=-1)


class Embedding(nn.Embedding):
    """Token embeddings."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.vocab_size, config.d_model)

    def random_inputs(self, n_sequences: int, n_tokens: int, draws: torch.Generator) -> Tensor:
        """Uniformly random tokens."""
        return torch.randint(self.weight.shape[-2], (n_sequences, n_tokens), generator=draws)

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return super().forward(input)
        return F.embedding(products.number_by_run(input, *self.weight.shape[:2]), self.weight.flatten(0, 1))
