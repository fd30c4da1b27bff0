"""A mean of independent values with Student's 95% interval, for the scripts of this folder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from sparsedepth.store.small_sample import MIN_VALUES


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`lo`, `hi`, `error`, `df` are None with fewer than MIN_VALUES values or where all agree, `mean` without any."""

    mean: float | None = None
    lo: float | None = None
    hi: float | None = None
    n: int = 0
    error: float | None = None
    df: float | None = None

    def __str__(self) -> str:
        if self.mean is None:
            return "no value"
        if self.lo is None or self.hi is None:
            return f"{self.mean:+.3g} (too few for an interval)"
        return f"{self.mean:+.3g} (95% interval {self.lo:+.3g} to {self.hi:+.3g})"


def estimate(values: Sequence[float] | np.ndarray, least_sd: float = 0.0) -> Estimate:
    """`least_sd`: a lower bound of the standard deviation, since a count can agree in every seed by rounding alone."""
    values_N = np.asarray(values, dtype=float)
    n = len(values_N)
    mean = float(values_N.mean()) if n else None
    sd = max(float(values_N.std(ddof=1)), least_sd) if n >= MIN_VALUES else 0.0
    if mean is None or sd <= 1e-12 * max(abs(mean), 1e-300):
        return Estimate(mean=mean, n=n)
    error = sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.975)) * error
    return Estimate(mean=mean, lo=mean - half, hi=mean + half, n=n, error=error, df=n - 1)
