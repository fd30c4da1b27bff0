"""The optimum of a tuned field, and what tuning by few seeds adds to the error of the loss.

For each configuration, over the values x_i = ln lr_i within two steps of the chosen x_b (finite means only), by least
squares on the means over tuning seeds:

    y_i = a + b u_i + (k/2) u_i^2 + r_i + e_i,    u_i = x_i - x_b        optimum u* = -b / k, within a step of x_b

r: roughness, the deviation of a value from the smooth curve that all its seeds share; e: seed noise, s^2/S. A curve of
four or more values has its own k; one of three takes the common k of all curves. Over all curves of a sweep

    var(r): restricted maximum likelihood, of the means over all runs at each value, whose error is known:
            s^2 over values x seeds of the tuning, less both means, and w^2 of each seed, which all values share

The means that chose a value are optimistic for it; fresh runs, with seeds not used in the choice, correct that. The
effect of a seed that all curves share is subtracted first.

The *regret* of the chosen value (`tuning_excess`) is the excess of its loss over the lowest point of the smooth curve
within a step,

    D = r_b - min over |u| <= step of (b u + (k/2) u^2)

and its distribution is the posterior given all runs at these values, results included: with k_0 the common curvature
and h the step, b has the prior N(0, (k_0 h)^2), k N(k_0, (k_0 / 2)^2), r N(0, var(r)), and a value's mean the error of
its runs. A regret common to all configurations cancels in an effect, so that what each side adds to its mean square is

    variance = var(D) + (mean(D) - its mean over the n curves)^2 n / (n - 1)

With one tuning seed, s^2 is estimated from the fresh seeds at one value; without these it remains in var(r).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsedepth.store.small_sample import t_critical

STEPS = 2
"""Values to each side of the chosen one in the fit: further ones diverge, or have another curvature."""
DRAWS = 2000
MIN_PROBABILITY = 0.05
"""Posterior probability from which on another value may be better than the chosen one."""
MAX_HALF_WIDTH = math.log(10)
"""Largest half-width of the 95% interval of a reported optimum."""


@dataclass(frozen=True, kw_only=True)
class TuningCurve:
    """The losses of one configuration along one tuned field, with the others at their best values."""

    values: np.ndarray
    """ln of the values tried, ascending, (K,)"""
    losses: np.ndarray
    """by value and tuning seed, (K, S); inf where a run diverged"""
    chosen: int
    fresh: np.ndarray | None = None
    """by value and seed not used in the choice, the same F in all curves, (K, F); NaN where not run, or diverged"""


@dataclass(frozen=True, kw_only=True)
class CurveShape:
    """The optimum of a curve, and the error of tuning."""

    optimum: float | None
    """ln of the best value; None where it is not known within a factor of ten"""
    half_width: float | None
    """of its 95% interval"""
    variance: float | None
    """added to the mean loss by choosing the value; None where it cannot be estimated"""
    df: float
    expected_regret: float = 0.0
    """of the chosen value; `variance` counts only its deviation from the mean regret of all curves"""
    indistinguishable_values: tuple[float, ...] = ()
    """ln of the values next to the chosen one that may be better"""


@dataclass(frozen=True, kw_only=True)
class _Near:
    """The part of a curve near the chosen value."""

    away: np.ndarray
    """ln(value / chosen value), (K,)"""
    means: np.ndarray
    """over the tuning seeds, (K,)"""
    step: float
    """to the next value, the larger of both sides"""
    runs: np.ndarray
    """losses by value and seed, tuning seeds first, (K, S + F); NaN where missing"""

    @property
    def design(self) -> np.ndarray:
        """Columns of level, slope and curvature, (K, 3)"""
        return np.stack([np.ones_like(self.away), self.away, self.away**2 / 2], axis=1)

    @property
    def count(self) -> np.ndarray:
        """Number of runs at each value, (K,)"""
        return np.isfinite(self.runs).sum(axis=1)

    @property
    def all_means(self) -> np.ndarray:
        """Mean loss over all runs at each value, (K,)"""
        return np.nansum(self.runs, axis=1) / self.count


def curve_shapes(curves: Sequence[TuningCurve]) -> list[CurveShape]:
    """The optimum and the regret of the chosen value for each curve of a sweep, with a common roughness."""
    curves = _without_seeds(curves, _seed_noise(curves)[0])
    near = [_near(curve) for curve in curves]
    curvature = _common_curvature([part for part in near if len(part.away) >= 3])
    fits = [_fit(part, curvature) for part in near]
    df = sum(fit.df for fit in fits) - any(len(part.away) == 3 for part in near)
    if df < 1:
        return [CurveShape(optimum=None, half_width=None, variance=None, df=0) for _ in curves]
    spread = sum(fit.squares for fit in fits) / df
    noise, noise_df, shared = _seed_noise(curves)
    rough, error, half_variance = _roughness(near, curvature, noise, shared)
    half_variance += error**2 / noise_df if noise_df else 0.0
    roughness = _Roughness(
        variance=rough, spread=spread, noise=noise, shared=shared, df=df,
        variance_df=max(1.0, rough**2 / half_variance) if rough else df,
    )  # fmt: skip
    regrets = [_regret(part, max(curvature, 0.0), roughness) for part in near]
    means = np.array([regret.mean for regret in regrets])
    deviations = (means - means.mean()) ** 2 * len(means) / max(len(means) - 1, 1)
    chosen = [float(curve.values[curve.chosen]) for curve in curves]
    return [
        _shape(part, fit, roughness, regret, float(deviation), value)
        for part, fit, regret, deviation, value in zip(near, fits, regrets, deviations, chosen, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Roughness:
    """The variances that the curves of a sweep have in common."""

    variance: float
    """var(r)"""
    spread: float
    """residual mean square of the means over tuning seeds"""
    noise: float
    """variance of a run, without the effect of its seed"""
    shared: float
    """variance of the effects of seeds"""
    df: int
    """degrees of freedom of spread"""
    variance_df: float
    """degrees of freedom of variance (Satterthwaite)"""


def _roughness(near: Sequence[_Near], curvature: float, noise: float, shared: float) -> tuple[float, float, float]:
    """var(r) by restricted maximum likelihood, from the means of all runs around their smooth curves; the error
    variance of such a mean; half the variance of var(r)."""
    squares, errors = [np.zeros(0)], [np.zeros(0)]
    for part in near:
        if len(part.away) < 3:
            continue
        mean_K, error_KK = _means_with_error(part, noise, shared)
        columns_KP = part.design
        if len(part.away) == 3:
            columns_KP, mean_K = columns_KP[:, :2], mean_K - curvature * columns_KP[:, 2]
        apart_KR = np.linalg.svd(columns_KP)[0][:, columns_KP.shape[1] :]
        error_R, axes_RR = np.linalg.eigh(apart_KR.T @ error_KK @ apart_KR)
        squares.append((axes_RR.T @ apart_KR.T @ mean_K) ** 2)
        errors.append(error_R)
    square_R, error_R = np.concatenate(squares), np.maximum(np.concatenate(errors), 0.0) + 1e-12
    rough_G = np.append(0.0, np.geomspace(1e-6, 10.0, 600)) * (square_R.mean() + error_R.mean())
    total_GR = rough_G[:, None] + error_R
    best = int((np.log(total_GR) + square_R / total_GR).sum(axis=1).argmin())
    weight_R = total_GR[best] ** -2
    return float(rough_G[best]), float(weight_R @ error_R / weight_R.sum()), float(1 / weight_R.sum())


def _without_seeds(curves: Sequence[TuningCurve], noise: float) -> list[TuningCurve]:
    """The curves without the effects of seeds that they share, if all have the same seeds. The spread of the seeds
    determines how much of the rise from tuning to fresh seeds is their effect, and how much is due to the choice."""
    fresh_F = [c.fresh[c.chosen] for c in curves if c.fresh is not None]
    if len(curves) < 3 or len({c.losses.shape[1] for c in curves}) > 1 or len({*map(len, fresh_F)}) > 1:
        return list(curves)
    tuning_RS = np.concatenate([c.losses[np.isfinite(c.losses).all(axis=1)] for c in curves])
    whole = [row for row in fresh_F if np.isfinite(row).all()]
    blocks = [rows for rows in (tuning_RS, np.stack(whole) if whole else np.zeros((0, 0))) if min(rows.shape) > 1]
    squares = sum(float((_of_seeds(rows) ** 2).sum()) - noise * (rows.shape[1] - 1) / len(rows) for rows in blocks)
    common = max(0.0, squares / max(1, sum(rows.shape[1] - 1 for rows in blocks)))
    rises = [
        float(row[np.isfinite(row)].mean() - c.losses[c.chosen].mean())
        for c, row in zip(curves, fresh_F, strict=False)
        if np.isfinite(row).any()
    ]
    rise = common / (common + noise / len(rises)) * float(np.mean(rises)) if common and rises else 0.0
    of_seed_S = _of_seeds(tuning_RS)
    return [replace(c, losses=c.losses - of_seed_S, fresh=None if c.fresh is None else c.fresh - rise) for c in curves]


def _of_seeds(loss_RS: np.ndarray) -> np.ndarray:
    """The mean of each seed over rows, less the mean of all."""
    return loss_RS.mean(axis=0) - loss_RS.mean() if len(loss_RS) else np.zeros(loss_RS.shape[1])


def _means_with_error(part: _Near, noise: float, shared: float) -> tuple[np.ndarray, np.ndarray]:
    """The mean of all runs at each value, and the covariance of its error: (K,), (K, K)."""
    has_run_KS = np.isfinite(part.runs).astype(float)
    common_seeds_KK = has_run_KS @ has_run_KS.T / np.outer(part.count, part.count)
    return part.all_means, noise * np.diag(1 / part.count) + shared * common_seeds_KK


def _near(curve: TuningCurve) -> _Near:
    first, last = max(0, curve.chosen - STEPS), curve.chosen + STEPS + 1
    x_K, y_K = curve.values[first:last], curve.losses[first:last].mean(axis=1)
    finite_K = np.isfinite(y_K)
    tables = [curve.losses] if curve.fresh is None else [curve.losses, curve.fresh]
    runs_KS = np.concatenate(tables, axis=1)[first:last][finite_K]
    steps = np.diff(curve.values[max(0, curve.chosen - 1) : curve.chosen + 2])
    return _Near(
        away=x_K[finite_K] - curve.values[curve.chosen],
        means=y_K[finite_K],
        step=float(steps.max()) if len(steps) else 0.0,
        runs=np.where(np.isfinite(runs_KS), runs_KS, np.nan),
    )


def _common_curvature(near: Sequence[_Near]) -> float:
    """k of all curves together, each with its own level and slope; 0 without a curve."""
    numerator, denominator = 0.0, 0.0
    for part in near:
        line_K2, square_K = part.design[:, :2], part.design[:, 2]
        residual_K = square_K - line_K2 @ np.linalg.lstsq(line_K2, square_K, rcond=None)[0]
        numerator += float(residual_K @ part.all_means)
        denominator += float(residual_K @ residual_K)
    return numerator / denominator if denominator else 0.0


@dataclass(frozen=True, kw_only=True)
class _Fit:
    slope: float
    curvature: float
    covariance_22: np.ndarray
    """of slope and curvature, at unit variance of the means"""
    squares: float
    df: int


def _fit(part: _Near, common: float) -> _Fit:
    """Level, slope and, from four values on, curvature."""
    n = len(part.away)
    has_own_curvature = n >= 4
    columns_KP = part.design if has_own_curvature else part.design[:, :2]
    target_K = part.means if has_own_curvature else part.means - common * part.away**2 / 2
    if n < 3:
        return _Fit(slope=0.0, curvature=common, covariance_22=np.zeros((2, 2)), squares=0.0, df=0)
    theta_P = np.linalg.lstsq(columns_KP, target_K, rcond=None)[0]
    residual_K = target_K - columns_KP @ theta_P
    covariance = np.linalg.inv(columns_KP.T @ columns_KP)[1:, 1:]
    covariance_22 = np.zeros((2, 2))
    covariance_22[: len(covariance), : len(covariance)] = covariance
    return _Fit(
        slope=float(theta_P[1]),
        curvature=float(theta_P[2]) if has_own_curvature else common,
        covariance_22=covariance_22,
        squares=float(residual_K @ residual_K),
        df=n - len(theta_P),
    )


def _seed_noise(curves: Sequence[TuningCurve]) -> tuple[float, int, float]:
    """The variance of a run around the means of its value and seed, its degrees of freedom, and the variance of the
    effects of seeds. With one tuning seed the first is estimated from fresh seeds, and the last is 0."""
    squares, df, shared, shared_df = 0.0, 0, 0.0, 0
    for curve in curves:
        y_KS = curve.losses[np.isfinite(curve.losses).all(axis=1)]
        if min(y_KS.shape) > 1:
            n_values, n_seeds = y_KS.shape
            seed_S = _of_seeds(y_KS)
            residual_KS = y_KS - y_KS.mean(axis=1, keepdims=True) - seed_S
            square = float((residual_KS**2).sum())
            squares, df = squares + square, df + (n_values - 1) * (n_seeds - 1)
            shared += float((seed_S**2).sum()) - square / (n_values - 1) / n_values
            shared_df += n_seeds - 1
    if df:
        return squares / df, df, max(0.0, shared / shared_df)
    for fresh_KF in (curve.fresh for curve in curves if curve.fresh is not None):
        for loss_F in (row[np.isfinite(row)] for row in fresh_KF):
            if len(loss_F) > 1:
                squares, df = squares + float(((loss_F - loss_F.mean()) ** 2).sum()), df + len(loss_F) - 1
    return (squares / df if df else 0.0), df, 0.0


@dataclass(frozen=True, kw_only=True)
class _Regret:
    mean: float
    variance: float
    rough: float
    """the part of the variance due to the value's roughness"""
    indistinguishable: np.ndarray
    """whether each near value may be better, (K,)"""


def _regret(part: _Near, curvature: float, roughness: _Roughness) -> _Regret:
    """The regret of the chosen value, from posterior draws of slope, curvature and the value's roughness."""
    mean_K, error_KK = _means_with_error(part, roughness.noise, roughness.shared)
    error_KK += (roughness.variance + 1e-12) * np.eye(len(mean_K))
    columns_KP = part.design
    weight_KK = np.linalg.inv(error_KK)
    prior_P = np.array([0.0, 1 / max(curvature * part.step, 1e-9) ** 2, 4 / max(curvature, 1e-9) ** 2])
    covariance_PP = np.linalg.inv(columns_KP.T @ weight_KK @ columns_KP + np.diag(prior_P))
    theta_P = covariance_PP @ (columns_KP.T @ weight_KK @ mean_K + prior_P * np.array([0.0, 0.0, curvature]))
    rng = np.random.default_rng(0)
    theta_NP = rng.multivariate_normal(theta_P, covariance_PP, size=DRAWS, method="eigh")
    chosen = int(np.argmin(np.abs(part.away)))
    gain_K = roughness.variance * weight_KK[chosen]
    posterior_variance = max(0.0, roughness.variance * (1 - gain_K[chosen]))
    rough_N = (mean_K - theta_NP @ columns_KP.T) @ gain_K + math.sqrt(posterior_variance) * rng.standard_normal(DRAWS)
    slope_N, curvature_N = theta_NP[:, 1], theta_NP[:, 2]
    inner_N = np.clip(
        np.divide(-slope_N, curvature_N, out=np.zeros(DRAWS), where=curvature_N > 0), -part.step, part.step
    )
    candidates_N3 = np.stack([inner_N, np.full(DRAWS, -part.step), np.full(DRAWS, part.step)], axis=1)
    lowest_N = (slope_N[:, None] * candidates_N3 + curvature_N[:, None] / 2 * candidates_N3**2).min(axis=1)
    regret_N = rough_N - lowest_N
    smooth_NK = theta_NP[:, 1:] @ columns_KP[:, 1:].T
    indistinguishable_K = ((smooth_NK < rough_N[:, None]).mean(axis=0) >= MIN_PROBABILITY) & (part.away != 0)
    return _Regret(
        mean=float(regret_N.mean()),
        variance=float(regret_N.var()),
        rough=float(rough_N.var()),
        indistinguishable=indistinguishable_K,
    )


def _shape(
    part: _Near, fit: _Fit, roughness: _Roughness, regret: _Regret, deviation: float, chosen: float
) -> CurveShape:
    """`chosen`: ln of the chosen value; `deviation`: of its mean regret from that of all curves, squared."""
    away, error = 0.0, math.inf
    if len(part.away) >= 3 and fit.curvature > 0:
        gradient_2 = np.array([-1 / fit.curvature, fit.slope / fit.curvature**2])
        away = min(max(-fit.slope / fit.curvature, -part.step), part.step)
        error = math.sqrt(roughness.spread * float(gradient_2 @ fit.covariance_22 @ gradient_2))
    half_width = t_critical(roughness.df) * error
    variance = regret.variance + deviation
    rough = min(regret.rough, variance)
    half_variance = rough**2 / roughness.variance_df + (variance - rough) ** 2 / roughness.df
    return CurveShape(
        optimum=chosen + away if half_width < MAX_HALF_WIDTH else None,
        half_width=half_width if half_width < MAX_HALF_WIDTH else None,
        variance=variance,
        expected_regret=regret.mean,
        df=variance**2 / half_variance if half_variance else roughness.df,
        indistinguishable_values=tuple(chosen + part.away[regret.indistinguishable]),
    )
