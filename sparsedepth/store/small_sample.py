"""Intervals from a few values: Student's t for a mean over seeds, Wilson's for a share, Fisher's for a correlation.

    P(|T| > |t|),  T of df degrees of freedom:  mean +- t_critical(n - 1) s / sqrt(n) covers the mean in 95% of samples

For whole degrees of freedom this is a finite sum (Abramowitz & Stegun, 26.7.3 and 26.7.4). Not by scipy.special, whose
import takes 0.45 s, which queries do without; `effects.fit` uses it for fractional degrees of freedom."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from statistics import fmean

LEVEL = 0.95
Z = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""
MIN_VALUES = 3
"""Fewer values get no interval: at two, its half-width is 9 estimated standard deviations."""


def two_sided_p(t: float, df: int) -> float:
    """P(|T| > |t|) of Student's distribution with `df` whole degrees of freedom, to about 1e-15 absolute."""
    assert df >= 1
    angle = math.atan(abs(t) / math.sqrt(df))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    odd = df % 2
    # The terms cos^k with coefficients 2/3, 4/5, ... (df odd) or 1/2, 3/4, ... (df even), up to k = df - 2.
    factors = (cosine * cosine * (k - 1) / k for k in range(3 if odd else 2, df - 1, 2))
    total = sum(accumulate(factors, mul, initial=cosine if odd else 1.0)) if df > 1 else 0.0
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1 - inside))


@cache
def t_critical(df: int) -> float:
    """The t that |T| exceeds with probability 1 - LEVEL, by bisection: 12.706 for df = 1, 1.96 for many."""
    low = 0.0
    high = 1.0
    while two_sided_p(high, df) > 1 - LEVEL:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > 1 - LEVEL else (low, middle)
    return high


def seed_means(values: Iterable[tuple[float | None, float]]) -> list[float]:
    """One value per seed, from (seed, value): the mean of runs that share a seed and differ in their initial model
    (`train --from`), since only seeds are independent. Runs without a seed (None, NaN) count one by one."""
    by_seed: dict[tuple[str, float], list[float]] = {}
    for index, (seed, value) in enumerate(values):
        key = ("run", index) if seed is None or math.isnan(seed) else ("seed", seed)
        by_seed.setdefault(key, []).append(value)
    return [*map(fmean, by_seed.values())]


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Mean of independent values and its 95% interval; None without a value, or with fewer than MIN_VALUES."""
    n = len(values)
    if not n:
        return None, None, None
    mean = fmean(values)
    if n < MIN_VALUES:
        return mean, None, None
    half = t_critical(n - 1) * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return mean, mean - half, mean + half


def share_interval(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval (1927) of a share of n independent trials:

    (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)"""
    middle = share + Z**2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    lo = (middle - half) / (1 + Z**2 / n)
    hi = (middle + half) / (1 + Z**2 / n)
    return 0.0 if share == 0 else max(0.0, lo), 1.0 if share == 1 else min(1.0, hi)  # exact in spite of rounding


def paired_share_interval(lost: int, gained: int, n: int) -> tuple[float, float]:
    """95% interval of the difference of two shares of the same n trials, (lost - gained) / n: the first alone holds in
    `lost` of them, the second alone in `gained` (Agresti and Min 2005, eq. 1: Wald's after half a trial in each cell).
    """
    difference = (lost - gained) / (n + 2)
    n = n + 2
    half = Z * math.sqrt((lost + gained + 1) / n - difference**2) / math.sqrt(n)
    return max(-1.0, difference - half), min(1.0, difference + half)
