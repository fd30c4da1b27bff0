"""Linear layers and embeddings of a decoder, of one run or of a stack (`model.products`).

Shapes: B sequences, T positions, P values per patch, D d_model; S runs of a stack.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.cost import patch_values
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


class PatchEmbedding(nn.Module):
    """The input of a ViT (2010.11929, section 3.1): patches of pixels, each through one matrix,
    plus learned positions.

        x_0 = [0; E p_1; ...; E p_N] + position,   p = pixels / 127.5 - 1, of the bytes 0..255

    Patches are ordered row by row; the values of one by channel, row, column. Position 0 is the
    class token, from whose final state the head reads. Deviates: no class vector and no bias of E,
    which would only add to the learned positions.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model, patch_values(config)))
        self.positions = nn.Parameter(torch.empty(config.seq_len, config.d_model))

    def random_inputs(self, n_sequences: int, n_tokens: int, draws: torch.Generator) -> Tensor:
        """Uniformly random pixels, at all positions."""
        return torch.randint(256, (n_sequences, len(self.positions), self.weight.shape[-1]), generator=draws)

    def forward(self, pixels_BTP: Tensor) -> Tensor:
        """x_BTD of bytes; the values at position 0 are ignored."""
        values_BTP = pixels_BTP[:, 1:].to(self.weight.dtype) / 127.5 - 1
        x_BTD = F.pad(products.project(values_BTP, self.weight), (0, 0, 1, 0))
        if self.weight.ndim == 2:
            return x_BTD + self.positions
        x_SBTD = x_BTD.view(len(self.weight), -1, *x_BTD.shape[1:])
        return (x_SBTD + self.positions[:, None]).view_as(x_BTD)
