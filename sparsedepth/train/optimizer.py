"""AdamW (1711.05101) with a linear warm-up and a cosine to min_lr_frac; which parameters decay is a config field.

A step shrinks a decaying weight by lr * weight_decay, so the weights forget over 1 / (lr * weight_decay) steps
(2405.13698): the learning rate and the decay are one knob seen from two sides.
"""

import math

import torch
from torch import nn

from sparsedepth.config.run import TrainConfig


def decays(name: str, parameter: nn.Parameter, rule: str) -> bool:
    """Whether `weight_decay_on` = rule decays this parameter."""
    if rule == "all":
        return True
    is_table = rule == "no_embed_norm" and name.startswith("embed.")
    return parameter.ndim > 1 and not is_table


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters, fused where the device has it, in two groups: decaying and not."""
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in named if decays(name, p, config.weight_decay_on) is decaying],
            "weight_decay": config.weight_decay if decaying else 0.0,
        }
        for decaying in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 0 .. n_steps - 1: rises linearly to lr, then falls as a cosine to min_lr_frac * lr."""
    warmup = round(config.warmup_frac * config.n_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.n_steps - 1 - warmup)
    floor = config.min_lr_frac
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
