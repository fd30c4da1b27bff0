"""Fit the depth law, and say how far the fit can be believed.

    minimise mean_n (ln L(theta, x_n) - ln L_n)^2 over the free parameters, from many starts

Reported with every fit: how many starts reached the best optimum and how flat it is there, standard errors from the
Jacobian (s^2 (J'J)^-1, s^2 with n - p degrees of freedom), and a warning wherever the points cannot tell terms apart.
The objective is stated as 100 times the mean squared residual of ln L, as in the released code of 2602.05970.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from sparsedepth.scaling.law import DesignMatrix, Law, Stated, Term, cluster_effect, design, predict
from sparsedepth.scaling.solve import covariance, solve

LEVEL = 0.95
N_STARTS = 60
CLUSTER = "cluster"
"""The column of points that names what is not independent; absent where every point stands for itself."""
N_REWEIGHTED = 3
"""Rounds of variances from residuals and parameters from variances; further ones change no digit that is shown."""
FEW_CLUSTERS = 20
"""Below this many the percentile interval of a cluster bootstrap covers too seldom (Cameron, Gelbach, Miller 2008)."""
SAME = 1e-6
"""Costs that agree to this share are the same optimum."""

FACTOR = 2.0
"""An exponent whose 95% interval spans more than this factor is weakly constrained."""
COLLINEAR = 0.9
"""Predictors whose logarithms correlate more than this trade against each other."""
CONDITION = 1e3
"""A Jacobian (columns of length 1) with a larger condition number leaves some combination of parameters open."""
NEGLIGIBLE = 1e-3
"""A part of the loss below this many nat/token, at the points' geometric mean, counts as 0."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    unit: str
    value: float
    stderr: float | None
    """From the Jacobian; None where the parameter is fixed or cannot be told apart from the others."""
    lo: float | None
    hi: float | None
    """Student's 95% interval; of a positive quantity's logarithm, so that it stays positive."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    plan: DesignMatrix
    points: pd.DataFrame
    theta: np.ndarray
    """As `Law.names` orders them, (P,)."""
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
        """Degrees of freedom of the intervals: the clusters, or points, beyond the free parameters; at least 1."""
        return max(1, self.plan.n_units - int(self.law.free.sum()))

    @property
    def residuals(self) -> np.ndarray:
        """ln L of the law less that of each point, (N,)."""
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
        """Coefficients, exponents, E, and what each term adds at the geometric mean of its predictor."""
        return [self._parameter(stated) for stated in self.plan.stated()]

    def _parameter(self, stated: Stated) -> Parameter:
        value, error = float(stated.of(self.theta)), self._error(stated.weights)
        if error is None:
            return Parameter(name=stated.name, unit=stated.unit, value=value, stderr=None, lo=None, hi=None)
        half = min(self.t_critical * error, 300.0)  # beyond that exp overflows, and nothing is known of the value
        lo, hi = (float(stated.value(stated.weights @ self.theta + sign * half)) for sign in (-1, 1))
        stderr = value * error if stated.is_log else error
        return Parameter(name=stated.name, unit=stated.unit, value=value, stderr=stderr, lo=lo, hi=hi)

    def _error(self, weights_P: np.ndarray) -> float | None:
        """The standard error of a sum of parameters."""
        used = np.flatnonzero(weights_P)  # the others may be NaN
        variance = float(weights_P[used] @ self.covariance[np.ix_(used, used)] @ weights_P[used])
        return float(np.sqrt(variance)) if np.isfinite(variance) and variance > 0 else None

    @property
    def t_critical(self) -> float:
        return float(stdtrit(self.df, (1 + LEVEL) / 2))


def fit(points: pd.DataFrame, law: Law | None = None, n_starts: int = N_STARTS, seed: int = 0) -> Fit:
    """The law at the best optimum that `n_starts` random starts find. Deterministic in `seed`.

    A term whose predictor takes too few values to be identified is left out, with a warning. Raises ValueError for
    too few points, or where no term is left.
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
    return replace(draft, warnings=(*draft.warnings, *_doubts(draft, bool(best.converged[0]))))


def starts(plan: DesignMatrix, n_starts: int, generator: np.random.Generator) -> np.ndarray:
    """Random parameters, (R, P): exponents from 0.1 to 2.5, E from 20% to 95% of the lowest loss, the rest of the mean
    loss split at random among the terms. Fixed exponents stand at their value."""
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
    """The law without the terms that these points cannot identify, and why each was left out.

    A term c x^-a beside E needs three values of x; two suffice where a is fixed.
    """
    kept: list[Term] = []
    warnings: list[str] = []
    for term in law.terms:
        exponent = f"a_{term.symbol}"
        needed = 2 if exponent in law.fixed else 3
        values = sorted(set(points[term.column]))
        if len(values) >= needed:
            kept.append(term)
        elif len(values) == 1:
            warnings.append(
                f"{term.column} is {values[0]:g} at all {len(points)} points: the {term.name} term cannot be told "
                f"from E and is left out"
            )
        else:
            warnings.append(
                f"{term.column} takes the two values {values[0]:g} and {values[1]:g}, too few for {exponent}: the "
                f"{term.name} term is left out (--fix {exponent}=1 keeps it)"
            )
    if not kept:
        raise ValueError(f"no term of the law can be identified: {'; '.join(warnings)}")
    fixed = {name: value for name, value in law.fixed.items() if any(name == f"a_{term.symbol}" for term in kept)}
    return replace(law, terms=tuple(kept), fixed=fixed), warnings


def log_correlations(plan: DesignMatrix) -> dict[tuple[str, str], float]:
    """Correlation of the logarithms of each two predictors, by the terms' names."""
    return {
        (first.name, second.name): float(np.corrcoef(plan.z[i], plan.z[j])[0, 1])
        for (i, first), (j, second) in itertools.combinations(enumerate(plan.law.terms), 2)
    }


def _doubts(fitted: Fit, converged: bool) -> list[str]:
    """Every reason not to read the parameters as facts."""
    doubts = []
    of_clusters = fitted.plan.shared
    if of_clusters and of_clusters.n_clusters < FEW_CLUSTERS:
        doubts.append(
            f"{of_clusters.n_clusters} clusters are fewer than {FEW_CLUSTERS}: the bootstrap's intervals are too "
            f"narrow, lo and hi have Student's {fitted.df} degrees of freedom"
        )
    n_shapes = len(fitted.points.drop_duplicates(["d_model", "n_layers", "num_tokens"]))
    if of_clusters is None and n_shapes < fitted.n_points:
        doubts.append(
            f"{fitted.n_points} points have {n_shapes} shapes and budgets: where some of these lie off the law with "
            f"every seed alike, intervals are too narrow (--cluster d_model,n_layers)"
        )
    if not converged:
        doubts.append(f"the best optimum is not stationary (gradient cosine {fitted.gradient:.1e}); its valley is flat")
    if fitted.n_reached < 2:
        doubts.append(f"one of {fitted.n_starts} starts reached the best optimum: a better one may exist")
    for (first, second), value in log_correlations(fitted.plan).items():
        if abs(value) > COLLINEAR:
            doubts.append(
                f"log {first} and log {second} correlate at {value:.2f} (above {COLLINEAR}): their terms trade against "
                f"each other, and each exponent leans on the law's form"
            )
    if fitted.condition > CONDITION:
        doubts.append(
            f"the Jacobian's condition number is {fitted.condition:.2g}, above {CONDITION:g}: terms are not told apart"
        )
    for parameter in fitted.parameters():
        doubts += _doubt(parameter, fitted)
    return doubts


def _doubt(parameter: Parameter, fitted: Fit) -> Sequence[str]:
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
        return [f"{name} is at its bound, 0: the points leave nothing to it"]
    return []
