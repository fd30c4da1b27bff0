"""What a setting is worth in compute: one law of loss against compute for a baseline and a setting, at all budgets.

    ln L = law(x + ln m + d x),   x = ln C less its mean;   ln m = d = 0 at the baseline

m: the baseline needs m times its compute for the setting's loss; d: its drift, 0 unless it is shown. Fitted to the rows
of `scaling.ladder`, as what a budget does to both sides is no gain. Each number has Student's distribution, with the
covariance of the rows:

- by seeds: that of the means over seeds (branches of a trunk share its seed), and the choice of lr: on each side the
  larger of |sum weight sd| and sqrt(sum (weight sd)^2), as budgets may be moved alike or apart. The law is tested by
  what no parameter moves (Bonferroni); where it is rejected, each budget has the slope to the next one instead;
- of a ladder, one run at each budget: what the law leaves of the differences. For a drift each row has at least the
  variance of its own residual, r^2 / (1 - leverage) (HC2: MacKinnon and White 1985). Which form the law has is not
  known: a mixture of L_inf + exp(a - alpha x), exp(a - alpha x), exp(a - alpha x + q x^2), weighted by exp(-BIC / 2) of
  the baseline's runs. The noise of several settings is drawn to a prior (limma: Smyth 2004, section 6.2). A difference
  is shown where (ln m, d) differs from 0, by F, and its worth does: at all budgets, or the largest where it drifts.

Shapes: N cells (side, budget), P parameters (shape 3, ln m, d), G forms, M parts of the rows that none moves."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, fdtrc, polygamma

from sparsedepth.effects.verdict import Distribution
from sparsedepth.quantities.levels import ALPHA
from sparsedepth.scaling.ladder import Ladder, Losses, ladder_of
from sparsedepth.scaling.nonlinear import Solved, power_law, solve
from sparsedepth.store.small_sample import Z, t_critical

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
WORTH = np.array([0.0, 0.0, 0.0, 1.0])

Shape = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""ln L from three parameters and effective x, its derivative by x, and by the three, (N, 3)."""


def offset_law(shape_X: np.ndarray, x_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ln (L_inf + exp(a - alpha x)), from (L_inf, a, alpha)."""
    loss_N, by_NX = power_law(shape_X, x_N[None])
    loss_N = np.maximum(loss_N, 1e-12)
    return np.log(loss_N), -shape_X[2] * by_NX[:, 1] / loss_N, by_NX / loss_N[:, None]


def parabola(shape_X: np.ndarray, x_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a - alpha x + q x^2, from (q, a, alpha)."""
    q, a, alpha = shape_X
    return a - alpha * x_N + q * x_N**2, 2 * q * x_N - alpha, np.stack([x_N**2, np.ones_like(x_N), -x_N], axis=1)


Form = tuple[Shape, Sequence[tuple[float, bool]]]
"""The law, and starts of L_inf, as shares of the lowest loss, with whether the first parameter is free."""
OFFSET_LAW: Form = (offset_law, ((0.3, True), (0.6, True), (0.85, True)))
POWER_LAW: Form = (offset_law, ((0.0, False),))


class Prior(NamedTuple):
    """What the noise of other settings says of one's own."""

    df: float
    variance: float
    most: float
    """Degrees of freedom of all together."""


class FormFit(NamedTuple):
    """A form of the law, with the multiplier shared and with drift."""

    law: Shape
    steady: Solved
    drifting: Solved


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiplierLaw:
    ladder: Ladder
    by_seeds: bool
    """Else of a ladder: independent runs, one at each budget."""
    fits: Sequence[FormFit]
    prior: Prior | None = None

    @cached_property
    def weight_G(self) -> np.ndarray:
        """Of the forms, by the runs of the baseline."""
        baseline_N = ~self.ladder.is_setting_N
        n = int(baseline_N.sum())
        square_G = np.array([(fit.steady.residual_N[baseline_N] ** 2).sum() for fit in self.fits])
        n_free_G = np.array([fit.steady.free_P[:3].sum() for fit in self.fits])
        known = n_free_G < n
        of_baseline = (square_G[known] / (n - n_free_G[known])).min() if known.any() else 0.0
        variance = max(of_baseline, min(self._noise(fit.steady)[0] for fit in self.fits) / 2)
        log_G = -(square_G / variance + n_free_G * np.log(n)) / 2
        weight_G = np.exp(log_G - log_G.max())
        return weight_G / weight_G.sum()

    @property
    def log_m(self) -> float:
        """The same at every budget; `worth` without its interval."""
        return self.weight_G @ [fit.steady.theta_P[3] for fit in self.fits]

    @cached_property
    def worth(self) -> Distribution | None:
        """ln m, the same at every budget; None where nothing is left to judge by."""
        return self._of([fit.steady for fit in self.fits], WORTH)

    @cached_property
    def drift(self) -> Distribution | None:
        """d, per e-fold of compute."""
        return self._of([fit.drifting for fit in self.fits], np.eye(5)[4])

    def worth_at(self, C: float) -> Distribution | None:
        """ln m + d x at a budget [FLOPs], with its drift whether it is shown or not."""
        return self._of([fit.drifting for fit in self.fits], np.array([*WORTH, np.log(C) - self.ladder.middle]))

    @cached_property
    def has_drift(self) -> bool:
        return self.drift is not None and self.drift.p < ALPHA

    @cached_property
    def p_misfit(self) -> float | None:
        """Of the law, by seeds: the least p of the parts that no parameter moves, times their number; None without
        such a part, or seeds."""
        fit = self.fits[0].drifting
        n_free = int(fit.free_P.sum())
        rest_MN = np.linalg.svd(fit.jacobian_NP[:, fit.free_P], full_matrices=True)[0][:, n_free:].T
        parts = [self._by_rows([fit], [row_N], [row_N @ fit.residual_N]) for row_N in rest_MN] if self.by_seeds else []
        p_M = [part.p for part in parts if part is not None]
        return min(1.0, min(p_M) * len(p_M)) if p_M else None

    @property
    def is_rejected(self) -> bool:
        return self.p_misfit is not None and self.p_misfit < ALPHA

    def found_at(self, C: float) -> Distribution | None:
        """What the setting is said to be worth at a budget of its own: the same at all, unless a drift is shown, or
        the law is rejected."""
        if self.is_rejected:
            setting_N = self.ladder.is_setting_N
            return self._by_slope(int(np.flatnonzero(setting_N)[self.ladder.C_N[setting_N] == C][0]))
        return self.worth_at(C) if self.has_drift else self.worth

    @cached_property
    def _inverse_G(self) -> list[np.ndarray]:
        """Of each form the inverse of the covariance of (ln m, d)."""
        return [np.linalg.inv(self._covariance(fit.drifting)[3:, 3:]) for fit in self.fits]

    def p(self, by: float = 0.0) -> float:
        """Of no difference: of (ln m, d) = 0, by F, and of what it is judged by; `by`: with ln m larger by this."""
        if (found := self.judged_by) is None:
            return 1.0
        p = replace(found, mean_G=found.mean_G + by).p
        if self.drift is None:
            return p
        pair_G = [fit.drifting.theta_P[3:] + np.array([by, 0.0]) for fit in self.fits]
        F_G = [pair @ inverse @ pair / 2 for pair, inverse in zip(pair_G, self._inverse_G, strict=True)]
        return max(p, self.weight_G @ fdtrc(2, self.drift.df_G, F_G))

    @property
    def judged_by(self) -> Distribution | None:
        """What a verdict is on: the worth at every budget, or at the largest where it drifts."""
        largest = self.ladder.C_N[self.ladder.is_setting_N].max()
        return self.worth_at(largest) if self.has_drift else self.worth

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
        before, after = self.weight_G @ np.exp([fit.law(fit.steady.theta_P[:3], x_N)[0] for fit in self.fits])
        return after - before

    def baseline_at(self, C_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The baseline's loss by the law, and the half-width of its 95% band in ln L."""
        x_N, fits = np.log(C_N) - self.ladder.middle, [fit.steady for fit in self.fits]
        mean_GN, _, by_GNX = zip(*(fit.law(fit.steady.theta_P[:3], x_N) for fit in self.fits), strict=True)
        of_GXX = np.array([self._covariance(fit)[:3, :3] for fit in fits])
        sd_GN = np.maximum(np.sqrt(np.einsum("gnx,gxy,gny->gn", by_GNX, of_GXX, by_GNX)), ROUNDING)
        df_G = np.full(len(fits), max(1.0, self._noise(fits[0])[1]))
        at_N = [
            Distribution(mean_G, sd_G, df_G, self.weight_G, 1.0)
            for mean_G, sd_G in zip(np.transpose(mean_GN), sd_GN.T, strict=True)
        ]
        return np.exp([at.estimate for at in at_N]), np.array([np.ptp(at.interval) / 2 for at in at_N])

    @property
    def left(self) -> tuple[float, float]:
        """The variance of ln L that the likeliest form leaves of the differences, with a drift where there is room for
        one, and its degrees of freedom: what a `Prior` is made from."""
        fit = self.fits[int(self.weight_G.argmax())]
        drifting = self._noise(fit.drifting)
        return drifting if drifting[1] >= 1 else self._noise(fit.steady)

    def _noise(self, fit: Solved) -> tuple[float, float]:
        """The variance of a setting's row about the law, and the degrees of freedom of the noise: 0 where nothing is
        left, or there is one seed."""
        setting_N = self.ladder.is_setting_N
        df = float(self.ladder.n_seeds - 1 if self.by_seeds else setting_N.sum() - (len(fit.theta_P) - 3))
        square = (fit.residual_N[setting_N] ** 2).sum()
        if self.prior is None:
            return max(square / max(df, 1.0), ROUNDING**2), df
        total = self.prior.df + df
        return (self.prior.df * self.prior.variance + square) / total, min(total, self.prior.most)

    @cached_property
    def _of_seeds(self) -> np.ndarray:
        """The covariance of the rows' means over seeds, (N, N)."""
        return np.atleast_2d(np.cov(self.ladder.rows(self.ladder.log_loss_SN).T)) / self.ladder.n_seeds

    def _of_rows(self, fit: Solved) -> np.ndarray:
        """The covariance of the rows, (N, N)."""
        if self.by_seeds:
            return self._of_seeds
        baseline_N = ~self.ladder.is_setting_N
        variance, _ = self._noise(fit)
        spare = baseline_N.sum() - fit.free_P[:3].sum()
        of_baseline = (fit.residual_N[baseline_N] ** 2).sum() / max(spare, 1)
        variance_N = np.where(baseline_N, max(of_baseline, variance / 2), variance)
        if len(fit.theta_P) > 4:  # a drift hangs on the ends, where a law fits worst: none is less noisy than it looks
            leverage_N = (fit.jacobian_NP * fit.by_row_PN.T).sum(axis=1)
            variance_N = np.maximum(variance_N, fit.residual_N**2 / np.maximum(1 - leverage_N, LEAST_SPARE))
        return np.diag(variance_N)

    def _covariance(self, fit: Solved) -> np.ndarray:
        """Of the parameters, (P, P)."""
        return fit.by_row_PN @ self._of_rows(fit) @ fit.by_row_PN.T

    def _of(self, fits: Sequence[Solved], combination_P: np.ndarray) -> Distribution | None:
        """Of a combination of the parameters; None where the law lacks one of them."""
        if len(combination_P) != len(fits[0].theta_P):
            return None
        rows = [combination_P @ fit.by_row_PN for fit in fits]
        return self._by_rows(fits, rows, [float(combination_P @ fit.theta_P) for fit in fits])

    def _by_rows(
        self, fits: Sequence[Solved], row_GN: Sequence[np.ndarray], mean_G: Sequence[float]
    ) -> Distribution | None:
        """Of numbers that are these combinations of the rows, to first order; None without noise to judge by."""
        df_G = np.array([self._noise(fit)[1] for fit in fits])
        if df_G.min() < 1:
            return None
        sd_G = np.sqrt([row_N @ self._of_rows(fit) @ row_N for row_N, fit in zip(row_GN, fits, strict=True)])
        if self.by_seeds:
            moved_N = row_GN[0] * self.ladder.lr_sd_N
            sides = moved_N[self.ladder.is_setting_N], moved_N[~self.ladder.is_setting_N]
            by_lr = math.hypot(*(max(abs(side.sum()), np.linalg.norm(side)) for side in sides))
            sd_G = np.hypot(np.maximum(sd_G, ROUNDING), by_lr * Z / t_critical(self.ladder.n_seeds - 1))
        return Distribution(np.array(mean_G), sd_G, df_G, self.weight_G, seeds_share=1.0)

    def _by_slope(self, setting: int) -> Distribution | None:
        """By a power law of the baseline's nearest budget and the next one, or the one before."""
        x_N, y_N = self.ladder.x_N, self.ladder.mean_N
        baseline = sorted(np.flatnonzero(~self.ladder.is_setting_N), key=lambda cell: x_N[cell])
        place = int(np.abs(x_N[baseline] - x_N[setting]).argmin())
        is_gain = y_N[setting] < y_N[baseline[place]] and place + 1 < len(baseline)
        far = baseline[place + 1 if is_gain or place == 0 else place - 1]
        ladder = self.ladder.only([baseline[place], far, setting])
        return MultiplierLaw(ladder=ladder, by_seeds=True, fits=_fits(ladder, [POWER_LAW], math.inf)).worth


def law_by_seeds(ladder: Ladder) -> MultiplierLaw:
    """With L_inf of 0 or above."""
    form = (offset_law, (*POWER_LAW[1], *OFFSET_LAW[1]))
    return MultiplierLaw(ladder=ladder, by_seeds=True, fits=_fits(ladder, [form], least_for_drift=2))


def law_of_ladder(ladder: Ladder, asymptote: float | None = None) -> MultiplierLaw:
    """`asymptote`: L_inf [nat/token], pinned, which leaves the first form alone. Raises ValueError for one that is not
    below every loss."""
    least = np.exp(ladder.mean_N.min())
    forms: Sequence[Form] = (OFFSET_LAW, POWER_LAW, (parabola, ((0.0, True),)))
    if asymptote is not None:
        if not 0 <= asymptote < least:
            told = f"the asymptote {asymptote:g} is not between 0 and the lowest loss, {least:.4g}"
            raise ValueError(f"{told}; leave it out, and it is fitted")
        forms = [(offset_law, ((asymptote / least, False),))]
    return MultiplierLaw(ladder=ladder, by_seeds=False, fits=_fits(ladder, forms, least_for_drift=3))


def _fits(ladder: Ladder, forms: Sequence[Form], least_for_drift: float) -> list[FormFit]:
    """Those that have a fit. `least_for_drift`: budgets of the setting."""
    y_N, found = ladder.mean_N, []
    least = np.exp(y_N.min())
    for law, starts in forms:
        best: list[Solved] = []
        for n in (4, 5 if ladder.is_setting_N.sum() >= least_for_drift else 4):
            ends = [
                solve(partial(_at, ladder, law), ladder.rows(y_N), _start(ladder, share * least, n), free_P)
                for share, is_first_free in starts
                for free_P in [np.array([is_first_free, *[True] * (n - 1)])]
            ]
            within = [end for end in ends if law is parabola or 0 <= end.theta_P[0] < least]
            best += sorted(within, key=lambda end: end.cost)[:1]
        if len(best) == 2:
            found.append(FormFit(law, *best))
    return found


def _at(ladder: Ladder, law: Shape, theta_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows by the law, and their derivatives, (N, P)."""
    log_m, *d = theta_P[3:]
    x_N, setting_N = ladder.x_N, ladder.is_setting_N.astype(float)
    log_loss_N, by_x_N, by_shape_NX = law(theta_P[:3], x_N + setting_N * (log_m + sum(d) * x_N))
    by_m_N = by_x_N * setting_N
    return ladder.rows(log_loss_N), ladder.rows(np.stack([*by_shape_NX.T, by_m_N, *(by_m_N * x_N for _ in d)])).T


def _start(ladder: Ladder, L_inf: float, n: int) -> np.ndarray:
    """n parameters of a setting that is worth nothing."""
    baseline_N = ~ladder.is_setting_N
    slope, level = np.polyfit(ladder.x_N[baseline_N], np.log(np.exp(ladder.mean_N[baseline_N]) - L_inf), 1)
    return np.array([L_inf, level, max(-slope, 0.01), *[0.0] * (n - 3)])


def laws_of(losses: Mapping[str, Losses], baseline: str, asymptote: float | None = None) -> dict[str, MultiplierLaw]:
    """The law of each setting that has a run, from setting -> budget [FLOPs] -> run -> loss, the noise of MIN_POOLED or
    more drawn to that of all. Raises ValueError as `law_of_ladder`."""
    laws = {}
    for name, own in losses.items():
        cells = {(False, C): of for C, of in losses[baseline].items()} | {(True, C): of for C, of in own.items()}
        if name != baseline and (ladder := ladder_of(cells, {})) is not None:
            laws[name] = law_of_ladder(ladder, asymptote)
    known = np.array([(variance, df) for law in laws.values() for variance, df in [law.left] if df >= 1])
    if len(known) < MIN_POOLED:
        return laws
    d0, variance = prior_of(*known.T)
    prior = Prior(df=d0, variance=variance, most=known[:, 1].sum())
    return {name: replace(law, prior=prior) for name, law in laws.items()}


def prior_of(s2_C: np.ndarray, df_C: np.ndarray) -> tuple[float, float]:
    """d0 and s0^2, which give the logarithms of variances the mean and the spread that they have."""
    if len(s2_C) == 1:
        return UNBOUNDED, s2_C[0]
    log_C = np.log(s2_C) - digamma(df_C / 2) + np.log(df_C / 2)
    spread = log_C.var(ddof=1) - polygamma(1, df_C / 2).mean()
    d0 = UNBOUNDED
    if spread > polygamma(1, UNBOUNDED / 2):
        d0 = brentq(lambda d0: polygamma(1, d0 / 2) - spread, 1e-3, UNBOUNDED)
    return d0, np.exp(log_C.mean() + digamma(d0 / 2) - np.log(d0 / 2))
