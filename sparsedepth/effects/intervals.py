"""What a handful of paired differences can tell: mean, 95% interval, p, verdict, and the correction for asking often.

    mean +- t(n-1, 0.975) s / sqrt(n)          p = P(|T_(n-1)| > |mean| / (s / sqrt(n)))

The distribution is that of `store.student`. Holm (1979), 'A simple sequentially rejective multiple test procedure'.

Why not a bootstrap: sweeps have 3 to 8 seeds, and a percentile bootstrap of n values never leaves their range, so it
covers at most 1 - 2^(1-n) of the time (75% at n = 3). Student's interval covers 95% at every n >= 2 for normal noise;
it is given from n = 3 on (`store.student`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from sparsedepth.store.student import MIN_VALUES as MIN_PAIRS
from sparsedepth.store.student import t_critical, two_sided_p

Verdict = Literal["lower", "higher", "not distinguishable"]

ALPHA = 0.05
"""The share of families without any effect in which Holm's correction lets one stand out."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95% interval. `lo`, `hi` and `p` are None with fewer than MIN_PAIRS values, `mean` with none."""

    mean: float | None
    lo: float | None
    hi: float | None
    p: float | None
    n: int

    def covers(self, value: float) -> bool:
        """Whether there is an interval and the value lies in it."""
        return self.lo is not None and self.hi is not None and self.lo <= value <= self.hi

    @property
    def excludes_zero(self) -> bool:
        return self.lo is not None and not self.covers(0.0)


def estimate(values: Sequence[float] | np.ndarray, least_sd: float = 0.0) -> Estimate:
    """Mean of independent finite values, its interval and the p-value against 0.

    `least_sd` is the standard deviation below which the spread is not believed: a count that moves in steps can agree
    in every seed by rounding alone.
    """
    values_N = np.asarray(values, dtype=float)
    assert np.isfinite(values_N).all(), "missing values are dropped, and counted, before an estimate"
    n = len(values_N)
    if n == 0:
        return Estimate(mean=None, lo=None, hi=None, p=None, n=0)
    mean = float(values_N.mean())
    if n < MIN_PAIRS:
        return Estimate(mean=mean, lo=None, hi=None, p=None, n=n)
    return student(mean, max(float(values_N.std(ddof=1)), least_sd) / math.sqrt(n), n - 1, n)


def student(mean: float, error: float, df: int, n: int) -> Estimate:
    """The interval and the p-value against 0 of a mean of n values with a standard error of df degrees of freedom."""
    half = t_critical(df) * error
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return Estimate(mean=mean, lo=mean - half, hi=mean + half, p=two_sided_p(t, df), n=n)


def verdict_of(effect: Estimate, floor: float | None) -> Verdict:
    """'lower' or 'higher' where the interval excludes 0 and the mean exceeds the floor, which is known."""
    if effect.mean is None or floor is None or not effect.excludes_zero or abs(effect.mean) <= floor:
        return "not distinguishable"
    return "higher" if effect.mean > 0 else "lower"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An effect and what may be said of it."""

    effect: Estimate
    floor: float | None
    """The smallest effect that seeds do not explain; None where they cannot tell."""
    verdict: Verdict
    """Of this effect by itself (`verdict_of`)."""
    p_holm: float | None = None
    """Holm's p over the family that the effect was tested in; None outside a family, and with too few pairs."""

    @property
    def corrected_verdict(self) -> Verdict:
        """The verdict among all of its family."""
        beyond_chance = self.p_holm is not None and self.p_holm <= ALPHA
        return self.verdict if beyond_chance else "not distinguishable"


J = TypeVar("J", bound=Judged)


def correct(family: Sequence[J]) -> list[J]:
    """The same effects, each with Holm's p over all of them that have a p-value."""
    adjusted = iter(holm([judged.effect.p for judged in family if judged.effect.p is not None]))
    return [replace(judged, p_holm=None if judged.effect.p is None else next(adjusted)) for judged in family]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those <= 0.05 errs once or more in at most 5% of families."""
    m = len(p_values)
    adjusted, largest = [0.0] * m, 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
