"""Held-out cross-entropy, of the model as it is and of forks of it.

    loss = mean over sequences and positions of -log softmax(logits)[next token]   (nat/token)

Shapes: N and B sequences, S = T + 1 tokens of one sequence with its last target, F forks, D width of the residual
stream, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedepth.measure.bootstrap import Estimate, bootstrap
from sparsedepth.probe.fork import MAX_TOKENS, Fork, batches, probing, record, stream, walk
from sparsedepth.probe.stack import Stack

MAX_LOGITS = 2**21
"""Logits that exist at a time (8 MiB in fp32): many forks and a large vocabulary would otherwise fill the memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutLoss:
    loss: Estimate
    """nat/token, from 0; ln V is guessing"""
    n_tokens: int


def held_out_loss(
    stack: Stack, tokens_NS: Tensor, rng: np.random.Generator, max_tokens: int = MAX_TOKENS
) -> HeldOutLoss:
    """Cross-entropy at every position of sequences that the model was not trained on."""
    parts = []
    with probing(stack):
        for tokens_BS in batches(stack, tokens_NS, max_tokens):
            last = deque(stream(stack, tokens_BS[:, :-1]), maxlen=1)
            parts.append(sequence_loss(stack, last[0][None], tokens_BS[:, 1:])[0])
        loss_N = torch.cat(parts).cpu().numpy()
    return HeldOutLoss(loss=bootstrap(lambda loss_R: loss_R, loss_N, rng=rng), n_tokens=tokens_NS[:, 1:].numel())


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """loss / ln 2 / bytes per token, of a loss in nat/token: comparable across tokenizers, as loss per token is not."""
    if not bytes_per_token > 0:
        raise ValueError(f"bytes_per_token={bytes_per_token} must be above 0: the held-out text has no bytes")
    return loss / math.log(2) / bytes_per_token


def fork_losses(
    stack: Stack, tokens_NS: Tensor, forks: Sequence[Fork], max_tokens: int = MAX_TOKENS
) -> tuple[np.ndarray, np.ndarray]:
    """base_N and changed_NF: the mean loss of each sequence, nat/token, without and with each fork's change."""
    base, changed = [], []
    with probing(stack):
        for tokens_BS in batches(stack, tokens_NS, max_tokens):
            inputs_BT, targets_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
            states = record(stack, inputs_BT)
            base.append(sequence_loss(stack, states[-1][None], targets_BT)[0])
            loss_FB = base[-1].new_empty(len(forks), len(tokens_BS))
            for step in walk(stack, states, forks, max_tokens):
                if step.layer == stack.n_layers:
                    loss_FB[step.forks] = sequence_loss(stack, step.after, targets_BT)
            changed.append(loss_FB.T)
        return torch.cat(base).cpu().numpy(), torch.cat(changed).cpu().numpy()


def relative_change(changed: np.ndarray, base: np.ndarray) -> np.ndarray:
    """(changed - base) / base, of losses of matching shape; NaN where the base is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(base > 0, (changed - base) / base, np.nan)


def sequence_loss(stack: Stack, x_FBTD: Tensor, targets_BT: Tensor) -> Tensor:
    """loss_FB in fp64: the mean over the positions of a sequence, from states before the final norm."""
    rows = max(1, MAX_LOGITS // stack.vocab_size)
    states = x_FBTD.flatten(0, 2).split(rows)
    targets = targets_BT.expand(len(x_FBTD), -1, -1).flatten().split(rows)
    losses = [
        F.cross_entropy(stack.logits(x_nD[None])[0].float(), target_n, reduction="none")
        for x_nD, target_n in zip(states, targets, strict=True)
    ]
    return torch.cat(losses).view(x_FBTD.shape[:3]).mean(-1, dtype=torch.float64)
