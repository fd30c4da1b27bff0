"""Scores with 95% intervals: the percentile bootstrap over sequences, from per-sequence numbers.

Tokens of a sequence are not independent, so sequences are resampled (Efron & Tibshirani 1993, chapter 13). A score is a
statistic of means over sequences, recomputed on the means of each resample: so ratios and thresholded counts have the
interval of the ratio and of the count. The percentiles are expanded (Hesterberg 2015, 1411.5279): resamples of N values
have (N - 1) / N of their variance and a normal distribution's tails.

    interval = quantiles a and 1 - a of the resamples,   a = Phi(-sqrt(N / (N - 1)) t(N-1, 0.975))

For the mean of normal values that is Student's interval. Below five sequences it is the range of the values, which
holds a symmetric mean in 1 - 2^(1-N) of cases. `docs/intervals.md` says how often others hold the truth.

Shapes: E statistics."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, stdtrit

N_RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class BootstrapEstimate:
    """A value with its interval; None if undefined, and for the interval of a single sequence."""

    value: float | None
    lo: float | None
    hi: float | None
    excess: float = 0.0
    """mean of the resamples - value: about the bias of the value"""


Draws = np.random.Generator | int
"""Where resamples come from: a generator, which moves on, or the seed of a kept set of them."""

ByPair = dict[tuple[int, int], float | None]
"""Values of pairs of layers a < b."""

Estimator = Callable[..., BootstrapEstimate]
"""(statistic, *per_sequence, level=LEVEL) -> estimate: `bootstrap` with fixed random numbers."""


def bootstrap(
    statistic: Callable[..., np.ndarray], *per_sequence: np.ndarray, rng: Draws, level: float = LEVEL
) -> BootstrapEstimate:
    """The statistic of the sequences, and its interval. `per_sequence`: arrays [N, ...]. `statistic` takes their means
    over sequences, each as [R, ...] for R resamples at once, and returns [R] values, NaN where undefined. Raises
    ValueError without a sequence."""
    return bootstrap_each(lambda *means: statistic(*means)[:, None], *per_sequence, rng=rng, level=level)[0]


def bootstrap_each(
    statistic: Callable[..., np.ndarray], *per_sequence: np.ndarray, rng: Draws, level: float = LEVEL
) -> list[BootstrapEstimate]:
    """The same for E statistics on one set of resamples: `statistic` returns [R, E]. Intervals are marginal."""
    n_sequences = len(per_sequence[0])
    if n_sequences == 0:
        raise ValueError("0 sequences to estimate from; expected at least 1: the held-out text is too short")
    arrays = [np.asarray(array, dtype=np.float64) for array in per_sequence]
    value_E = statistic(*(array.mean(0)[None] for array in arrays))[0]
    lo_E = hi_E = np.full(len(value_E), math.nan)
    excess_E = np.zeros(len(value_E))
    if n_sequences > 1:
        weights_RN = (_kept if isinstance(rng, int) else _drawn)(rng, n_sequences)
        resampled_RE = statistic(*(np.tensordot(weights_RN, array, 1) for array in arrays))
        tail = expanded_tail(n_sequences, level)
        lo_E, hi_E = np.quantile(resampled_RE, (tail, 1 - tail), axis=0)
        excess_E = resampled_RE.mean(0) - value_E
    # Noise raises a mean of absolute values, so near 0 all resamples may exceed the value: widen to include it.
    return [
        BootstrapEstimate(finite(value), finite(min(lo, value)), finite(max(hi, value)), finite(excess) or 0.0)
        for value, lo, hi, excess in zip(value_E, lo_E, hi_E, excess_E, strict=True)
    ]


def expanded_tail(n_sequences: int, level: float = LEVEL) -> float:
    half = math.sqrt(n_sequences / (n_sequences - 1)) * stdtrit(n_sequences - 1, (1 + level) / 2)
    return float(ndtr(-half))


def _drawn(rng: Draws, n_sequences: int) -> np.ndarray:
    """weights_RN: the share of each sequence in each resample."""
    return (
        np.random.default_rng(rng).multinomial(n_sequences, [1 / n_sequences] * n_sequences, N_RESAMPLES) / n_sequences
    )


_kept = functools.lru_cache(maxsize=1)(_drawn)
"""All measures of a run share one draw."""


def shared_resamples(rng: np.random.Generator, estimate: Callable[..., Any] = bootstrap) -> Callable[..., Any]:
    """`bootstrap`, or `bootstrap_each`, on one set of resamples for all statistics."""
    return functools.partial(estimate, rng=int(rng.integers(2**63)))


def identity(mean_R: np.ndarray) -> np.ndarray:
    """The statistic of a plain mean over sequences."""
    return mean_R


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; NaN if the whole is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(whole != 0, part / whole, np.nan)


def mean_of_last(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis; NaN if empty."""
    return values.mean(-1) if values.shape[-1] else np.full(values.shape[:-1], np.nan)


def finite(value: float | np.floating) -> float | None:
    """The number, or None if not finite: an undefined result is missing, never 0."""
    return float(value) if math.isfinite(value) else None


def finites(values: Iterable[float | np.floating]) -> list[float | None]:
    return [finite(value) for value in values]


def by_pair(value_LL: np.ndarray, first: int) -> ByPair:
    """By pair of layers a < b, of which `first` is the lowest."""
    pairs = itertools.combinations(range(len(value_LL)), 2)
    return {(a + first, b + first): finite(value_LL[a, b]) for a, b in pairs}


def complete_mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing, or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
