"""AdamW, or Muon for the blocks' matrices with AdamW for the rest; the learning rate's schedule.

    adamw    w <- (1 - lr lambda) w - lr m / (sqrt(v) + eps)                                         (1711.05101)
    muon     w <- (1 - lr lambda) w - lr 0.2 sqrt(max(rows, columns)) O(M),  O(M) = U V' of M = U S V'      (2502.16982)

M is the momentum with MOMENTUM and Nesterov. The factor gives its updates the rms of AdamW's, so lr
and weight_decay mean the same in both: the weights forget over 1 / (lr * weight_decay) steps
(2405.13698).

`parametrisation` multiplies them, with m_N = d_model / base_width and m_L = n_layers / base_depth
(1 with mup):

                                    lr       eps              weight_decay
    matrices of the blocks          1 / m_N  1 / (m_N m_L)    m_N with completep, 1 with mup
    vectors of the blocks           1        1 / (m_N m_L)    1
    embedding, last norm, head      1        1 / m_N          1         (2505.01618, table 1 and its code; alpha = 1)

Compared with the paper's code (EleutherAI/nanoGPT-mup, branch completep, model.py), which differs in one line: its eps
is 1 / (m_N m_L) for embedding, last norm and head, too. Its attention is scaled by 1 / d_head, ours by its root: the
same while heads keep their size.

`lr_of` multiplies the lr of a group of parameters, also in its decay.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.run import RunConfig, TrainConfig
from sparsedepth.quantities.quantity import Named

MOMENTUM = 0.95
"""of Muon (2502.16982)"""

BATCH_BYTES = 2**28
"""Limit of one batch of bf16 matrices in Muon; its products take about three times as much."""


def decays(name: str, parameter: nn.Parameter, rule: str) -> bool:
    """Whether `weight_decay_on` = rule decays this parameter. Vectors, gates as well as norms,
    decay only with 'all', as in LayerScale's code (2103.17239)."""
    is_excluded_embedding = rule == "no_embed_norm" and name.startswith("embed.")
    return rule == "all" or (parameter.ndim > 1 and not is_excluded_embedding)


def orthogonalised(update_nRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """O of each of n matrices of R rows and C columns, in bf16: five Newton-Schulz steps
    X <- a X + (b S + c S^2) X with S = X X', from X = M / |M|."""
    a, b, c = coefficients
    is_tall = update_nRC.shape[1] > update_nRC.shape[2]
    x_nRC = update_nRC.bfloat16()
    x_nRC = x_nRC.mT if is_tall else x_nRC
    x_nRC = x_nRC / x_nRC.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram_nRR = torch.bmm(x_nRC, x_nRC.mT)
        x_nRC = torch.baddbmm(x_nRC, torch.baddbmm(gram_nRR, gram_nRR, gram_nRR, beta=b, alpha=c), x_nRC, beta=a)
    return x_nRC.mT if is_tall else x_nRC


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` that orthogonalises all matrices of one shape together, where kernel
    launches and not arithmetic limit a step: the number of operations does not grow with layers,
    where it was 290 each. Elsewhere than on CUDA PyTorch's own step is taken."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        if self.param_groups[0]["params"][0].device.type != "cuda":
            super().step()
            return
        for group in self.param_groups:
            self.step_group(group)

    @torch.no_grad()
    def step_group(self, group: Named) -> None:
        """One step of a group: momentum, decay, then the matrices of each shape in batches."""
        weights, grads, momenta = [], [], []
        self._init_group(group, weights, grads, momenta)
        if not weights:
            return
        assert group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw"
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        by_shape = defaultdict(list)
        for weight, update in zip(weights, updates, strict=True):
            by_shape[weight.shape].append((weight, update))
        for shape, pairs in by_shape.items():
            lr = 0.2 * math.sqrt(max(shape)) * group["lr"]
            per_batch = max(1, BATCH_BYTES // (2 * shape.numel()))
            for start in range(0, len(pairs), per_batch):
                some_weights, some_updates = zip(*pairs[start : start + per_batch], strict=True)
                update_nRC = torch.stack(some_updates)
                ortho_nRC = orthogonalised(update_nRC, group["ns_coefficients"], group["ns_steps"], group["eps"])
                torch._foreach_add_(some_weights, ortho_nRC.to(update_nRC.dtype).unbind(), alpha=-lr)


class CombinedOptimizer:
    """Several optimizers with separate parameters, used as one."""

    def __init__(self, *optimizers: "AnyOptimizer"):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state: Mapping[Tensor, Named] = {
            parameter: optimizer.state[parameter]
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


AnyOptimizer = torch.optim.Optimizer | CombinedOptimizer


class Factors(NamedTuple):
    """Factors on lr, adam_eps and weight_decay of a parameter."""

    lr: float = 1.0
    eps: float = 1.0
    decay: float = 1.0


def factors(name: str, parameter: nn.Parameter, config: ModelConfig) -> Factors:
    """The factors of `parametrisation`: the table at the top of this file."""
    width = config.width_multiplier
    depth = config.depth_multiplier
    if not name.startswith("blocks."):
        return Factors(eps=1 / width)
    if parameter.ndim == 1:
        return Factors(eps=1 / (width * depth))
    keeps_decay = config.parametrisation == "completep"
    return Factors(lr=1 / width, eps=1 / (width * depth), decay=width if keeps_decay else 1.0)


def make_optimizer(model: nn.Module, config: RunConfig) -> AnyOptimizer:
    """The optimizer of a run, with groups by decay and factors; `lr_factor` multiplies the rate."""
    parts = defaultdict(list)
    for name, p in model.named_parameters():
        is_muon = config.optimizer == "muon" and name.startswith("blocks.") and p.ndim == 2
        rule = factors(name, p, config)
        rule = rule._replace(lr=rule.lr * config.lr_factor(name))
        parts[is_muon, decays(name, p, config.weight_decay_on), rule].append(p)
    groups = {False: [], True: []}
    for (is_muon, decaying, rule), params in sorted(parts.items(), reverse=True):
        decay = config.weight_decay * rule.decay if decaying else 0.0
        eps = {} if is_muon else {"eps": config.adam_eps * rule.eps}
        groups[is_muon].append({"params": params, "weight_decay": decay, "lr_factor": rule.lr, **eps})
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(groups[False], lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
    if config.optimizer == "adamw":
        return adamw
    muon = BatchedMuon(groups[True], lr=config.lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return CombinedOptimizer(muon, adamw)


def set_learning_rate(optimizer: AnyOptimizer, lr: float) -> None:
    """Set each group's learning rate, in place if it is a tensor (`train.cuda_graph`)."""
    for group in optimizer.param_groups:
        group_lr = group["lr_factor"] * lr
        group["lr"] = group["lr"].fill_(group_lr) if isinstance(group["lr"], Tensor) else group_lr


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 0 .. n_steps - 1: rises linearly to lr, then falls to min_lr_frac *
    lr: as a cosine, or linearly, or with wsd (2404.06395) constant until the last decay_frac of the
    steps, then linearly. Both the last step of warm-up and the first step after it are at lr, with
    wsd also the last before the decay; the last step is at the minimum."""
    warmup = config.warmup_steps
    floor = config.min_lr_frac
    if step < warmup:
        return config.lr * (step + 1) / warmup
    start = config.stable_steps - 1 if config.schedule == "wsd" else warmup
    progress = max(0, step - start) / max(1, config.n_steps - 1 - start)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (floor + (1 - floor) * left)
