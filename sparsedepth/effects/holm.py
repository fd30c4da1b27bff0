"""Holm's correction of a family of effects that are tested together.

Holm 1979, 'A simple sequentially rejective multiple test procedure':

    p_(1) <= ... <= p_(m):   adjusted p_(i) = max over j <= i of min(1, (m - j + 1) p_(j))
"""

from collections.abc import Sequence
from dataclasses import replace

from sparsedepth.effects.intervals import J


def correct(family: Sequence[J]) -> list[J]:
    """The same effects, each with Holm's p over all of them that have a p-value."""
    p_at = {i: judged.effect.p for i, judged in enumerate(family) if judged.effect.p is not None}
    p_holm_at = dict(zip(p_at, holm(list(p_at.values())), strict=True))
    n_tested = max(len(p_at), 1)
    return [replace(judged, p_holm=p_holm_at.get(i), n_tested=n_tested) for i, judged in enumerate(family)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those <= 0.05 errs once or more in at most 5% of families."""
    m = len(p_values)
    adjusted, largest = [0.0] * m, 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
