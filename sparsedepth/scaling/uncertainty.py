"""Uncertainty of a fitted law: bootstrap intervals, and the error at held-out points.

- Bootstrap over points (pairs), or over whole clusters where the fit has them; every replicate is refitted to
  convergence from the optimum. Replicates that stop early stay near their start, which makes intervals too narrow.
- Held out: k folds of points, or of clusters, each predicted by the law fitted to the others.

Shapes as in `law`; R replicates.
"""

from dataclasses import dataclass

import numpy as np

from sparsedepth.scaling.fit import LEVEL, Fit, solve, starts
from sparsedepth.scaling.law import fitted_loss

N_BOOTSTRAP = 500
N_FOLDS = 10
FOLD_STARTS = 4
"""Random starts of each fold, beside the fit."""


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    theta: np.ndarray
    """One refit per row, (R, P)."""
    intervals: dict[str, tuple[float, float]]
    """95% percentile intervals by parameter."""


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
    """Refit resampled points, or clusters. Deterministic in `seed`. Raises ValueError for fewer than 20 replicates."""
    if n_replicates < 20:
        raise ValueError(f"{n_replicates} bootstrap replicates have no 95% interval; take 200 or more")
    unit_N = fitted.unit_index
    n = int(unit_N.max()) + 1
    weight_RN = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=n_replicates)[:, unit_N]
    theta_RP = np.array([solve(fitted.plan, fitted.theta, fitted.clusters, weight_N)[0] for weight_N in weight_RN])
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    intervals = {}
    for quantity in fitted.plan.quantities():
        if quantity.name not in fitted.law.fixed:
            lo, hi = np.quantile(quantity.of(theta_RP), tails)
            intervals[quantity.name] = float(lo), float(hi)
    return Bootstrap(theta=theta_RP, intervals=intervals)


def held_out(fitted: Fit, n_folds: int = N_FOLDS, seed: int = 0) -> HeldOutFit:
    """k-fold error. Deterministic in `seed`. Raises ValueError for folds that leave too few points to fit."""
    unit_N = fitted.unit_index
    n, n_free = int(unit_N.max()) + 1, int(fitted.law.free.sum())
    if not 2 <= n_folds <= n or n - -(-n // n_folds) <= n_free:
        few = f"{n} {fitted.unit} in {n_folds} folds leave too few to fit {n_free} parameters"
        one_at_a_time = f"--folds {n} leaves out one at a time, " if n - 1 > n_free else ""
        raise ValueError(f"{few}; {one_at_a_time}--folds 0 none")
    generator = np.random.default_rng(seed)
    fold_N = (generator.permutation(n) % n_folds)[unit_N]
    start_SP = [fitted.theta, *starts(fitted.plan, FOLD_STARTS, generator)]
    error_N = np.empty(fitted.n_points)
    for fold in range(n_folds):
        seen_N = (fold_N != fold).astype(float)
        theta_P, _ = min(
            (solve(fitted.plan, start_P, fitted.clusters, seen_N) for start_P in start_SP), key=lambda end: end[1]
        )
        error_N[fold_N == fold] = (np.log(fitted_loss(theta_P, fitted.plan.z)) - fitted.plan.y)[fold_N == fold]
    return HeldOutFit(
        n_folds=n_folds,
        rmse=float(np.sqrt((error_N**2).mean())),
        rmse_fitted=float(np.sqrt((fitted.residuals**2).mean())),
        mean_abs=float(np.abs(error_N).mean()),
    )
