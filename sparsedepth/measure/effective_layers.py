"""Effective layers at several thresholds, from the loss increases of replaced blocks.

    share(tau) = share of blocks whose replacement raises the loss by more than tau;   effective layers = share x L

for two replacements: the best affine map (2603.15389, tau = 0.1 in its released code) and the identity, i.e. the block
left out. A share at one threshold moves in steps of 1/L; several show whether a ranking of models hangs on the choice.
The identity is an affine map, too: a block that counts only for the fitted one shows that least squares need not be
least loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLDS = (0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True, kw_only=True)
class EffectiveLayers:
    """At one threshold; None where an increase is missing."""

    threshold: float
    affine_share: float | None
    """0 to 1: usefulness"""
    affine_layers: int | None
    identity_share: float | None
    identity_layers: int | None


def effective_layers(
    affine_increase: Sequence[float | None],
    skip_increase: Sequence[float | None],
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[EffectiveLayers]:
    """Counts from the increases of blocks 1..L (`usefulness.affine_increase`, `causal.skip_increase`)."""
    assert len(affine_increase) == len(skip_increase)
    found = []
    for threshold in thresholds:
        affine, identity = count_above(affine_increase, threshold), count_above(skip_increase, threshold)
        found.append(
            EffectiveLayers(
                threshold=threshold,
                affine_share=_share(affine, len(affine_increase)),
                affine_layers=affine,
                identity_share=_share(identity, len(skip_increase)),
                identity_layers=identity,
            )
        )
    return found


def count_above(increases: Sequence[float | None], threshold: float) -> int | None:
    """How many blocks raise the loss by more than the threshold; None if one of them is unknown, or there is none."""
    known = [increase for increase in increases if increase is not None]
    if not increases or len(known) < len(increases):
        return None
    return sum(increase > threshold for increase in known)


def _share(count: int | None, n_layers: int) -> float | None:
    return None if count is None else count / n_layers
