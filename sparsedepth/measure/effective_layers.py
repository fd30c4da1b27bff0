"""How many layers count, at any threshold, from the loss increase of each.

    usefulness(threshold) = share of blocks with (loss without the block's own work - loss) / loss > threshold
    effective layers      = usefulness x L

'Without its own work' is replaced by an affine map (`usefulness.Usefulness.affine_increase`) or left out
(`causal.CausalEffect.skip_increase`, the identity control). 2603.15389 counts at 10%; the count moves in steps of one
layer, so it is read at several.
"""

from collections.abc import Sequence


def count_above(increases: Sequence[float | None], threshold: float) -> int | None:
    """How many blocks raise the loss by more than the threshold; None if one of them is unknown, or there is none."""
    known = [increase for increase in increases if increase is not None]
    if not increases or len(known) < len(increases):
        return None
    return sum(increase > threshold for increase in known)


def share_above(increases: Sequence[float | None], threshold: float) -> float | None:
    """The same as a share of the blocks, from 0 to 1."""
    count = count_above(increases, threshold)
    return None if count is None else count / len(increases)
