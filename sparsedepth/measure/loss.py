"""Held-out cross-entropy, of the model as it is and of forks of it.

    loss = mean over the positions that count of -log softmax(logits)[target]   (nat/token; `scored`)

Shapes: N and B sequences, T tokens of one sequence, F forks, D width of the residual stream, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import Estimate
from sparsedepth.measure.scored import Scored, position_mean
from sparsedepth.probe.fork import MAX_TOKENS, Fork, probing, record, stream, walk
from sparsedepth.probe.stack import Stack

MAX_LOGITS = 2**21
"""Logits that exist at a time (8 MiB in fp32): many forks and a large vocabulary would otherwise fill the memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutLoss:
    loss: Estimate
    """nat/token, from 0; ln V is guessing"""
    n_tokens: int
    """positions that count"""


def held_out_loss(stack: Stack, scored: Scored, rng: np.random.Generator, max_tokens: int = MAX_TOKENS) -> HeldOutLoss:
    """Cross-entropy at the positions that count of sequences that the model was not trained on."""
    parts = []
    with probing(stack):
        for part in scored.parts(stack, max_tokens):
            last = deque(stream(stack, part.inputs), maxlen=1)
            parts.append(sequence_loss(stack, last[0][None], part.targets, scored.scale)[0])
        loss_N = torch.cat(parts).cpu().numpy()
    return HeldOutLoss(loss=position_mean(loss_N, scored.weight, rng), n_tokens=scored.n_scored)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """loss / ln 2 / bytes per token, of a loss in nat/token: comparable across tokenizers, as loss per token is not."""
    if not bytes_per_token > 0:
        raise ValueError(f"bytes_per_token={bytes_per_token} must be above 0: the held-out text has no bytes")
    return loss / math.log(2) / bytes_per_token


def fork_losses(
    stack: Stack, scored: Scored, forks: Sequence[Fork], max_tokens: int = MAX_TOKENS
) -> tuple[np.ndarray, np.ndarray]:
    """base_N and changed_NF: each sequence's loss, nat/token, without and with each fork's change.

    Scaled as `scored` says: their means over sequences are the losses, and their differences, those means' too. For the
    interval of a difference in nat/token give it and `scored.weight` to `position_mean`.
    """
    base, changed = [], []
    with probing(stack):
        for part in scored.parts(stack, max_tokens):
            states = record(stack, part.inputs)
            base.append(sequence_loss(stack, states[-1][None], part.targets, scored.scale)[0])
            loss_FB = base[-1].new_empty(len(forks), len(part))
            for step in walk(stack, states, forks, max_tokens):
                if step.layer == stack.n_layers:
                    loss_FB[step.forks] = sequence_loss(stack, step.after, part.targets, scored.scale)
            changed.append(loss_FB.T)
        return torch.cat(base).cpu().numpy(), torch.cat(changed).cpu().numpy()


def relative_change(changed: np.ndarray, base: np.ndarray) -> np.ndarray:
    """(changed - base) / base, of losses of matching shape; NaN where the base is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(base > 0, (changed - base) / base, np.nan)


def sequence_loss(stack: Stack, x_FBTD: Tensor, targets_BT: Tensor, scale: float) -> Tensor:
    """loss_FB in fp64, from states before the final norm: the sum over positions that count / T x `Scored.scale`."""
    rows = max(1, MAX_LOGITS // stack.vocab_size)
    states = x_FBTD.flatten(0, 2).split(rows)
    targets = targets_BT.expand(len(x_FBTD), -1, -1).flatten().split(rows)
    losses = [
        F.cross_entropy(stack.logits(x_nD[None])[0].float(), target_n, reduction="none", ignore_index=IGNORED)
        for x_nD, target_n in zip(states, targets, strict=True)
    ]
    return torch.cat(losses).view(x_FBTD.shape[:3]).mean(-1, dtype=torch.float64) * scale
