"""Weight sparsity: the share of the blocks' matrix entries near zero.

    absolute: share of entries with |w| < eps                   2603.15389 (its values of eps are not published)
    relative: share of entries with |w| < c rms(own matrix)     control, ours: invariant to the scale of the matrix

The absolute share rises when weights shrink, for example by weight decay; the relative one does not. For entries of one
normal distribution the relative share is erf(c / sqrt 2): 0.0797 at c = 0.1.
Only matrices that transform the stream are counted (`ProbedModel.matrices`): no norm, router, embedding or head. A kind
is a matrix's role (query, key, value, output, gate, up, down); the experts of a layer are pooled. The released code
announces a script for this and has none: definition and thresholds are from the paper's text, and ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.context import MeasureContext, Measurements
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.measured import MATRICES


@dataclass(frozen=True, kw_only=True)
class WeightSparsity:
    """Shares from 0 to 1, by threshold; None without entries."""

    by_layer: dict[float, list[float | None]]
    """layers 1..L"""
    total: dict[float, float | None]
    """over the entries of all blocks"""
    entries: list[int]
    """counted entries, by layer; the relative share leaves out matrices of zeros, which have no scale"""
    by_kind: dict[float, dict[str, list[float | None]]]
    """layers 1..L of each kind of matrix; None if a layer has none"""
    entries_by_kind: dict[str, list[int]]


def weight_sparsity(probed: ProbedModel, thresholds: Sequence[float], *, relative: bool) -> WeightSparsity:
    """Share of entries below each threshold, in units of a weight or (`relative`) of the rms of its matrix."""
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
    """By kind: the number of entries of one block below each threshold, and last their total."""
    counts: dict[str, np.ndarray] = {}
    for name, matrix in matrices.items():
        kind = name.rpartition(".")[2]  # expert3.gate is a gate
        counts.setdefault(kind, np.zeros(1 + len(thresholds), dtype=np.int64))
        # In fp32: bf16 would round the threshold by up to 0.4%, past some weights.
        size, unit = matrix.float().abs(), 1.0
        if relative:
            unit = torch.linalg.vector_norm(matrix, dtype=torch.float64).item() / math.sqrt(matrix.numel())
        if unit > 0:
            counts[kind] += [*(int((size < threshold * unit).sum()) for threshold in thresholds), matrix.numel()]
    return counts


def _share(count: np.ndarray, index: int) -> float | None:
    return int(count[index]) / int(count[-1]) if count[-1] else None


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    for name in ("weight_sparsity", "weight_sparsity_rel"):
        thresholds = getattr(context.config, IN_RUNS[name].threshold)
        result = weight_sparsity(context.probed, thresholds, relative=name.endswith("_rel"))
        rows.summary[name] = result.total[thresholds[0]]
        for threshold, shares in result.by_layer.items():
            rows.add_layers(f"{name}@{threshold:g}", shares, result.entries)
            for kind in MATRICES:
                if kind in result.by_kind[threshold]:
                    by_layer, n = result.by_kind[threshold][kind], result.entries_by_kind[kind]
                    rows.add_layers(f"{name}_{kind}@{threshold:g}", by_layer, n)
