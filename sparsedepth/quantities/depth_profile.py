"""Depth profile of a score: how its value is distributed over the blocks.

A score is the mean of rows, each of one block (replaced or skipped) or two (a swapped pair). The weight of each block:

    w = argmin sum over rows (value - sum of w_k over the row's blocks k)^2,   w >= 0

With one block per row it is the block's mean (at least 0); with pairs, what the block adds to each of its pairs. Then

    without first block = mean of the rows without block 1         deep half = mean of the rows of blocks above L / 2
    largest share = max w / sum w                                  centre = sum w_k (k - 1) / (L - 1) / sum w,   0 to 1

The centre is the score's centre of mass in depth. With equal blocks the share is 1/L and the centre 1/2; for the causal
score, in which the last block has no row, 1/(L - 1) and (L - 2) / (2 L - 2).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from sparsedepth.quantities.record import Quantity

Entry = tuple[tuple[int, ...], float | None]
"""A row's blocks, from 1, and its value."""


def depth_profile(entries: Sequence[Entry], n_layers: int) -> dict[str, float | None]:
    """The depth profile of one score, from its rows; None where undefined: no such row, a row without a value, or no
    weight above 0."""
    values = np.array([np.nan if value is None else value for _, value in entries], dtype=float)
    known = len(values) > 0 and bool(np.isfinite(values).all())
    first = np.array([min(blocks) for blocks, _ in entries])

    def mean_from(least: float) -> float | None:
        return float(values[first >= least].mean()) if known and (first >= least).any() else None

    weight_L = block_weights(entries, n_layers) if known else np.zeros(n_layers)
    total = weight_L.sum()
    share_L = weight_L / total if total > 0 else None
    depth_L = np.arange(n_layers) / max(n_layers - 1, 1)
    return {
        "without_first": mean_from(2),
        "deep_half": mean_from(n_layers / 2 + 1 / 2),
        "largest_share": None if share_L is None else float(share_L.max()),
        "centre": None if share_L is None or n_layers < 2 else float(share_L @ depth_L),
    }


def block_weights(entries: Sequence[Entry], n_layers: int) -> np.ndarray:
    """weight_L; all 0 for a single pair of two blocks, whose shares are not identified."""
    if n_layers < 3 and any(len(blocks) > 1 for blocks, _ in entries):
        return np.zeros(n_layers)
    blocks_EL = np.zeros((len(entries), n_layers))
    for row, (blocks, _) in enumerate(entries):
        blocks_EL[row, [block - 1 for block in blocks]] = 1
    return nnls(blocks_EL, np.array([value for _, value in entries], dtype=float))[0]


def entries_of(score: Quantity, layers: Iterable[Mapping[str, Any]], pairs: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """The rows that a score averages, from the rows of one run by layer and by pair."""
    rows = [row for row in (layers if score.carried_by == "layer" else pairs) if row["metric"] == score.metric]
    if score.carried_by == "both":
        return [((row["layer"], row["other_layer"]), row["value"]) for row in rows]
    return [((row["layer"],), row["value"]) for row in rows]
