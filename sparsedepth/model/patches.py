"""The input of a ViT (2010.11929, section 3.1): patches of pixels, each through one matrix, plus learned positions.

    x_0 = [0; E p_1; ...; E p_N] + position,   p = pixels / 127.5 - 1, of the bytes 0..255

Patches are ordered row by row; the values of one by channel, row, column. Position 0 has no patch: it is the class
token, from whose final state the head reads. Deviates: no class vector and no bias of E, which would only add to the
learned positions.

Shapes: B images, T positions, P values per patch, D d_model; S runs of a stack.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.cost import patch_values
from sparsedepth.config.model import ModelConfig
from sparsedepth.model import stacked


class PatchEmbedding(nn.Module):
    """Pixels in, the stream before the first block out."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model, patch_values(config)))
        self.positions = nn.Parameter(torch.empty(config.seq_len, config.d_model))

    def forward(self, pixels_BTP: Tensor) -> Tensor:
        """x_BTD of bytes; the values at position 0 are ignored."""
        values_BTP = pixels_BTP[:, 1:].to(self.weight.dtype) / 127.5 - 1
        if self.weight.ndim == 2:
            return F.pad(F.linear(values_BTP, self.weight), (0, 0, 1, 0)) + self.positions
        x_BTD = F.pad(stacked.linear(values_BTP, self.weight), (0, 0, 1, 0))
        x_SBTD = x_BTD.view(len(self.weight), -1, *x_BTD.shape[1:])
        return (x_SBTD + self.positions[:, None]).view_as(x_BTD)
