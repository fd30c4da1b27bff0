"""Weight sparsity: the share of the blocks' matrix entries that are near zero.

    absolute: share of entries with |w| < eps                   2603.15389 (its values of eps are not published)
    relative: share of entries with |w| < c rms(own matrix)     control, ours: blind to a mere rescale of the matrix

The absolute share rises whenever weights shrink, which weight decay makes them do; the relative one does not. For
entries drawn from one normal distribution the relative share is erf(c / sqrt 2): 0.0797 at c = 0.1.
Counted are the matrices that transform the stream (`ProbedModel.matrices`): no norm, no router, no embedding, no head.
A kind is what a matrix does (query, key, value, output, gate, up, down); the experts of a layer are one kind together.
The released code announces a script for this and has none: definition and thresholds are the paper's text, and ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.context import MeasureContext
from sparsedepth.measure.rows import Measurements
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.measured import MATRICES


@dataclass(frozen=True, kw_only=True)
class WeightSparsity:
    """Shares from 0 to 1, by threshold; None where no entry counts."""

    by_layer: dict[float, list[float | None]]
    """layers 1..L"""
    total: dict[float, float | None]
    """over the entries of all blocks"""
    entries: list[int]
    """entries that count, by layer; the relative share leaves out a matrix of zeros, which has no scale"""
    by_kind: dict[float, dict[str, list[float | None]]]
    """layers 1..L of each kind of matrix; None also where a layer has no such matrix"""
    entries_by_kind: dict[str, list[int]]


def weight_sparsity(probed: ProbedModel, thresholds: Sequence[float], *, relative: bool) -> WeightSparsity:
    """Share of entries below each threshold: in units of a weight, or (`relative`) of the rms of the entry's matrix."""
    with probing(probed):
        counts = [_count(probed.matrices(layer), thresholds, relative) for layer in range(1, probed.n_layers + 1)]
    none = np.zeros(1 + len(thresholds), dtype=np.int64)
    totals = [sum(count.values(), none) for count in counts]
    kinds = list(dict.fromkeys(kind for count in counts for kind in count))
    by_kind = {kind: [count.get(kind, none) for count in counts] for kind in kinds}
    return WeightSparsity(
        by_layer={t: [_share(count, i) for count in totals] for i, t in enumerate(thresholds)},
        total={t: _share(sum(totals, none), i) for i, t in enumerate(thresholds)},
        entries=[int(count[-1]) for count in totals],
        by_kind={
            t: {kind: [_share(count, i) for count in by_kind[kind]] for kind in kinds} for i, t in enumerate(thresholds)
        },
        entries_by_kind={kind: [int(count[-1]) for count in by_kind[kind]] for kind in kinds},
    )


def _count(matrices: Mapping[str, Tensor], thresholds: Sequence[float], relative: bool) -> dict[str, np.ndarray]:
    """By kind: how many entries of one block are below each threshold, and last how many count."""
    counts: dict[str, np.ndarray] = {}
    for name, matrix in matrices.items():
        kind = name.rpartition(".")[2]  # expert3.gate is a gate
        counts.setdefault(kind, np.zeros(1 + len(thresholds), dtype=np.int64))
        # In fp32: a comparison in bf16 would round the threshold, by up to 0.4%, onto weights on its other side.
        size, unit = matrix.float().abs(), 1.0
        if relative:
            unit = torch.linalg.vector_norm(matrix, dtype=torch.float64).item() / math.sqrt(matrix.numel())
        if unit > 0:
            counts[kind] += [*(int((size < threshold * unit).sum()) for threshold in thresholds), matrix.numel()]
    return counts


def _share(count: np.ndarray, index: int) -> float | None:
    return int(count[index]) / int(count[-1]) if count[-1] else None


def add_rows(context: MeasureContext, made: Measurements) -> None:
    for name in ("weight_sparsity", "weight_sparsity_rel"):
        thresholds = getattr(context.config, IN_RUNS[name].threshold)
        result = weight_sparsity(context.probed, thresholds, relative=name.endswith("_rel"))
        made.summary[name] = result.total[thresholds[0]]
        for threshold, shares in result.by_layer.items():
            made.add_layers(f"{name}@{threshold:g}", shares, result.entries)
            for kind in MATRICES:
                if kind in result.by_kind[threshold]:
                    by_layer, n = result.by_kind[threshold][kind], result.entries_by_kind[kind]
                    made.add_layers(f"{name}_{kind}@{threshold:g}", by_layer, n)
