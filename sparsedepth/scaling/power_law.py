"""A power law with an offset, L = L_inf + A C^-alpha, fitted to clustered points.

One term of `law` beside its constant: ln L by least squares from several starts, a random effect for each cluster, and
percentile intervals of a bootstrap over whole clusters. C: compute, depth, tokens, or any positive predictor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.scaling import reliability
from sparsedepth.scaling.fit import CLUSTER, fit
from sparsedepth.scaling.law import Law, Term
from sparsedepth.scaling.uncertainty import N_BOOTSTRAP, bootstrap

LAW = Law(terms=(Term(name="power", symbol="C", column="C", factor=1.0, unit="C"),))
NAMES = {"L_inf": "E", "A": "c_C", "alpha": "a_C"}


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    L_inf: float
    """nat/token."""
    A: float
    alpha: float
    intervals: dict[str, tuple[float, float]]
    """95% bootstrap intervals of L_inf, A and alpha."""
    student_intervals: dict[str, tuple[float | None, float | None]]
    """The same from the curvature, with Student's t; wider where clusters are few. None: not identified."""
    replicates: np.ndarray
    """L_inf, A, alpha of each refit, (R, 3): for intervals of other quantities, such as where two laws cross."""
    warnings: tuple[str, ...]

    def __call__(self, C: np.ndarray) -> np.ndarray:
        """The fitted loss [nat/token]."""
        return self.L_inf + self.A * np.asarray(C, float) ** -self.alpha


def fit_power_law(
    C: Sequence[float] | np.ndarray,
    loss: Sequence[float] | np.ndarray,
    cluster: Sequence[object] | np.ndarray | None = None,
    n_replicates: int = N_BOOTSTRAP,
    seed: int = 0,
) -> PowerLaw:
    """The law with its bootstrap. `cluster` names the cluster of each point, such as its seed or configuration; without
    it points are independent. Deterministic in `seed`. Raises ValueError for values that are not positive, fewer than
    three different C, or too few points."""
    points = pd.DataFrame({"C": np.asarray(C, float), "loss": np.asarray(loss, float)})
    if not (np.isfinite(points).all(axis=None) and (points > 0).all(axis=None)):
        raise ValueError("the points of a power law have positive, finite C and loss; leave out the others")
    if cluster is not None:
        points[CLUSTER] = list(cluster)
    fitted = fit(points, LAW, seed=seed)
    boot = bootstrap(fitted, n_replicates, seed)
    quantities = {quantity.name: quantity for quantity in fitted.plan.quantities()}
    parameters = {name: fitted.parameter(ours) for name, ours in NAMES.items()}
    return PowerLaw(
        **{name: parameter.value for name, parameter in parameters.items()},
        intervals={name: boot.intervals[ours] for name, ours in NAMES.items()},
        student_intervals={name: (parameter.lo, parameter.hi) for name, parameter in parameters.items()},
        replicates=np.stack([quantities[ours].of(boot.theta) for ours in NAMES.values()], axis=1),
        warnings=tuple(reliability.warnings(fitted)),
    )
