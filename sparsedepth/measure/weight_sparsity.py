"""Weight sparsity: the share of the blocks' matrix entries near zero.

    absolute: share of entries with |w| < eps                   2603.15389 (its values of eps are not published)
    relative: share of entries with |w| < c rms(own matrix)     control, ours: invariant to the scale of the matrix

The absolute share rises when weights shrink, for example by weight decay; the relative one does not. For entries of one
normal distribution the relative share is erf(c / sqrt 2): 0.0797 at c = 0.1. Only matrices that transform the stream
are counted (`ProbedModel.matrices`): no norm, router, embedding or head. A kind is a matrix's role (query, key, value,
output, gate, up, down); the experts of a layer are pooled. The released code announces a script for this and has none.

Shapes: C thresholds and last all entries.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from sparsedepth.measure.measurements import MeasureContext, Measurements
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import IN_RUNS
from sparsedepth.quantities.measured import MATRICES


def weight_counts(probed: ProbedModel, thresholds: Sequence[float], *, relative: bool) -> dict[str, np.ndarray]:
    """count_LC by kind of matrix, "" for all: entries below each threshold, in units of a weight or (`relative`) of the
    rms of its matrix, and last their number, without matrices of zeros if they are relative."""
    count_LC = defaultdict(lambda: np.zeros((probed.n_layers, len(thresholds) + 1), dtype=np.int64))
    with probing(probed):
        for index in range(probed.n_layers):
            for name, matrix in probed.matrices(index + 1).items():
                # In fp32: bf16 would round the threshold by up to 0.4%, past some weights.
                size, unit = matrix.float().abs(), 1.0
                if relative:
                    unit = torch.linalg.vector_norm(matrix, dtype=torch.float64).item() / math.sqrt(matrix.numel())
                below = [*(int((size < t * unit).sum()) for t in thresholds), matrix.numel()] if unit > 0 else 0
                for kind in ("", name.rpartition(".")[2]):  # expert3.gate is a gate
                    count_LC[kind][index] += below
    return count_LC


def shares(count_C: np.ndarray) -> list[float | None]:
    """At each threshold; None without entries, as in a layer without the kind."""
    *below, total = count_C.tolist()
    return [n / total if total else None for n in below]


def add_rows(context: MeasureContext, rows: Measurements) -> None:
    for name in ("weight_sparsity", "weight_sparsity_rel"):
        thresholds = getattr(context.config, IN_RUNS[name].threshold)
        counts = weight_counts(context.probed, thresholds, relative=name.endswith("_rel"))
        rows.summary[name] = shares(counts[""].sum(0))[0]
        for kind in ("", *MATRICES):
            if kind in counts:
                by_threshold = zip(*map(shares, counts[kind]), strict=True)
                for threshold, values in zip(thresholds, by_threshold, strict=True):
                    metric = f"{name}_{kind}" if kind else name
                    rows.add_layers(f"{metric}@{threshold:g}", values, counts[kind][:, -1].tolist())
