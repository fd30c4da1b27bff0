"""How many layers a model needs, in units that do not depend on its loss.

    added(l)      = loss with block l replaced by its affine map - loss           (nat/token, `usefulness`)
    needed layers = number of blocks with added(l) > needed_threshold and its 95% interval above 0

Ours. The relative increase that usefulness counts says little where the loss is small: of a model with a loss of
0.00001 a block is useful whose replacement costs nothing.
"""

import dataclasses
from collections.abc import Sequence

from sparsedepth.config.run import MeasureConfig
from sparsedepth.measure.bootstrap import BootstrapEstimate

NEEDED_THRESHOLD: float = MeasureConfig.model_fields["needed_threshold"].default
"""nat/token"""


def needed_layers(
    added: Sequence[BootstrapEstimate], threshold: float, above_threshold: BootstrapEstimate
) -> BootstrapEstimate:
    """The count, with the interval of `above_threshold`, the number of blocks over the threshold alone, widened to hold
    it. None where a block has no interval, which takes two sequences."""
    lo, hi = above_threshold.lo, above_threshold.hi
    if lo is None or hi is None or any(block.value is None or block.lo is None for block in added):
        return dataclasses.replace(above_threshold, value=None, lo=None, hi=None)
    needed = float(sum((block.value or 0.0) > threshold and (block.lo or 0.0) > 0 for block in added))
    return dataclasses.replace(above_threshold, value=needed, lo=min(lo, needed), hi=max(hi, needed))
