"""Uncertainty of a fitted depth law: bootstrap, profiles, held-out points, excluded points.

- Bootstrap over points (pairs), or over clusters where the fit has them: every replicate is refitted to convergence,
  from the optimum and from perturbed starts. Replicates that stop early stay near their start, which would make
  intervals too narrow.
- Profile: the values a of an exponent at which the best fit of all others costs no more than
  S(a) <= S_min (1 + t^2 / (n - p)), t Student's 97.5% point (Bates and Watts, 1988, section 6.1).
- Held out: k folds of points, or of clusters, each predicted by the law fitted to the others.
- Exclusion scan: the fit again without the n highest losses.

Shapes as in `law`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.scaling.fit import LEVEL, Fit, fit, starts
from sparsedepth.scaling.law import Law, predict
from sparsedepth.scaling.points import exclude_highest
from sparsedepth.scaling.solve import solve

N_BOOTSTRAP = 1000
PERTURBED = 3
"""Further starts of each replicate."""
N_FOLDS = 10
EXCLUSIONS = (0, 1, *range(10, 101, 10))


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    theta: np.ndarray
    """One converged refit per row."""
    intervals: dict[str, tuple[float, float]]
    """95% percentile intervals by parameter."""
    n_replicates: int
    n_converged: int
    n_moved: int
    """Replicates with a better optimum from a perturbed start than from the fit."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    name: str
    values: np.ndarray
    costs: np.ndarray
    """S at each value, all other parameters refitted."""
    lo: float | None
    hi: float | None
    """None on a side where the cost stays below the limit: the points set no bound there."""


@dataclass(frozen=True, kw_only=True)
class HeldOutFit:
    n_folds: int
    rmse: float
    """Root mean squared residual of ln L at held-out points."""
    rmse_fitted: float
    """The same at the fitted points."""
    mean_abs: float
    """Mean |ln L - ln loss| held out: about the relative error."""


def bootstrap(fitted: Fit, n_replicates: int = N_BOOTSTRAP, seed: int = 0) -> Bootstrap:
    """Refit resampled points. Deterministic in `seed`. Raises ValueError for fewer than 20 replicates."""
    if n_replicates < 20:
        raise ValueError(f"{n_replicates} bootstrap replicates have no 95% interval; take 200 or more")
    generator = np.random.default_rng(seed)
    unit_N, n = _units(fitted)
    weight_RN = generator.multinomial(n, np.full(n, 1 / n), size=n_replicates).astype(float)[:, unit_N]
    first = solve(fitted.plan, np.tile(fitted.theta, (n_replicates, 1)), weight_RN)
    theta_RP, cost_R, converged_R = first.theta, first.cost, first.converged
    spread_P = 2 * np.sqrt(np.nan_to_num(np.diag(fitted.covariance), nan=0.25))
    for _ in range(PERTURBED):
        shift_RP = np.clip(spread_P, 0.0, 1.0) * generator.standard_normal(theta_RP.shape)
        other = solve(fitted.plan, fitted.theta + shift_RP, weight_RN)
        better_R = other.converged & (~converged_R | (other.cost < cost_R))
        theta_RP = np.where(better_R[:, None], other.theta, theta_RP)
        cost_R, converged_R = np.where(better_R, other.cost, cost_R), converged_R | other.converged
    moved_R = cost_R < first.cost * (1 - 1e-6)
    theta_RP = theta_RP[converged_R]
    intervals = {
        quantity.name: percentiles(quantity.of(theta_RP))
        for quantity in fitted.plan.quantities()
        if len(theta_RP) and quantity.name not in fitted.law.fixed
    }
    return Bootstrap(
        theta=theta_RP,
        intervals=intervals,
        n_replicates=n_replicates,
        n_converged=len(theta_RP),
        n_moved=int(moved_R.sum()),
    )


def _units(fitted: Fit) -> tuple[np.ndarray, int]:
    """The resampling unit of each point, its cluster or itself; and the number of units."""
    plan = fitted.plan
    return plan.shared.index if plan.shared else np.arange(plan.n_points), plan.n_units


def percentiles(values_R: np.ndarray) -> tuple[float, float]:
    """The 95% percentile interval of refits."""
    lo, hi = np.quantile(values_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(lo), float(hi)


def profile(fitted: Fit, name: str) -> Profile:
    """The cost along an exponent, and its 95% interval. Raises ValueError for an exponent that is not fitted."""
    centre = fitted.exponent(name)
    if name in fitted.law.fixed:
        raise ValueError(f"{name} is fixed at {centre:g}: it has no profile")
    index = fitted.law.index(name)
    error = float(np.sqrt(fitted.covariance[index, index]))
    step = error / 2 if np.isfinite(error) and 0 < error < 1 else 0.1
    limit = fitted.cost * (1 + fitted.t_critical**2 / (fitted.n_points - int(fitted.law.free.sum())))
    below, above = (_side(fitted, index, sign * step, limit) for sign in (-1, 1))
    values = [*reversed(below), (centre, fitted.cost), *above]
    value_G, cost_G = np.array(values).T
    return Profile(
        name=name,
        values=value_G,
        costs=cost_G,
        lo=_crossing(below, centre, fitted.cost, limit),
        hi=_crossing(above, centre, fitted.cost, limit),
    )


def _side(fitted: Fit, index: int, step: float, limit: float) -> list[tuple[float, float]]:
    """(value, cost) outwards from the fit on one side, in doubling runs of 8 steps, until the cost passes the limit."""
    values: list[tuple[float, float]] = []
    start_P, centre = fitted.theta, float(fitted.theta[index])
    reach = 0.0
    for doubling in range(8):
        value_G = centre + reach + step * 2**doubling * np.arange(1, 9)
        theta_GP, cost_G = _conditional(fitted, index, value_G, start_P)
        values += zip(value_G.tolist(), cost_G.tolist(), strict=True)
        if cost_G[-1] > limit:
            break
        start_P, reach = theta_GP[-1], float(value_G[-1]) - centre
    return values


def _conditional(fitted: Fit, index: int, value_G: np.ndarray, start_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best fits with one parameter held at each value: from the neighbour, from the fit, and along the valley."""
    free_P = fitted.law.free.copy()
    free_P[index] = False
    along_P = np.nan_to_num(fitted.covariance[index] / fitted.covariance[index, index])
    shift_G = value_G - fitted.theta[index]
    begin_SGP = [np.tile(start_P, (len(value_G), 1)), np.tile(fitted.theta, (len(value_G), 1))]
    begin_SGP.append(fitted.theta + np.clip(shift_G[:, None] * along_P, -5.0, 5.0))
    start_RP = np.concatenate(begin_SGP)
    start_RP[:, index] = np.tile(value_G, len(begin_SGP))
    solved = solve(fitted.plan, start_RP, free_RP=np.tile(free_P, (len(start_RP), 1)))
    cost_SG = solved.cost.reshape(len(begin_SGP), -1)
    best_G = cost_SG.argmin(axis=0), np.arange(len(value_G))
    return solved.theta.reshape(*cost_SG.shape, -1)[best_G], cost_SG[best_G]


def _crossing(side: list[tuple[float, float]], centre: float, least: float, limit: float) -> float | None:
    """The value at which the cost meets the limit, by linear interpolation of the square root of its rise."""
    before, rise_before = centre, 0.0
    target = np.sqrt(limit - least)
    for value, cost in side:
        rise = np.sqrt(max(cost - least, 0.0))
        if rise > target:
            return float(before + (value - before) * (target - rise_before) / (rise - rise_before))
        before, rise_before = value, rise
    return None


def held_out(fitted: Fit, n_folds: int = N_FOLDS, seed: int = 0) -> HeldOutFit:
    """k-fold error. Deterministic in `seed`. Raises ValueError for folds that leave too few points to fit."""
    unit_N, n = _units(fitted)
    n_free = int(fitted.law.free.sum())
    if not 2 <= n_folds <= n or n - -(-n // n_folds) <= n_free:
        few = f"{n} {fitted.plan.units} in {n_folds} folds leave too few to fit {n_free} parameters"
        one_at_a_time = f"--folds {n} leaves out one at a time, " if n - 1 > n_free else ""
        raise ValueError(f"{few}; {one_at_a_time}--folds 0 none")
    generator = np.random.default_rng(seed)
    fold_N = (generator.permutation(n) % n_folds)[unit_N]
    seen_FN = (fold_N != np.arange(n_folds)[:, None]).astype(float)
    start_SP = np.concatenate([fitted.theta[None], starts(fitted.plan, 8, generator)])
    solved = solve(fitted.plan, np.tile(start_SP, (n_folds, 1)), np.repeat(seen_FN, len(start_SP), axis=0))
    cost_FS = solved.cost.reshape(n_folds, -1)
    theta_FP = solved.theta.reshape(n_folds, len(start_SP), -1)[np.arange(n_folds), cost_FS.argmin(axis=1)]
    error_FN = np.log(predict(theta_FP, fitted.plan, fitted.points)) - fitted.plan.y
    error_N = error_FN[fold_N, np.arange(fitted.n_points)]
    return HeldOutFit(
        n_folds=n_folds,
        rmse=float(np.sqrt((error_N**2).mean())),
        rmse_fitted=float(np.sqrt((fitted.residuals**2).mean())),
        mean_abs=float(np.abs(error_N).mean()),
    )


def exclusion_scan(points: pd.DataFrame, law: Law, exclusions: Sequence[int] = EXCLUSIONS) -> list[tuple[int, Fit]]:
    """The fit without the n highest losses, for every n that leaves enough points for the law's parameters."""
    n_free = int(law.free.sum())
    scan = []
    for n_excluded in exclusions:
        with contextlib.suppress(ValueError):
            if len(remaining := exclude_highest(points, n_excluded)) > n_free + 2:
                scan.append((n_excluded, fit(remaining, law)))
    return scan
