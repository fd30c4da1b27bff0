"""Fit the depth law, and check how reliable the fit is.

    minimise mean_n (ln L(theta, x_n) - ln L_n)^2 over the free parameters, from many starts

Reported with every fit: how many starts reached the best optimum and how flat it is there, standard errors from the
Jacobian (s^2 (J'J)^-1, s^2 with n - p degrees of freedom), and a warning wherever the points do not identify a term.
The objective is stated as 100 times the mean squared residual of ln L, as in the released code of 2602.05970.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from sparsedepth.scaling.law import DesignMatrix, FittedQuantity, Law, Term, cluster_effect, design, predict
from sparsedepth.scaling.solve import covariance, solve

LEVEL = 0.95
N_STARTS = 60
CLUSTER = "cluster"
"""The column of points that names clusters of dependent points; absent where all points are independent."""
N_REWEIGHTED = 3
"""Iterations of variances from residuals and parameters from variances; more change no printed digit."""
FEW_CLUSTERS = 20
"""With fewer, a cluster bootstrap's percentile intervals are too narrow (Cameron, Gelbach, Miller 2008)."""
SAME = 1e-6
"""Relative difference of costs up to which optima are the same."""

FACTOR = 2.0
"""An exponent whose 95% interval spans more than this factor is weakly constrained."""
COLLINEAR = 0.9
"""Predictors whose logarithms correlate more than this trade against each other."""
CONDITION = 1e3
"""With a larger condition number of the Jacobian (columns of length 1), some combination of parameters is uncertain."""
NEGLIGIBLE = 1e-3
"""A term's contribution below this many nat/token, at the points' geometric mean, counts as 0."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    unit: str
    value: float
    stderr: float | None
    """From the Jacobian; None for a parameter that is fixed or not identified."""
    lo: float | None
    hi: float | None
    """Student's 95% interval; for a positive quantity, on its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    plan: DesignMatrix
    points: pd.DataFrame
    theta: np.ndarray
    """In the order of `Law.names`, (P,)."""
    covariance: np.ndarray
    """(P, P); see `solve.covariance`."""
    cost: float
    """Sum of squared residuals of ln L."""
    gradient: float
    """Largest cosine between the residual and a parameter's effect; 0 at an exact optimum."""
    n_starts: int
    n_reached: int
    """Starts that ended at this optimum."""
    condition: float
    warnings: tuple[str, ...]

    @property
    def law(self) -> Law:
        return self.plan.law

    @property
    def n_points(self) -> int:
        return self.plan.n_points

    @property
    def df(self) -> int:
        """Degrees of freedom of the intervals: clusters, or points, minus free parameters; at least 1."""
        return max(1, self.plan.n_units - int(self.law.free.sum()))

    @property
    def residuals(self) -> np.ndarray:
        """ln L of the law minus that of each point, (N,)."""
        return np.log(predict(self.theta[None], self.plan, self.points)[0]) - self.plan.y

    @property
    def objective(self) -> float:
        """100 times the mean squared residual of ln L."""
        return 100 * float((self.residuals**2).mean())

    def exponent(self, name: str) -> float:
        """One exponent by name. Raises ValueError for an exponent that is not of this law."""
        if name not in self.law.names:
            raise ValueError(f"this law has no {name}: {self.law.text()}")
        return float(self.theta[self.law.index(name)])

    def parameters(self) -> list[Parameter]:
        """Coefficients, exponents, E, and each term's contribution at the geometric mean of its predictor."""
        return [self._parameter(quantity) for quantity in self.plan.quantities()]

    def _parameter(self, quantity: FittedQuantity) -> Parameter:
        value, error = float(quantity.of(self.theta)), self._error(quantity.weights)
        if error is None:
            return Parameter(name=quantity.name, unit=quantity.unit, value=value, stderr=None, lo=None, hi=None)
        half = min(self.t_critical * error, 300.0)  # exp overflows beyond it
        lo, hi = (float(quantity.value(quantity.weights @ self.theta + sign * half)) for sign in (-1, 1))
        stderr = value * error if quantity.is_log else error
        return Parameter(name=quantity.name, unit=quantity.unit, value=value, stderr=stderr, lo=lo, hi=hi)

    def _error(self, weights_P: np.ndarray) -> float | None:
        """The standard error of a sum of parameters."""
        used = np.flatnonzero(weights_P)  # other rows of the covariance may be NaN
        variance = float(weights_P[used] @ self.covariance[np.ix_(used, used)] @ weights_P[used])
        return float(np.sqrt(variance)) if np.isfinite(variance) and variance > 0 else None

    @property
    def t_critical(self) -> float:
        return float(stdtrit(self.df, (1 + LEVEL) / 2))


def fit(points: pd.DataFrame, law: Law | None = None, n_starts: int = N_STARTS, seed: int = 0) -> Fit:
    """The law at the best optimum from `n_starts` random starts. Deterministic in `seed`.

    A term whose predictor has too few values to be identified is left out, with a warning. Raises ValueError for too
    few points, or if no term remains.
    """
    law, dropped = _identified(points, law or Law())
    plan = design(points, law)
    n_free = int(law.free.sum())
    if len(points) <= n_free:
        raise ValueError(f"{len(points)} points cannot fit {n_free} parameters; add points, fix or leave out terms")
    start_RP = starts(plan, n_starts, np.random.default_rng(seed))
    solutions = solve(plan, start_RP)
    best = solutions.best()
    for _ in range(N_REWEIGHTED if CLUSTER in points.columns else 0):
        residual_N = np.log(predict(best.theta, plan, points)[0]) - plan.y
        index_N = pd.factorize(points[CLUSTER])[0]
        plan = replace(plan, shared=cluster_effect(index_N, residual_N, n_free))
        solutions = solve(plan, start_RP)
        best = solutions.best()
    covariance_RPP, condition_R = covariance(plan, best)
    cost = float(best.cost[0])
    draft = Fit(
        plan=plan,
        points=points,
        theta=best.theta[0],
        covariance=covariance_RPP[0],
        cost=cost,
        gradient=float(best.gradient[0]),
        n_starts=n_starts,
        n_reached=int((solutions.cost <= cost * (1 + SAME) + 1e-24).sum()),
        condition=float(condition_R[0]),
        warnings=tuple(dropped),
    )
    return replace(draft, warnings=(*draft.warnings, *_warnings(draft, bool(best.converged[0]))))


def starts(plan: DesignMatrix, n_starts: int, generator: np.random.Generator) -> np.ndarray:
    """Random parameters, (R, P): exponents from 0.1 to 2.5, E from 20% to 95% of the lowest loss, the remaining mean
    loss split at random among the terms. Fixed exponents have their value."""
    law = plan.law
    loss_N = np.exp(plan.y)
    e_R = generator.uniform(0.2, 0.95, n_starts) * loss_N.min()
    share_RK = generator.dirichlet(np.ones(len(law.terms)), n_starts)
    g_RK = np.log((loss_N.mean() - e_R)[:, None] * np.maximum(share_RK, 1e-3))
    a_RK = generator.uniform(0.1, 2.5, (n_starts, len(law.terms)))
    start_RP = np.concatenate([g_RK, a_RK, np.log(e_R)[:, None]], axis=1)
    for name, value in law.fixed.items():
        start_RP[:, law.index(name)] = value
    return start_RP


def _identified(points: pd.DataFrame, law: Law) -> tuple[Law, list[str]]:
    """The law without the terms that these points cannot identify, and the reason for each.

    A term c x^-a in addition to E needs three values of x, or two with a fixed.
    """
    terms: list[Term] = []
    warnings: list[str] = []
    for term in law.terms:
        exponent = f"a_{term.symbol}"
        needed = 2 if exponent in law.fixed else 3
        values = sorted(set(points[term.column]))
        if len(values) >= needed:
            terms.append(term)
        elif len(values) == 1:
            warnings.append(
                f"{term.column} is {values[0]:g} at all {len(points)} points: the {term.name} term cannot be "
                f"distinguished from E and is left out"
            )
        else:
            warnings.append(
                f"{term.column} takes the two values {values[0]:g} and {values[1]:g}, too few for {exponent}: the "
                f"{term.name} term is left out (--fix {exponent}=1 keeps it)"
            )
    if not terms:
        raise ValueError(f"no term of the law can be identified: {'; '.join(warnings)}")
    fixed = {name: value for name, value in law.fixed.items() if any(name == f"a_{term.symbol}" for term in terms)}
    return replace(law, terms=tuple(terms), fixed=fixed), warnings


def log_correlations(plan: DesignMatrix) -> dict[tuple[str, str], float]:
    """(term, term) -> correlation of the logarithms of their predictors."""
    return {
        (first.name, second.name): float(np.corrcoef(plan.z[i], plan.z[j])[0, 1])
        for (i, first), (j, second) in itertools.combinations(enumerate(plan.law.terms), 2)
    }


def _warnings(fitted: Fit, converged: bool) -> list[str]:
    """The reasons for which the parameters may be unreliable."""
    warnings = []
    clusters = fitted.plan.shared
    if clusters and clusters.n_clusters < FEW_CLUSTERS:
        warnings.append(
            f"{clusters.n_clusters} clusters are fewer than {FEW_CLUSTERS}: bootstrap intervals are too narrow; lo and "
            f"hi have Student's t with {fitted.df} degrees of freedom"
        )
    n_shapes = len(fitted.points.drop_duplicates(["d_model", "n_layers", "num_tokens"]))
    if clusters is None and n_shapes < fitted.n_points:
        warnings.append(
            f"{fitted.n_points} points have {n_shapes} shapes and budgets: if all seeds of one deviate from the law "
            f"together, intervals are too narrow (--cluster d_model,n_layers)"
        )
    if not converged:
        warnings.append(f"the best optimum is not stationary (gradient cosine {fitted.gradient:.1e}): the cost is flat")
    if fitted.n_reached < 2:
        warnings.append(f"one of {fitted.n_starts} starts reached the best optimum: a better one may exist")
    for (first, second), value in log_correlations(fitted.plan).items():
        if abs(value) > COLLINEAR:
            warnings.append(
                f"log {first} and log {second} correlate at {value:.2f} (above {COLLINEAR}): their terms trade against "
                f"each other, and each exponent depends on the law's form"
            )
    if fitted.condition > CONDITION:
        warnings.append(
            f"the Jacobian's condition number is {fitted.condition:.2g}, above {CONDITION:g}: some terms cannot be "
            f"separated"
        )
    for parameter in fitted.parameters():
        warnings += _parameter_warnings(parameter, fitted)
    return warnings


def _parameter_warnings(parameter: Parameter, fitted: Fit) -> Sequence[str]:
    name, lo, hi = parameter.name, parameter.lo, parameter.hi
    if name.startswith("a_") and name not in fitted.law.fixed:
        if lo is None or hi is None:
            return [f"{name} has no standard error: these points do not identify it"]
        if lo <= 0:
            return [f"{name} = {parameter.value:.3g} is not distinguishable from 0: 95% interval {lo:.3g} to {hi:.3g}"]
        if hi / lo > FACTOR:
            return [
                f"{name} is weakly constrained: its 95% interval {lo:.3g} to {hi:.3g} spans a factor of {hi / lo:.1f} "
                f"(more than {FACTOR:g})"
            ]
    if (name == "E" or name.endswith("_part")) and parameter.value < NEGLIGIBLE:
        return [f"{name} is at its bound, 0: the points do not need it"]
    return []
