"""What a setting is worth in compute, from one run at each of several budgets: a ladder.

The law is that of `multiplier`, with the setting's drift: ln m + d x. Without seeds the noise is what the law leaves of
the differences from the baseline at equal budgets; a bend of the law that both sides share is none of it. For a drift
each row has at least the variance of its own residual, r^2 / (1 - leverage) (HC2: MacKinnon and White 1985). Which form
the law of the baseline has is not known, so each interval is that of a mixture of Student's distributions, of

    L_inf + exp(a - alpha x)      exp(a - alpha x)      exp(a - alpha x + q x^2)

weighted by exp(-BIC / 2) of the baseline's runs. A pinned L_inf leaves the first alone. The noise of several settings
is drawn to a prior (limma: Smyth 2004, section 6.2). A difference is shown where the pair (ln m, d) differs from 0, by
F, and its worth does: at all budgets, or at the largest where it drifts.

Shapes: N cells (side, budget), P parameters (shape 3, ln m, d), B budgets of the setting, G forms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, fdtrc, polygamma

from sparsedepth.effects.verdict import Distribution
from sparsedepth.quantities.levels import ALPHA
from sparsedepth.scaling.multiplier import (
    STARTS,
    FittedLaw,
    Ladder,
    Shape,
    Worth,
    ladder_of,
    offset_law,
    parabola,
    solve,
    start_of,
)

BEYOND = 4.0
"""Times the largest budget, at which a worth is extrapolated."""
SHARED = 0.5
"""The baseline's share of the variance of a difference."""
MIN_POOLED = 3
"""Settings whose noise is drawn to a prior."""
UNBOUNDED = 1e6
"""d0 of variances that do not differ."""
LEAST_SPARE = 0.05
"""Of a row: 1 less its leverage."""
ROUNDING = 1e-7
"""Of ln L: losses are written with about this relative precision at best, and noise is not less."""


class Prior(NamedTuple):
    """What the noise of other settings says of one's own."""

    df: float
    variance: float
    most: float
    """Degrees of freedom of all together."""


class FormFit(NamedTuple):
    """A form of the law, with the multiplier shared and with drift."""

    steady: FittedLaw
    drifting: FittedLaw


@dataclass(frozen=True, kw_only=True, eq=False)
class LadderLaw:
    ladder: Ladder
    fits: Sequence[FormFit]
    prior: Prior | None = None

    @cached_property
    def weight_G(self) -> np.ndarray:
        """Of the forms, by the runs of the baseline."""
        baseline_N = ~self.ladder.is_setting_N
        n = int(baseline_N.sum())
        square_G = np.array([(fit.steady.residual_N[baseline_N] ** 2).sum() for fit in self.fits])
        n_free_G = np.array([fit.steady.free_P[:3].sum() for fit in self.fits])
        spare_G = n - n_free_G
        known = spare_G > 0
        of_baseline = (square_G[known] / spare_G[known]).min() if known.any() else 0.0
        variance = max(of_baseline, min(self._noise(fit.steady)[0] for fit in self.fits) / 2)
        log_G = -(square_G / variance + n_free_G * np.log(n)) / 2
        weight_G = np.exp(log_G - log_G.max())
        return weight_G / weight_G.sum()

    @property
    def log_m(self) -> float:
        """The same at every budget; `worth` without its interval."""
        return float(self.weight_G @ [fit.steady.theta_P[3] for fit in self.fits])

    @cached_property
    def worth(self) -> Distribution | None:
        """ln m, the same at every budget; None where nothing is left to judge by."""
        return self._of([fit.steady for fit in self.fits], np.array([0.0, 0.0, 0.0, 1.0]))

    @cached_property
    def drift(self) -> Distribution | None:
        """d, per e-fold of compute."""
        return self._of([fit.drifting for fit in self.fits], np.array([0.0, 0.0, 0.0, 0.0, 1.0]))

    def worth_at(self, C: float) -> Distribution | None:
        """ln m + d x at a budget [FLOPs], with its drift whether it is shown or not."""
        x = np.log(C) - self.ladder.middle
        return self._of([fit.drifting for fit in self.fits], np.array([0.0, 0.0, 0.0, 1.0, x]))

    @cached_property
    def has_drift(self) -> bool:
        return self.drift is not None and self.drift.p < ALPHA

    @cached_property
    def _pair_G(self) -> list[tuple[np.ndarray, np.ndarray, float]]:
        """Of each form (ln m, d), the inverse of its covariance, and degrees of freedom; none with too few budgets."""
        fits = [] if self.drift is None else [fit.drifting for fit in self.fits]
        return [(fit.theta_P[3:], np.linalg.inv(self._covariance(fit)[3:, 3:]), self._noise(fit)[1]) for fit in fits]

    def p(self, by: float = 0.0) -> float:
        """Of no difference: of (ln m, d) = 0, by F, and of what it is judged by; `by`: with ln m larger by this."""
        found = self.judged_by
        if found is None:
            return 1.0
        moved = [(theta_X + np.array([by, 0.0]), inverse_XX, df) for theta_X, inverse_XX, df in self._pair_G]
        p_G = [fdtrc(2, df, theta_X @ inverse_XX @ theta_X / 2) for theta_X, inverse_XX, df in moved]
        return max(replace(found, mean_G=found.mean_G + by).p, float(self.weight_G @ p_G) if p_G else 0.0)

    @property
    def at_largest(self) -> Distribution | None:
        return self.worth_at(float(self.ladder.C_N[self.ladder.is_setting_N].max()))

    @property
    def judged_by(self) -> Distribution | None:
        """What a verdict is on: the worth at every budget, or at the largest where it drifts."""
        return self.at_largest if self.has_drift else self.worth

    def least_shown(self, level: float) -> float:
        """The ln m from which these runs would show a gain: where p is `level`, with their drift and noise."""
        assert self.judged_by is not None
        middle, high = self.judged_by.estimate, self.judged_by.sd
        while self.p(high - middle) > level:
            high *= 2
        return brentq(lambda log_m: self.p(log_m - middle) - level, 0.0, high, rtol=1e-3)

    def difference(self, log_m: float, C: float) -> float:
        """Of losses [nat/token] at a budget, for a worth there."""
        x_N = np.array([0.0, log_m]) + np.log(C) - self.ladder.middle
        loss_GN = np.exp([fit.steady.law(fit.steady.theta_P[:3], x_N)[0] for fit in self.fits])
        before, after = self.weight_G @ loss_GN
        return float(after - before)

    def baseline_at(self, C_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The baseline's loss by the law, and the half-width of its 95% band in ln L."""
        x_N = np.log(C_N) - self.ladder.middle
        fits = [fit.steady for fit in self.fits]
        parts = [fit.law(fit.theta_P[:3], x_N) for fit in fits]
        variances = [
            ((by_NX @ self._covariance(fit)[:3, :3]) * by_NX).sum(axis=1)
            for fit, (_, _, by_NX) in zip(fits, parts, strict=True)
        ]
        df_G = np.full(len(fits), max(1.0, self._noise(fits[0])[1]))
        bands = [
            _worth(Distribution(mean_G, np.maximum(sd_G, ROUNDING), df_G, self.weight_G, 1.0))
            for mean_G, sd_G in zip(np.array([part[0] for part in parts]).T, np.sqrt(variances).T, strict=True)
        ]
        middle_N, half_N = np.array(bands).T
        return np.exp(middle_N), half_N

    @property
    def left(self) -> tuple[float, float]:
        """The variance of ln L that the likeliest form leaves of the differences, with a drift where there is room for
        one, and its degrees of freedom: what a `Prior` is made from."""
        fit = self.fits[int(self.weight_G.argmax())]
        drifting = self._noise(fit.drifting)
        return drifting if drifting[1] >= 1 else self._noise(fit.steady)

    def _noise(self, fit: FittedLaw) -> tuple[float, float]:
        """The variance of a setting's row about the law, and its degrees of freedom: 0 where nothing is left."""
        setting_N = self.ladder.is_setting_N
        df = float(setting_N.sum() - (len(fit.theta_P) - 3))
        square = float((fit.residual_N[setting_N] ** 2).sum())
        if self.prior is None:
            return max(square / max(df, 1.0), ROUNDING**2), df
        total = self.prior.df + df
        return (self.prior.df * self.prior.variance + square) / total, min(total, self.prior.most)

    def _covariance(self, fit: FittedLaw) -> np.ndarray:
        """Of the parameters, (P, P)."""
        baseline_N = ~self.ladder.is_setting_N
        variance, _ = self._noise(fit)
        spare = baseline_N.sum() - fit.free_P[:3].sum()
        of_baseline = float((fit.residual_N[baseline_N] ** 2).sum()) / max(spare, 1)
        variance_N = np.where(baseline_N, max(of_baseline, variance / 2), variance)
        if len(fit.theta_P) > 4:  # a drift hangs on the ends, where a law fits worst: none is less noisy than it looks
            leverage_N = (fit.jacobian_NP * fit.by_row_PN.T).sum(axis=1)
            variance_N = np.maximum(variance_N, fit.residual_N**2 / np.maximum(1 - leverage_N, LEAST_SPARE))
        return (fit.by_row_PN * variance_N) @ fit.by_row_PN.T

    def _of(self, fits: Sequence[FittedLaw], combination_P: np.ndarray) -> Distribution | None:
        noise = [self._noise(fit) for fit in fits]
        if min(df for _, df in noise) < 1 or len(combination_P) != len(fits[0].theta_P):
            return None
        mean_G = np.array([combination_P @ fit.theta_P for fit in fits])
        sd_G = np.sqrt([combination_P @ self._covariance(fit) @ combination_P for fit in fits])
        return Distribution(mean_G, sd_G, np.array([df for _, df in noise]), self.weight_G, seeds_share=1.0)


def laws_of(
    losses: Mapping[str, Mapping[float, Mapping[int, float]]], baseline: str, asymptote: float | None = None
) -> dict[str, LadderLaw]:
    """The law of each setting that has a run, from setting -> budget [FLOPs] -> run -> loss, the noise of MIN_POOLED or
    more drawn to that of all. Raises ValueError as `law_of_ladder`."""
    ladders = {}
    for name, own in losses.items():
        cells = {(False, C): of for C, of in losses[baseline].items()} | {(True, C): of for C, of in own.items()}
        if name != baseline and (ladder := ladder_of(cells, {})) is not None:
            ladders[name] = ladder
    laws = {name: law_of_ladder(ladder, asymptote) for name, ladder in ladders.items()}
    known = np.array([(variance, df) for law in laws.values() for variance, df in [law.left] if df >= 1])
    if len(known) < MIN_POOLED:
        return laws
    d0, variance = prior_of(*known.T)
    prior = Prior(df=d0, variance=variance, most=float(known[:, 1].sum()))
    return {name: replace(law, prior=prior) for name, law in laws.items()}


def law_of_ladder(ladder: Ladder, asymptote: float | None = None) -> LadderLaw:
    """`asymptote`: L_inf [nat/token], pinned. Raises ValueError for one that is not below every loss."""
    lowest = float(np.exp(ladder.mean_N.min()))
    if asymptote is not None and not 0 <= asymptote < lowest:
        told = f"the asymptote {asymptote:g} is not between 0 and the lowest loss, {lowest:.4g}"
        raise ValueError(f"{told}; leave it out, and it is fitted")
    has_drift = int(ladder.is_setting_N.sum()) > 2
    pairs = []
    for starts, law, is_first_free in _forms(lowest, asymptote):
        free_P = np.array([is_first_free, True, True, True, True])
        found = [
            [solve(ladder, start_of(ladder, share, n), free_P[:n], law) for share in starts]
            for n in (4, 5 if has_drift else 4)
        ]
        within = [[each for each in of if each.is_within(lowest)] for of in found]
        if all(within):
            pairs.append(FormFit(*(min(of, key=lambda each: each.cost) for of in within)))
    return LadderLaw(ladder=ladder, fits=pairs)


def _forms(lowest: float, asymptote: float | None) -> list[tuple[Sequence[float], Shape, bool]]:
    """Starts, the law, and whether its first parameter is free."""
    if asymptote is not None:
        return [((asymptote / lowest,), offset_law, False)]
    return [(STARTS[1:], offset_law, True), ((0.0,), offset_law, False), ((0.0,), parabola, True)]


def _worth(found: Distribution) -> Worth:
    lo, hi = found.interval
    return Worth(found.estimate, (hi - lo) / 2)


def prior_of(s2_C: np.ndarray, df_C: np.ndarray) -> tuple[float, float]:
    """d0 and s0^2, which give the logarithms of variances the mean and the spread that they have."""
    if len(s2_C) == 1:
        return UNBOUNDED, float(s2_C[0])
    log_C = np.log(s2_C) - digamma(df_C / 2) + np.log(df_C / 2)
    spread = log_C.var(ddof=1) - polygamma(1, df_C / 2).mean()
    d0 = UNBOUNDED
    if spread > polygamma(1, UNBOUNDED / 2):
        d0 = brentq(lambda d0: polygamma(1, d0 / 2) - spread, 1e-3, UNBOUNDED)
    return d0, float(np.exp(log_C.mean() + digamma(d0 / 2) - np.log(d0 / 2)))
