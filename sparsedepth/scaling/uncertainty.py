"""Bootstrap intervals of a fitted law, over points (pairs), or over whole clusters where the fit has them.

Every replicate is refitted to convergence from the optimum. Replicates that stop early stay near their start, which
makes intervals too narrow. Shapes as in `law`; R replicates.
"""

from dataclasses import dataclass

import numpy as np

from sparsedepth.scaling.fit import Fit, solve
from sparsedepth.store.small_sample import LEVEL

N_BOOTSTRAP = 500


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    theta: np.ndarray
    """One refit per row, (R, P)."""
    intervals: dict[str, tuple[float, float]]
    """95% percentile intervals by parameter."""


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
