"""Counts of layers, from each block's loss increase when replaced.

    usefulness(threshold) = share of blocks with (loss with the block replaced - loss) / loss > threshold
    effective layers      = usefulness x L
    added(l)      = loss with block l replaced by its affine map - loss           (nat/token)
    needed layers = number of blocks with added(l) > needed_threshold and its 95% interval above 0

Blocks are replaced by an affine map (`usefulness.Usefulness.affine_increase`) or skipped
(`causal.CausalEffect.skip_increase`, the identity control). 2603.15389 counts at a threshold of 10%; a count has steps
of one layer, so several thresholds are reported. Needed layers are ours: a relative increase says little at a small
loss; in a model with a loss of 0.00001 a block counts as useful whose replacement costs nothing.
"""

import dataclasses
from collections.abc import Sequence

from sparsedepth.config.run import MeasureConfig
from sparsedepth.measure.bootstrap import BootstrapEstimate, complete_mean

NEEDED_THRESHOLD: float = MeasureConfig.model_fields["needed_threshold"].default
"""nat/token"""


def share_above(increases: Sequence[float | None], threshold: float) -> float | None:
    """The share of blocks whose loss increase exceeds the threshold; None if one is unknown, or there is none."""
    return complete_mean([None if increase is None else float(increase > threshold) for increase in increases])


def needed_layers(
    added: Sequence[BootstrapEstimate], threshold: float, above_threshold: BootstrapEstimate
) -> BootstrapEstimate:
    """The count, with the interval of `above_threshold`, the number of blocks above the threshold, widened to include
    the count. None if a block has no interval, which takes two sequences."""
    lo, hi = above_threshold.lo, above_threshold.hi
    if lo is None or hi is None or any(block.value is None or block.lo is None for block in added):
        return dataclasses.replace(above_threshold, value=None, lo=None, hi=None)
    needed = float(sum((block.value or 0.0) > threshold and (block.lo or 0.0) > 0 for block in added))
    return dataclasses.replace(above_threshold, value=needed, lo=min(lo, needed), hi=max(hi, needed))
