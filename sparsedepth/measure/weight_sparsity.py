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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.measured import MATRICES


@dataclass(frozen=True, kw_only=True)
class WeightSparsity:
    """By kind of matrix, "" for all: values of layers 1..L."""

    shares: dict[str, dict[float, list[float | None]]]
    """by threshold, from 0 to 1; None without entries, as in a layer without the kind"""
    entries: dict[str, list[int]]
    """counted entries; the relative share leaves out matrices of zeros, which have no scale"""
    total: dict[float, float | None]
    """share by threshold, over the entries of all blocks"""


def weight_sparsity(probed: ProbedModel, thresholds: Sequence[float], *, relative: bool) -> WeightSparsity:
    """Share of entries below each threshold, in units of a weight or (`relative`) of the rms of its matrix."""
    with probing(probed):
        counts = [_count(probed.matrices(layer), thresholds, relative) for layer in range(1, probed.n_layers + 1)]
    none = np.zeros(1 + len(thresholds), dtype=np.int64)
    kinds = dict.fromkeys(kind for count in counts for kind in count)
    by_kind = {kind: [count.get(kind, none) for count in counts] for kind in kinds}
    return WeightSparsity(
        shares={
            kind: {t: [_share(count, i) for count in layers] for i, t in enumerate(thresholds)}
            for kind, layers in by_kind.items()
        },
        entries={kind: [int(count[-1]) for count in layers] for kind, layers in by_kind.items()},
        total={t: _share(sum(by_kind[""], none), i) for i, t in enumerate(thresholds)},
    )


def _count(matrices: Mapping[str, Tensor], thresholds: Sequence[float], relative: bool) -> dict[str, np.ndarray]:
    """By kind, and for all: the number of entries of one block below each threshold, and last their total."""
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(1 + len(thresholds), dtype=np.int64))
    for name, matrix in matrices.items():
        # In fp32: bf16 would round the threshold by up to 0.4%, past some weights.
        size, unit = matrix.float().abs(), 1.0
        if relative:
            unit = torch.linalg.vector_norm(matrix, dtype=torch.float64).item() / math.sqrt(matrix.numel())
        below = [*(int((size < t * unit).sum()) for t in thresholds), matrix.numel()] if unit > 0 else 0
        for kind in ("", name.rpartition(".")[2]):  # expert3.gate is a gate
            counts[kind] += below
    return counts


def _share(count: np.ndarray, index: int) -> float | None:
    return int(count[index]) / int(count[-1]) if count[-1] else None


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    for name in ("weight_sparsity", "weight_sparsity_rel"):
        thresholds = getattr(context.config, IN_RUNS[name].threshold)
        result = weight_sparsity(context.probed, thresholds, relative=name.endswith("_rel"))
        rows.summary[name] = result.total[thresholds[0]]
        for kind in ("", *MATRICES):
            for threshold, shares in result.shares.get(kind, {}).items():
                metric = f"{name}_{kind}" if kind else name
                rows.add_layers(f"{metric}@{threshold:g}", shares, result.entries[kind])
