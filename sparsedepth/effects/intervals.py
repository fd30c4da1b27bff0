"""Statistics of a few seeds: mean, 95% interval, p, and the verdict.

    mean +- t(n-1, 0.975) s / sqrt(n)          p = P(|T_(n-1)| > |mean| / (s / sqrt(n)))

In a family of contrasts s and its degrees of freedom are the moderated ones (`moderated`), and p is Holm's (1979, 'A
simple sequentially rejective multiple test procedure'):

    p_(1) <= ... <= p_(m):   adjusted p_(i) = max over j <= i of min(1, (m - j + 1) p_(j))

Detectable effect: called 'lower' or 'higher' in 80% of such sweeps,

    max(t(df, 1 - 0.05 / 2m) se, floor) + t(df, 0.8) se,     m effects in the family (Holm's first step)

Why not a bootstrap: sweeps have 3 to 8 seeds, and a percentile bootstrap of n values never leaves their range, so it
covers at most 1 - 2^(1-n) of the time (75% at n = 3). Student's interval covers 95% at every n >= 2 for normal noise;
it is given from n = 3 on (`store.small_sample`).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field
from scipy.special import stdtr, stdtrit

from sparsedepth.effects.moderated import shared_correlation, squeeze
from sparsedepth.store.small_sample import MIN_VALUES

Verdict = Literal["lower", "higher", "not distinguishable"]

ALPHA = 0.05
"""Family-wise error rate of Holm's correction."""
POWER = 0.8
"""The share of sweeps in which a detectable effect is detected."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95% interval. `lo`, `hi`, `p`, `error`, `df` are None with too few values, `mean` without any."""

    mean: float | None
    lo: float | None
    hi: float | None
    p: float | None
    n: int
    """Values, or pairs."""
    error: float | None = None
    """Standard error; 0 where the values do not differ."""
    df: float | None = None
    """Degrees of freedom of the error, borrowed ones included."""

    @property
    def lacks_spread(self) -> bool:
        """Whether there is no interval because the values do not differ."""
        return self.lo is None and self.error == 0

    def covers(self, value: float) -> bool:
        """Whether there is an interval and the value lies in it."""
        return self.lo is not None and self.hi is not None and self.lo <= value <= self.hi

    @property
    def excludes_zero(self) -> bool:
        return self.lo is not None and not self.covers(0.0)


def estimate(values: Sequence[float] | np.ndarray, least_sd: float = 0.0, df: float | None = None) -> Estimate:
    """Mean of independent finite values, its interval and the p-value against 0; without these where all values agree
    to rounding, which says nothing about their spread.

    `least_sd` is a lower bound of the standard deviation: a count can agree in every seed by rounding alone. `df`: its
    degrees of freedom, if not n - 1.
    """
    values_N = np.asarray(values, dtype=float)
    assert np.isfinite(values_N).all(), "missing values are dropped, and counted, before an estimate"
    n = len(values_N)
    if n == 0:
        return Estimate(mean=None, lo=None, hi=None, p=None, n=0)
    mean = float(values_N.mean())
    if n < MIN_VALUES or not (least_sd or _differ(values_N)):
        error = None if n < MIN_VALUES else 0.0
        return Estimate(mean=mean, lo=None, hi=None, p=None, n=n, error=error)
    return t_interval(mean, max(float(values_N.std(ddof=1)), least_sd) / math.sqrt(n), df or n - 1, n)


def t_interval(mean: float, error: float, df: float, n: int) -> Estimate:
    """The interval and the p-value against 0 of a mean of n values with a standard error of df degrees of freedom."""
    half = float(stdtrit(df, 0.975)) * error
    p = 2 * float(stdtr(df, -abs(mean) / error)) if error else 0.0 if mean else 1.0
    return Estimate(mean=mean, lo=mean - half, hi=mean + half, p=p, n=n, error=error, df=df)


def scatter(residual_N: np.ndarray, cell_N: np.ndarray, df: int, df_between: int) -> tuple[float, float]:
    """The residual variance for the standard error of a fitted curve, and its degrees of freedom. The residuals have
    `df`, their means by cell `df_between`.

    If the cells' means lie further off the curve than noise within cells explains, s_b^2 > s_w^2, it is s_b^2: more
    seeds bring no mean nearer to the curve. Its degrees of freedom are Satterthwaite's, of s_w^2 and the excess.
    """
    squares, df_within = float(residual_N @ residual_N), df - df_between
    if min(df_between, df_within) < 1:
        return squares / df, df
    cell_N = np.unique(cell_N, return_inverse=True)[1]
    between = float((np.bincount(cell_N, residual_N) ** 2 / np.bincount(cell_N)).sum())
    within, between = max(squares - between, 0.0) / df_within, between / df_between
    if between <= within:
        return squares / df, df
    return between, between**2 / (within**2 / df_within + (between - within) ** 2 / df_between)


def verdict_of(effect: Estimate, floor: float | None) -> Verdict:
    """'lower' or 'higher' where the interval excludes 0 and the mean exceeds a known floor."""
    if effect.mean is None or floor is None or not effect.excludes_zero or abs(effect.mean) <= floor:
        return "not distinguishable"
    return "higher" if effect.mean > 0 else "lower"


@dataclass(frozen=True, kw_only=True)
class ExtraVariance:
    """A component of an effect's variance that its seeds do not show."""

    variance: float
    df: float
    baseline: tuple[str, ...] = ()
    """The baseline's cells, in order, if it comes from choosing their tuned value: contrasts with these share it."""


def with_extra_variances(effect: Estimate, extra: Sequence[ExtraVariance]) -> Estimate:
    """The estimate with further variances in its error. The sum has Satterthwaite's degrees of freedom (1946), or its
    own where those would make the interval or p smaller than without these variances."""
    if effect.mean is None or effect.error is None or effect.df is None or not extra:
        return effect
    terms = [ExtraVariance(variance=effect.error**2, df=effect.df), *extra]
    total = sum(term.variance for term in terms)
    df = total**2 / sum(term.variance**2 / term.df for term in terms) if total else effect.df
    summed = t_interval(effect.mean, math.sqrt(total), float(df), effect.n)
    assert effect.hi is not None and effect.p is not None and summed.hi is not None and summed.p is not None
    is_smaller = summed.hi < effect.hi or summed.p < effect.p
    return t_interval(effect.mean, math.sqrt(total), effect.df, effect.n) if is_smaller else summed


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An effect and its verdict: 'lower' or 'higher' if it passes all these checks, else 'not distinguishable'.

    1. The 95% interval excludes 0, and the mean exceeds the noise floor (`verdict_uncorrected`).
    2. Holm's p over the family is at most ALPHA (`verdict_ignoring_tuning`).
    3. Both sides were tuned alike (`tuning_flaw`).
    4. The effect remains without the expected regret of the tuned values (`tuning_ambiguity`).

    `verdict_blocked_by` is the first of 3 and 4 to fail. An alias is the name of a field in cards.
    """

    effect: Estimate
    unit: str
    """Of `effect` and `floor`; 'ln ratio' where the outcome is compared on a log scale."""
    by_seed: tuple[float, ...]
    """Its mean in each seed (`seed_means`): the seed is the unit, however many pairs it has."""
    seed_df: float | None = None
    """Degrees of freedom of their spread; None: one less than their number."""
    least_sd: float = 0.0
    """Lower bound of the standard deviation over seeds."""
    noise: float | None = None
    """Standard deviation over seeds of a side's mean, setting or baseline; None without two seeds, or two sides."""
    extra_variances: Annotated[tuple[ExtraVariance, ...], Field(alias="added")] = ()
    """Variances of its error other than that over seeds."""
    floor: float | None
    """The smallest effect that exceeds seed noise; None with too few seeds."""
    p_holm: float | None = None
    """Holm's p over the effect's family; None outside a family, and with too few seeds."""
    n_tested: int = 1
    """Effects with a p-value in that family."""
    tuning_flaw: str = ""
    """Why the two sides were not tuned alike."""
    expected_regret: Annotated[float, Field(alias="excess")] = 0.0
    """How far the tuned values are expected to lie above their best: the setting's minus the baseline's."""
    smallest_seen: float | None = None
    """The detectable effect where the frame `effects` states it."""
    tuning_ambiguity: Annotated[str, Field(alias="tuning_doubt")] = ""
    """The reason to withhold the verdict if it depends on `expected_regret`."""

    @property
    def noise_depth(self) -> int | None:
        """The number of layers that the noise between its seeds belongs to; None for effects over several depths."""
        return None

    @property
    def own_df(self) -> float:
        """Degrees of freedom of the spread between seeds, without borrowed ones."""
        return self.seed_df or len(self.by_seed) - 1

    @property
    def verdict(self) -> Verdict:
        """The verdict to report: corrected over the family, and withheld where tuning may explain the effect."""
        return "not distinguishable" if self.verdict_blocked_by else self.verdict_ignoring_tuning

    @property
    def verdict_blocked_by(self) -> str:
        """Why tuning withholds the verdict; '' where it does not."""
        return self.tuning_flaw or (self.tuning_ambiguity if self._depends_on_regret else "")

    @property
    def _depends_on_regret(self) -> bool:
        """Whether the effect is no longer 'lower' or 'higher' once the expected regret is subtracted."""
        effect = self.effect
        if self.verdict_ignoring_tuning == "not distinguishable" or effect.mean is None or effect.error is None:
            return False
        corrected = t_interval(effect.mean - self.expected_regret, effect.error, effect.df or 1.0, effect.n)
        if verdict_of(corrected, self.floor) != self.verdict_uncorrected:
            return True
        return abs(corrected.mean or 0.0) < abs(effect.mean) and (corrected.p or 0.0) * self._holm_multiplier > ALPHA

    @property
    def _holm_multiplier(self) -> float:
        """p_holm / p, since a card holds these two; 1 outside a family."""
        p = self.effect.p
        return min(self.p_holm / p, self.n_tested) if self.p_holm and p else 1.0

    @property
    def verdict_ignoring_tuning(self) -> Verdict:
        """The verdict by interval, floor and Holm's p alone."""
        is_insignificant = self.p_holm is not None and self.p_holm > ALPHA
        return "not distinguishable" if is_insignificant else self.verdict_uncorrected

    @property
    def verdict_uncorrected(self) -> Verdict:
        """The verdict by interval and floor alone."""
        return verdict_of(self.effect, self.floor)

    @property
    def threshold(self) -> float | None:
        """The smallest mean that is called 'lower' or 'higher', by Holm's first step; None with too few seeds."""
        error, df = self.effect.error, self.effect.df
        if not error or df is None or self.floor is None:
            return None
        return max(float(stdtrit(df, 1 - ALPHA / (2 * self.n_tested))) * error, self.floor)

    @property
    def detectable(self) -> float | None:
        """The size of effect that is called 'lower' or 'higher' in 80% of such sweeps; None with too few seeds."""
        if self.smallest_seen is not None:
            return self.smallest_seen
        error, df, threshold = self.effect.error, self.effect.df, self.threshold
        if error is None or df is None or threshold is None:
            return None
        return threshold + float(stdtrit(df, POWER)) * error


J = TypeVar("J", bound=Judged)


def moderate(family: Sequence[J], lenders: Sequence[Judged] = ()) -> list[J]:
    """The same effects of one outcome with moderated errors and floors (`moderated`), also those of two seeds whose
    degrees of freedom, borrowed ones included, reach those of three seeds. `lenders`: further effects whose variances
    are pooled with the family's. Effects without any spread between seeds neither lend nor borrow: counts at a bound,
    as all blocks of a shallow model needed in every run, say nothing about the noise of other counts."""
    usable = {i: judged for i, judged in enumerate((*family, *lenders)) if _differ(judged.by_seed)}
    if not usable:
        return list(family)
    s2 = [max(float(np.var(judged.by_seed, ddof=1)), judged.least_sd**2) for judged in usable.values()]
    by_seed = [judged.by_seed for judged in usable.values()]
    variances = squeeze(s2, [judged.own_df for judged in usable.values()], shared_correlation(by_seed))
    with_noise = {i: judged for i, judged in usable.items() if judged.noise is not None}
    noises = squeeze(
        [(judged.noise or 0.0) ** 2 for judged in with_noise.values()],
        [2 * judged.own_df for judged in with_noise.values()],
    )
    moderated = list(family)
    for i, variance, df in zip(usable, *variances, strict=True):
        if i < len(family):
            moderated[i] = _with_error(moderated[i], variance, df)
    for i, variance, df in zip(with_noise, *noises, strict=True):
        if i < len(family):
            judged = moderated[i]
            floor = floor_of(math.sqrt(variance), float(df), len(judged.by_seed), judged.least_sd)
            moderated[i] = replace(judged, floor=floor)
    return moderated


def moderate_by_depth(family: Sequence[J], lenders: Sequence[Judged] = ()) -> list[J]:
    """`moderate` for each depth by itself: the noise between seeds may grow several times with depth, and the intervals
    of deep models would be too narrow by what they borrowed from shallow ones."""
    moderated = dict[int, J]()
    for depth in {each.noise_depth for each in family}:
        of_depth = {i: each for i, each in enumerate(family) if each.noise_depth == depth}
        lending = [lender for lender in lenders if lender.noise_depth == depth]
        moderated |= zip(of_depth, moderate([*of_depth.values()], lending), strict=True)
    return [moderated[i] for i in range(len(family))]


def _differ(by_seed: Sequence[float] | np.ndarray) -> bool:
    """Whether seeds differ by more than rounding."""
    return len(by_seed) > 1 and not math.isclose(min(by_seed), max(by_seed), abs_tol=1e-12)


def _with_error(judged: J, variance: float, df: float) -> J:
    n_seeds, mean = len(judged.by_seed), judged.effect.mean
    if df < MIN_VALUES - 1 or mean is None:
        return judged
    error = math.sqrt(max(variance, judged.least_sd**2) / n_seeds)
    effect = t_interval(mean, error, float(df), judged.effect.n)
    return replace(judged, effect=with_extra_variances(effect, judged.extra_variances))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, None where there is no p: rejecting those <= 0.05 errs once or more in at most 5% of
    families."""
    p_at = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted, largest = list[float | None]([None] * len(p_values)), 0.0
    for rank, (p, i) in enumerate(p_at):
        adjusted[i] = largest = max(largest, min(1.0, (len(p_at) - rank) * p))
    return adjusted


def correct(family: Sequence[J]) -> list[J]:
    """The same effects, each with Holm's p over all of them that have a p-value."""
    p_holm = holm([judged.effect.p for judged in family])
    n_tested = max(sum(p is not None for p in p_holm), 1)
    return [replace(judged, p_holm=p, n_tested=n_tested) for judged, p in zip(family, p_holm, strict=True)]


def floor_of(noise: float, df: float, n_seeds: int, least_sd: float) -> float:
    """The smallest difference of two means over seeds that exceeds a noise of df degrees of freedom."""
    return float(stdtrit(df, 0.975)) * max(noise * math.sqrt(2), least_sd) / math.sqrt(n_seeds)


def check_shared_baselines(family: Sequence[J], knobs: Sequence[str]) -> list[J]:
    """The same corrected effects at one depth, with verdicts withheld that a badly tuned baseline may explain; `knobs`
    holds the knob of each.

    A baseline whose tuned value was badly chosen puts all settings on one side of it. With m the median over J
    contrasts of effect minus expected regret, v the variance from choosing the baseline's value, and e^2 their other
    variance, or the variance among them if that is larger, the part of m that the choice explains is expected to be
    m v / (v + pi e^2 / 2J). It takes three knobs: the settings of one, such as depth, may well lie on one side.
    """
    sharing = defaultdict[tuple[str, ...], list[Judged]](list)
    knobs_of = defaultdict[tuple[str, ...], set[str]](set)
    for judged, knob in zip(family, knobs, strict=True):
        if (shared := _baseline_variance(judged)) and judged.effect.error is not None:
            sharing[shared.baseline].append(judged)
            knobs_of[shared.baseline].add(knob)
    return [
        _check_against_median(judged, sharing[shared.baseline], shared.variance)
        if (shared := _baseline_variance(judged)) and len(knobs_of[shared.baseline]) >= 3
        else judged
        for judged in family
    ]


def _baseline_variance(judged: Judged) -> ExtraVariance | None:
    return next((term for term in judged.extra_variances if term.baseline), None)


def _check_against_median(judged: J, sharing: Sequence[Judged], variance: float) -> J:
    """`sharing`: all contrasts with this baseline; `variance`: that of choosing its value."""
    effect_J = np.array([(other.effect.mean or 0.0) - other.expected_regret for other in sharing])
    errors = [(other.effect.error or 0.0) ** 2 for other in sharing]
    other_variance = max(float(np.mean(errors)) - variance, effect_J.var(ddof=1))
    median = float(np.median(effect_J))
    share = variance / (variance + math.pi / 2 * other_variance / len(sharing))
    reason = (
        f"the {len(sharing)} settings differ from this baseline by {median:+.3g} (median), which may be badly tuned"
    )
    checked = replace(judged, expected_regret=judged.expected_regret + median * share, tuning_ambiguity=reason)
    return checked if checked.verdict_blocked_by and not judged.verdict_blocked_by else judged
