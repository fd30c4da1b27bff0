"""How far a tuned value can be from the best one, and what choosing it adds to the variance of the loss there.

For each configuration, over the values x_i = ln lr_i within two steps of the chosen x_b (finite means only), by least
squares on the means over tuning seeds:

    y_i = a + b u_i + (k/2) u_i^2 + r_i + e_i,    u_i = x_i - x_b        optimum u* = -b / k, within a step of x_b

r: roughness, what a value does beside the smooth curve with every seed alike; e: seeds, s^2/S. A curve of four values
or more has its own k; one of three takes the k of all curves together. Over all curves of a sweep

    var(r) = max(0, residual mean square - s^2/S)      s^2: values x seeds of the tuning, less both means

and `variance` is that of (k/2) (u - u*)^2 + r at the value u that would be chosen, over DRAWS made-up tunings of the
fitted curve: u* from its normal distribution (delta method), r and e from theirs. With one tuning seed s^2 is not known
and stays in var(r): the seed that chose the value flatters it as much. Where a curve does not bend upwards (k <= 0)
the loss counts as flat over it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsedepth.store.student import t_critical

STEPS = 2
"""Values on either side of the chosen one that the curve is fitted to: further ones diverge, or bend otherwise."""
DRAWS = 2000
VAGUE = math.log(10)
"""An optimum whose 95% interval is wider than so much to either side is not known."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One configuration along one tuned field, the others at their best."""

    values: np.ndarray
    """ln of the values tried, ascending, (K,)"""
    losses: np.ndarray
    """by value and tuning seed, (K, S); inf where a run diverged"""
    chosen: int


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """What is known of the optimum of a curve."""

    optimum: float | None
    """ln of the best value; None where the curve does not tell it within a factor of ten"""
    half_width: float | None
    """of its 95% interval"""
    variance: float | None
    """that choosing the value adds to the mean loss; None where it cannot be told"""
    df: float


@dataclass(frozen=True, kw_only=True)
class _Near:
    """The part of a curve near the chosen value."""

    away: np.ndarray
    """ln(value / chosen value), (K,)"""
    means: np.ndarray
    """over the tuning seeds, (K,)"""
    step: float
    """to the next value, the larger of both sides"""
    n_seeds: int


def landscapes(curves: Sequence[Curve]) -> list[Landscape]:
    """The landscape of every curve of a sweep, whose roughness is one."""
    near = [_near(curve) for curve in curves]
    bend = _common_bend([part for part in near if len(part.away) >= 3])
    fits = [_fit(part, bend) for part in near]
    df = sum(fit.df for fit in fits) - any(len(part.away) == 3 for part in near)
    if df < 1:
        return [Landscape(optimum=None, half_width=None, variance=None, df=0) for _ in curves]
    spread = sum(fit.squares for fit in fits) / df
    noise, noise_df = _seed_noise(curves)
    per_mean = noise / float(np.mean([part.n_seeds for part in near]))
    rough = max(0.0, spread - per_mean)
    doubt = spread**2 / df + (per_mean**2 / noise_df if noise_df else 0.0)
    roughness = _Roughness(
        variance=rough, spread=spread, noise=per_mean, df=df, certainty=max(1.0, rough**2 / doubt) if rough else df
    )
    places = [float(curve.values[curve.chosen]) for curve in curves]
    return [_landscape(part, fit, roughness, at) for part, fit, at in zip(near, fits, places, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Roughness:
    """What the curves of a sweep share."""

    variance: float
    spread: float
    """residual mean square of the means: variance + noise"""
    noise: float
    """of a mean over the tuning seeds"""
    df: int
    """of spread"""
    certainty: float
    """degrees of freedom of variance (Satterthwaite)"""


def _near(curve: Curve) -> _Near:
    first, last = max(0, curve.chosen - STEPS), curve.chosen + STEPS + 1
    x_K, y_K = curve.values[first:last], curve.losses[first:last].mean(axis=1)
    finite_K = np.isfinite(y_K)
    steps = np.diff(curve.values[max(0, curve.chosen - 1) : curve.chosen + 2])
    return _Near(
        away=x_K[finite_K] - curve.values[curve.chosen],
        means=y_K[finite_K],
        step=float(steps.max()) if len(steps) else 0.0,
        n_seeds=curve.losses.shape[1],
    )


def _common_bend(near: Sequence[_Near]) -> float:
    """k over all curves, each with a level and a slope of its own; 0 without a curve."""
    above, below = 0.0, 0.0
    for part in near:
        line_K2 = np.stack([np.ones_like(part.away), part.away], axis=1)
        square_K = part.away**2 / 2
        rest_K = square_K - line_K2 @ np.linalg.lstsq(line_K2, square_K, rcond=None)[0]
        above, below = above + float(rest_K @ part.means), below + float(rest_K @ rest_K)
    return above / below if below else 0.0


@dataclass(frozen=True, kw_only=True)
class _Fit:
    slope: float
    bend: float
    covariance_22: np.ndarray
    """of slope and bend, at unit variance of the means"""
    squares: float
    df: int


def _fit(part: _Near, common: float) -> _Fit:
    """Level, slope and, from four values on, bend."""
    n = len(part.away)
    own = n >= 4
    columns_KP = np.stack([np.ones(n), part.away, part.away**2 / 2], axis=1)[:, : 3 if own else 2]
    target_K = part.means if own else part.means - common * part.away**2 / 2
    if n < 3:
        return _Fit(slope=0.0, bend=common, covariance_22=np.zeros((2, 2)), squares=0.0, df=0)
    theta_P = np.linalg.lstsq(columns_KP, target_K, rcond=None)[0]
    rest_K = target_K - columns_KP @ theta_P
    covariance = np.linalg.inv(columns_KP.T @ columns_KP)[1:, 1:]
    covariance_22 = np.zeros((2, 2))
    covariance_22[: len(covariance), : len(covariance)] = covariance
    bend = float(theta_P[2]) if own else common
    return _Fit(
        slope=float(theta_P[1]),
        bend=bend,
        covariance_22=covariance_22,
        squares=float(rest_K @ rest_K),
        df=n - len(theta_P),
    )


def _seed_noise(curves: Sequence[Curve]) -> tuple[float, int]:
    """The variance of one run around its value's and its seed's means, and its degrees of freedom; 0 with one seed."""
    squares, df = 0.0, 0
    for curve in curves:
        y_KS = curve.losses[np.isfinite(curve.losses).all(axis=1)]
        if min(y_KS.shape) > 1:
            rest_KS = y_KS - y_KS.mean(axis=1, keepdims=True) - y_KS.mean(axis=0) + y_KS.mean()
            squares, df = squares + float((rest_KS**2).sum()), df + (y_KS.shape[0] - 1) * (y_KS.shape[1] - 1)
    return (squares / df, df) if df else (0.0, 0)


def _landscape(part: _Near, fit: _Fit, roughness: _Roughness, at: float) -> Landscape:
    """`at`: ln of the chosen value."""
    bend = max(fit.bend, 0.0)
    away, error = 0.0, math.inf
    if len(part.away) >= 3 and bend:
        gradient_2 = np.array([-1 / fit.bend, fit.slope / fit.bend**2])
        away = min(max(-fit.slope / fit.bend, -part.step), part.step)
        error = math.sqrt(roughness.spread * float(gradient_2 @ fit.covariance_22 @ gradient_2))
    rng = np.random.default_rng(0)
    best_N = np.clip(away + min(error, part.step) * rng.standard_normal(DRAWS), -part.step, part.step)
    rough_NK = math.sqrt(roughness.variance) * rng.standard_normal((DRAWS, len(part.away)))
    smooth_NK = bend / 2 * (part.away - best_N[:, None]) ** 2
    seen_NK = smooth_NK + rough_NK + math.sqrt(roughness.noise) * rng.standard_normal(rough_NK.shape)
    loss_N = (smooth_NK + rough_NK)[np.arange(DRAWS), seen_NK.argmin(axis=1)]
    half_width = t_critical(roughness.df) * error
    return Landscape(
        optimum=at + away if half_width < VAGUE else None,
        half_width=half_width if half_width < VAGUE else None,
        variance=float(loss_N.var()),
        df=roughness.certainty,
    )
