"""Norms over the channels of one token, in fp32, with a learned weight w for each channel.

    rms     x / sqrt(mean(x^2) + eps) * w                                          (1910.07467, eq. 4)
    group   (x_g - mean(x_g)) / sqrt(var(x_g) + eps) * w, in each group g of consecutive channels   (1803.08494, eq. 1)
    layer   (x - mean(x)) / sqrt(var(x) + eps) * w + b                             (1607.06450, eq. 4)

Deviates: the paper's group norm has a bias; here only layer norm has one. Statistics are per token:
shared between positions they would leak the future."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.model import fused
from sparsedepth.model.linear import plus, times


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        can_fuse = x.device.type == "cpu" or not torch.compiler.is_compiling()
        if self.training and can_fuse and fused.needs_fp32_grad(x) and x.dtype == self.weight.dtype:
            return fused.rms_norm(x, self.weight, self.eps)
        # A square in bf16 has 8 bits. fp64 is kept for tests.
        wide = x if x.dtype == torch.float64 else x.float()
        return times((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype), self.weight)


class GroupNorm(nn.Module):
    """Group norm; with one group layer norm without bias."""

    def __init__(self, width: int, n_groups: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.n_groups = n_groups
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        groups = wide.unflatten(-1, (self.n_groups, -1))
        return times(F.layer_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2).to(x.dtype), self.weight)


class LayerNorm(GroupNorm):
    def __init__(self, width: int, eps: float):
        super().__init__(width, 1, eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return plus(super().forward(x), self.bias)


def make_norm(config: ModelConfig) -> RMSNorm | GroupNorm:
    """A norm over d_model channels, of the config's `norm_kind`."""
    if config.norm_kind == "layer":
        return LayerNorm(config.d_model, config.norm_eps)
    if config.norm_kind == "group":
        return GroupNorm(config.d_model, config.norm_groups, config.norm_eps)
    return RMSNorm(config.d_model, config.norm_eps)
