"""How many layers count, at any threshold, from the loss increase of each.

    usefulness(threshold) = share of blocks with (loss without the block's own work - loss) / loss > threshold
    effective layers      = usefulness x L

'Without its own work' is replaced by an affine map (`usefulness.Usefulness.affine_increase`) or left out
(`causal.CausalEffect.skip_increase`, the identity control). 2603.15389 counts at 10%; the count moves in steps of one
layer, so it is read at several.
"""

from collections.abc import Sequence

from sparsedepth.measure.bootstrap import whole_mean


def share_above(increases: Sequence[float | None], threshold: float) -> float | None:
    """The share of the blocks that raise the loss by more than the threshold; None if one of them is unknown, or there
    is none."""
    return whole_mean([None if increase is None else float(increase > threshold) for increase in increases])
