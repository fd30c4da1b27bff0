"""Residual ReLU^2 networks, batched: every weight has a leading dimension of models (2602.05970, section 5.1).

    x_0 = N(input)          f_l(x) = relu(N(x) W_l + b_l)^2 V_l          N(x) = x / sqrt(mean(x^2) + eps)
    Euler:     x_l = x_(l-1) + f_l(x_(l-1))
    midpoint:  x_l = x_(l-1) + g_l(x_(l-1) + f_l(x_(l-1)) / 2)           (RK2; f_l and g_l are two blocks)
    output:    N(x_L), and logits N(x_L) H

Teacher: W, b, V, H uniform in +-1/sqrt(fan in), V divided by sqrt(teacher_layers). The draws of layer l are

    sqrt(rho) shared + sqrt(1 - rho) own_l

so each entry keeps its variance and two layers have correlation rho: tied at 1, independent at 0. Students draw W and b
likewise; V and H start at 0. All draws are functions of a seed, made on the CPU for every device.

K models, L blocks, B inputs, M width, F width of the ReLU^2 layer, V outputs of the head.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsedepth.toy.config import AXES, ToyConfig

EPS = torch.finfo(torch.float32).eps


class Weights(NamedTuple):
    """The weights of K models."""

    fc: Tensor
    """W: [L, K, M, F]."""
    bias: Tensor
    """b: [L, K, 1, F]."""
    proj: Tensor
    """V: [L, K, F, M]."""
    head: Tensor
    """H: [K, M, V]."""


def generator(*key: object) -> torch.Generator:
    """A random generator that is a function of a key such as ('teacher', seed) or ('inputs', seed, step)."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7])
    return torch.Generator().manual_seed(seed)


def norm(x_KBM: Tensor) -> Tensor:
    """RMSNorm without parameters."""
    return x_KBM * x_KBM.square().mean(-1, keepdim=True).add_(EPS).rsqrt_()


class Branch(torch.autograd.Function):
    """f(x) with a hand-written backward pass: less memory and fewer passes over the data than autograd."""

    @staticmethod
    def forward(ctx: Any, x_KBM: Tensor, fc_KMF: Tensor, bias_K1F: Tensor, proj_KFM: Tensor) -> Tensor:
        scale_KB1 = x_KBM.square().mean(-1, keepdim=True).add_(EPS).rsqrt_()
        unit_KBM = x_KBM * scale_KB1
        active_KBF = torch.baddbmm(bias_K1F, unit_KBM, fc_KMF).relu_()
        ctx.save_for_backward(unit_KBM, scale_KB1, active_KBF, fc_KMF, proj_KFM)
        return torch.bmm(active_KBF.square(), proj_KFM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (grad_KBM,) = grads
        unit_KBM, scale_KB1, active_KBF, fc_KMF, proj_KFM = ctx.saved_tensors
        grad_proj_KFM = torch.bmm(active_KBF.square().mT, grad_KBM)
        grad_in_KBF = torch.bmm(grad_KBM, proj_KFM.mT).mul_(active_KBF).mul_(2)  # (relu(h)^2)' = 2 relu(h)
        grad_fc_KMF = torch.bmm(unit_KBM.mT, grad_in_KBF)
        grad_bias_K1F = grad_in_KBF.sum(1, keepdim=True)
        grad_unit_KBM = torch.bmm(grad_in_KBF, fc_KMF.mT)
        along_KB1 = (unit_KBM * grad_unit_KBM).mean(-1, keepdim=True)
        grad_x_KBM = torch.addcmul(grad_unit_KBM, unit_KBM, along_KB1, value=-1).mul_(scale_KB1)
        return grad_x_KBM, grad_fc_KMF, grad_bias_K1F, grad_proj_KFM


def final_state(weights: Weights, input_BM: Tensor, midpoint: bool = False) -> Tensor:
    """N(x_L) of every model on the same inputs, [K, B, M]."""
    blocks = zip(weights.fc.unbind(), weights.bias.unbind(), weights.proj.unbind(), strict=True)
    x_KBM = norm(input_BM).expand(weights.fc.shape[1], -1, -1)
    for block in blocks:
        update_KBM = Branch.apply(x_KBM, *block)
        if midpoint:
            update_KBM = Branch.apply(x_KBM + update_KBM / 2, *next(blocks))
        x_KBM = x_KBM + update_KBM
    return norm(x_KBM)


def uniform(source: torch.Generator, *shape: int, fan_in: int) -> Tensor:
    """Uniform in +-1/sqrt(fan in): PyTorch's default for a linear layer, as in the paper."""
    return torch.rand(shape, generator=source).mul_(2).sub_(1).div_(math.sqrt(fan_in))


def _blocks(source: torch.Generator, n: int, config: ToyConfig) -> tuple[Tensor, Tensor, Tensor]:
    """W, b and V of n blocks."""
    m, f = config.d_model, config.width_ff
    return (uniform(source, n, m, f, fan_in=m), uniform(source, n, 1, f, fan_in=m), uniform(source, n, f, m, fan_in=f))


def _teacher(config: ToyConfig, rho: float, seed: int) -> Iterator[Tensor]:
    """W, b, V of one teacher and its head; the same draws for every rho."""
    shared = _blocks(generator("teacher", seed, "shared"), 1, config)
    own = _blocks(generator("teacher", seed, "own"), config.teacher_layers, config)
    for index, (shared_part, own_part) in enumerate(zip(shared, own, strict=True)):
        mixed = math.sqrt(rho) * shared_part + math.sqrt(1 - rho) * own_part
        yield mixed / math.sqrt(config.teacher_layers) if index == 2 else mixed
    yield _head(config, seed)


def _head(config: ToyConfig, seed: int) -> Tensor:
    source = generator("head", seed)
    if config.target == "kl_given_head":
        return torch.randn(config.d_model, config.vocab_size, generator=source) / math.sqrt(config.d_model)
    return uniform(source, config.d_model, config.vocab_size, fan_in=config.d_model)


def teachers(config: ToyConfig, device: torch.device | str = "cpu") -> Weights:
    """The group's teachers: rho x teacher_seed, in that order."""
    drawn = [list(_teacher(config, rho, seed)) for rho in config.rho for seed in config.teacher_seed]
    fc, bias, proj, head = (list(parts) for parts in zip(*drawn, strict=True))
    stacked = [torch.stack(parts, dim=1) for parts in (fc, bias, proj)]
    return Weights(*(weight.to(device) for weight in (*stacked, torch.stack(head))))


class Students(nn.Module):
    """The students of a group, numbered by config.AXES. The head is a parameter only if it is learned."""

    def __init__(self, config: ToyConfig, given_head_KMV: Tensor | None = None) -> None:
        super().__init__()
        self.midpoint = config.integrator == "midpoint"
        drawn = [_blocks(generator("student", seed), config.n_blocks, config) for seed in config.seed]
        repeats = config.n_students // len(config.seed)
        fc, bias, proj = (torch.stack(parts, dim=1).repeat(1, repeats, 1, 1) for parts in zip(*drawn, strict=True))
        self.fc_LKMF, self.bias_LK1F = nn.Parameter(fc), nn.Parameter(bias)
        self.proj_LKFM = nn.Parameter(torch.zeros_like(proj))
        head_KMV = torch.zeros(config.n_students, config.d_model, config.vocab_size)
        self.head_KMV: Tensor
        if config.target == "kl":
            self.head_KMV = nn.Parameter(head_KMV)
        else:
            self.register_buffer("head_KMV", head_KMV if given_head_KMV is None else given_head_KMV)

    def forward(self, input_BM: Tensor) -> Tensor:
        """The final normed state, [K, B, M]."""
        weights = Weights(self.fc_LKMF, self.bias_LK1F, self.proj_LKFM, self.head_KMV)
        return final_state(weights, input_BM, self.midpoint)

    def logits(self, state_KBM: Tensor) -> Tensor:
        return torch.bmm(state_KBM, self.head_KMV)


def student_axes(config: ToyConfig) -> list[dict[str, float | int]]:
    """Per student, in order: its rho, teacher_seed, temperature and seed."""
    values = (getattr(config, name) for name in AXES)
    return [dict(zip(AXES, student, strict=True)) for student in itertools.product(*values)]
