"""Weight sparsity: the share of the blocks' matrix entries that are near zero.

    absolute: share of entries with |w| < eps                   2603.15389 (its values of eps are not published)
    relative: share of entries with |w| < c rms(own matrix)     control, ours: blind to a mere rescale of the matrix

The absolute share rises whenever weights shrink, which weight decay makes them do; the relative one does not. For
entries drawn from one normal distribution the relative share is erf(c / sqrt 2): 0.0797 at c = 0.1.
Counted are the matrices that transform the stream (`Stack.matrices`): no norm, no embedding, no head.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedepth.probe.fork import probing
from sparsedepth.probe.stack import Stack


@dataclass(frozen=True, kw_only=True)
class WeightSparsity:
    """Shares from 0 to 1, by threshold; None where no entry counts."""

    by_layer: dict[float, list[float | None]]
    """layers 1..L"""
    total: dict[float, float | None]
    """over the entries of all blocks"""
    entries: list[int]
    """entries that count, by layer; the relative share leaves out a matrix of zeros, which has no scale"""


def weight_sparsity(stack: Stack, thresholds: Sequence[float], *, relative: bool) -> WeightSparsity:
    """Share of entries below each threshold: in units of a weight, or (`relative`) of the rms of the entry's matrix."""
    with probing(stack):
        counts = [
            _count(stack.matrices(layer).values(), thresholds, relative) for layer in range(1, stack.n_layers + 1)
        ]
    entries = [n for n, _ in counts]
    below = {t: [found[i] for _, found in counts] for i, t in enumerate(thresholds)}
    return WeightSparsity(
        by_layer={t: [_share(b, n) for b, n in zip(below[t], entries, strict=True)] for t in thresholds},
        total={t: _share(sum(below[t]), sum(entries)) for t in thresholds},
        entries=entries,
    )


def _count(matrices: Iterable[Tensor], thresholds: Sequence[float], relative: bool) -> tuple[int, list[int]]:
    """Entries of one block that count, and how many of them are below each threshold."""
    entries, below = 0, [0] * len(thresholds)
    for matrix in matrices:
        size = matrix.abs()
        unit = (
            torch.linalg.vector_norm(matrix, dtype=torch.float64).item() / math.sqrt(matrix.numel())
            if relative
            else 1.0
        )
        if unit == 0:
            continue
        entries += matrix.numel()
        for index, threshold in enumerate(thresholds):
            below[index] += int((size < threshold * unit).sum())
    return entries, below


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
