"""Fit the depth law by nonlinear least squares from several random starts, with the bootstrap of its parameters.

    minimise sum_n (ln L(theta, x_n) - ln L_n)^2 over the free parameters        (scipy.optimize.least_squares)

Reported with every fit: how many starts reached the best optimum, standard errors from the Jacobian (s^2 (J'J)^-1, s^2
with n - p degrees of freedom), and a warning wherever the points do not identify a term (`report`). The objective is
stated as 100 times the mean squared residual of ln L, as in the released code of 2602.05970.

The bootstrap resamples points (pairs), or whole clusters where the fit has them. Every replicate is refitted to
convergence from the optimum: those that stop early stay near their start, which makes intervals too narrow.

Shapes as in `law`; R starts or replicates, C clusters."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.scaling.law import DesignMatrix, FittedQuantity, Law, Term, design
from sparsedepth.scaling.nonlinear import Solved, solve
from sparsedepth.store.small_sample import LEVEL, t_critical

N_STARTS = 20
CLUSTER = "cluster"
"""The column of points that names clusters of dependent points; absent where all points are independent."""
N_REWEIGHTED = 3
"""Iterations of variances from residuals and parameters from variances; more change no printed digit."""
SAME = 1e-6
"""Relative difference of costs up to which optima are the same."""
TOLERANCE = 1e-10
"""Of a fit from one of many starts."""
NEGLIGIBLE = 1e-7
"""A parameter that changes ln L by less per unit has no effect: its term has vanished."""
ROUNDING = 1e-10
"""A root-mean-square residual of ln L below this is zero."""
TAILS = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
"""Of a percentile interval."""
UNIDENTIFIED = 1e7
"""Condition number of the Jacobian above which some combination of parameters is not identified."""


@dataclass(frozen=True, kw_only=True)
class ClusterEffect:
    """A random effect of each cluster on ln L, for generalised least squares:

        ln L_n = law(x_n) + u_c + e_n,      u_c ~ N(0, s_u^2) shared by the points of cluster c,    e_n ~ N(0, s_e^2)

    Least squares of r_n - (1 - sqrt(1 - lambda_c)) mean_c r is the maximum likelihood at given variances, with
    lambda_c = k_c s_u^2 / (k_c s_u^2 + s_e^2) of k_c points in the cluster."""

    index: np.ndarray
    """The cluster of each point, from 0, (N,)."""
    between: float = 0.0
    """s_u: standard deviation of ln L between clusters, about the law."""
    within: float = 1.0
    """s_e."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """k_c, (C,)."""
        return np.bincount(self.index)

    @cached_property
    def members(self) -> np.ndarray:
        """1 where a point is in a cluster, (N, C)."""
        return (self.index[:, None] == np.arange(len(self.sizes))).astype(float)

    def whitened(self, values: np.ndarray) -> np.ndarray:
        """Values of the points, (N,) or (N, P), less the share of their cluster's mean."""
        if self.between == 0:
            return values
        shared_C = self.sizes * self.between**2
        share_C = 1 - np.sqrt(1 - shared_C / (shared_C + self.within**2))
        mean_C = values.T @ self.members / self.sizes
        return values - (share_C * mean_C)[..., self.index].T


def cluster_effect(index_N: np.ndarray, residual_N: np.ndarray, n_free: int) -> ClusterEffect:
    """The variances from residuals, by the method of moments (analysis of variance). Parameters reduce the degrees of
    freedom between clusters, since width and depth do not vary within one."""
    k_C = np.bincount(index_N)
    mean_C = np.bincount(index_N, weights=residual_N) / k_C
    n, n_clusters = len(index_N), len(k_C)
    if n_clusters in (1, n):  # the two variances cannot be separated
        return ClusterEffect(index=index_N, within=np.sqrt((residual_N**2).sum() / max(1, n - n_free)))
    within = ((residual_N - mean_C[index_N]) ** 2).sum() / (n - n_clusters)
    between = (k_C * mean_C**2).sum() / max(1, n_clusters - n_free)
    k_mean = (n - (k_C**2).sum() / n) / max(1, n_clusters - 1)
    sd = np.sqrt(max(0.0, between - within) / k_mean)
    return ClusterEffect(index=index_N, between=sd, within=np.sqrt(within))


class Parameter(NamedTuple):
    name: str
    unit: str
    value: float
    stderr: float | None = None
    """From the Jacobian; None for a parameter that is fixed or not identified."""
    lo: float | None = None
    hi: float | None = None
    """Student's 95% interval; for a positive quantity, on its logarithm."""


@dataclass(frozen=True, kw_only=True)
class FittedLaw:
    plan: DesignMatrix
    points: pd.DataFrame
    clusters: ClusterEffect
    """Each point is its own where they are independent."""
    theta: np.ndarray
    """In the order of `Law.names`, (P,)."""
    covariance: np.ndarray
    """(P, P); zero for fixed parameters, NaN where they are not identified."""
    gradient: float
    """Largest cosine between the residual and a parameter's effect; 0 at an exact optimum."""
    n_starts: int
    n_reached: int
    """Starts that ended at this optimum."""
    condition: float
    """Of the Jacobian with columns of length 1."""
    dropped: tuple[str, ...]
    """Why each term that the points cannot identify was left out."""

    @property
    def law(self) -> Law:
        return self.plan.law

    @property
    def n_points(self) -> int:
        return len(self.plan.y)

    @property
    def has_clusters(self) -> bool:
        return CLUSTER in self.points.columns

    @property
    def df(self) -> int:
        """Degrees of freedom of the intervals: clusters, or points, minus free parameters; at least 1."""
        return max(1, len(self.clusters.sizes) - int(self.law.free.sum()))

    @property
    def objective(self) -> float:
        """100 times the mean squared residual of ln L."""
        return 100 * ((self.plan.at(self.theta)[0] - self.plan.y) ** 2).mean()

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Coefficients, exponents, E, and each term's contribution at the geometric mean of its predictor, by name."""
        return {quantity.name: self._parameter(quantity) for quantity in self.plan.quantities()}

    def _parameter(self, quantity: FittedQuantity) -> Parameter:
        value, weights_P = float(quantity.of(self.theta)), quantity.weights
        used = np.flatnonzero(weights_P)  # other rows of the covariance may be NaN
        variance = weights_P[used] @ self.covariance[np.ix_(used, used)] @ weights_P[used]
        if not (np.isfinite(variance) and variance > 0):
            return Parameter(quantity.name, quantity.unit, value)
        error = math.sqrt(variance)
        half = min(t_critical(self.df) * error, 300.0)  # exp overflows beyond it
        lo, hi = (float(quantity.value(weights_P @ self.theta + sign * half)) for sign in (-1, 1))
        return Parameter(quantity.name, quantity.unit, value, value * error if quantity.is_log else error, lo, hi)


def fit_law(points: pd.DataFrame, law: Law | None = None, n_starts: int = N_STARTS, seed: int = 0) -> FittedLaw:
    """The law at the best optimum from `n_starts` random starts. Deterministic in `seed`.

    A term whose predictor has too few values to be identified is left out. Raises ValueError for too few points, or if
    no term remains."""
    law, dropped = _identified(points, law or Law())
    plan = design(points, law)
    n_free = int(law.free.sum())
    if len(points) <= n_free:
        raise ValueError(f"{len(points)} points cannot fit {n_free} parameters; add points, fix or leave out terms")
    has_clusters = CLUSTER in points.columns
    clusters = ClusterEffect(index=pd.factorize(points[CLUSTER])[0] if has_clusters else np.arange(len(points)))
    start_RP = _starts(plan, n_starts, np.random.default_rng(seed))
    for step in range(1 + (N_REWEIGHTED if has_clusters else 0)):
        ends = [refit(plan, start_P, clusters) for start_P in start_RP]
        best = min(ends, key=lambda end: end.cost)
        if has_clusters and step < N_REWEIGHTED:
            clusters = cluster_effect(clusters.index, plan.at(best.theta_P)[0] - plan.y, n_free)
    covariance_PP, condition, gradient = _curvature(best)
    n_reached = sum(end.cost <= best.cost * (1 + SAME) + 1e-24 for end in ends)
    return FittedLaw(
        plan=plan, points=points, clusters=clusters, theta=best.theta_P, covariance=covariance_PP,
        gradient=gradient, n_starts=n_starts, n_reached=n_reached, condition=condition, dropped=tuple(dropped),
    )  # fmt: skip


def refit(
    plan: DesignMatrix, start_P: np.ndarray, clusters: ClusterEffect | None = None, weight_N: np.ndarray | None = None
) -> Solved:
    """The optimum reached from `start_P`, of whitened rows; `weight_N`: how often each point counts."""
    root_N = np.ones(len(plan.y)) if weight_N is None else np.sqrt(weight_N)

    def whitened(values: np.ndarray) -> np.ndarray:
        return (root_N * (clusters.whitened(values) if clusters else values).T).T

    def at(theta_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fitted_N, by_NP = plan.at(theta_P)
        return whitened(fitted_N), whitened(by_NP)

    return solve(at, whitened(plan.y), start_P, plan.law.free, TOLERANCE)


def _starts(plan: DesignMatrix, n_starts: int, generator: np.random.Generator) -> np.ndarray:
    """Random parameters, (R, P): exponents from 0.1 to 2.5, E from 20% to 95% of the lowest loss, the remaining mean
    loss split at random among the terms. Fixed exponents have their value."""
    law = plan.law
    loss_N = np.exp(plan.y)
    e_R = generator.uniform(0.2, 0.95, n_starts) * loss_N.min()
    share_RK = generator.dirichlet(np.ones(len(law.terms)), n_starts)
    g_RK = np.log((loss_N.mean() - e_R)[:, None] * np.maximum(share_RK, 1e-3))
    a_RK = generator.uniform(0.1, 2.5, (n_starts, len(law.terms)))
    start_RP = np.concatenate([np.log(e_R)[:, None], g_RK, a_RK], axis=1)
    for name, value in law.fixed.items():
        start_RP[:, law.names.index(name)] = value
    return start_RP


def _curvature(end: Solved) -> tuple[np.ndarray, float, float]:
    """At the optimum: s^2 (J'J)^-1 with s^2 = cost / (N - free parameters), the condition number of J with columns of
    length 1, and the largest cosine of such a column with the residual."""
    free_P, by_NP, n = end.free_P, end.jacobian_NP, len(end.residual_N)
    size_P = np.linalg.norm(by_NP, axis=0)
    moves_P = free_P & (size_P > NEGLIGIBLE * np.sqrt(n))
    unit_NP = by_NP[:, moves_P] / size_P[moves_P]
    _, singular, rotation = np.linalg.svd(unit_NP, full_matrices=False)
    condition = singular[0] / singular[-1] if singular[-1] > 0 else np.inf
    out_PP = np.where(free_P[:, None] & free_P, np.nan, 0.0)
    if condition < UNIDENTIFIED:
        inverse = (rotation.T / singular**2) @ rotation / np.outer(size_P[moves_P], size_P[moves_P])
        out_PP[np.ix_(moves_P, moves_P)] = end.cost / (n - free_P.sum()) * inverse
    is_exact = end.cost <= n * ROUNDING**2
    return out_PP, condition, 0.0 if is_exact else np.abs(end.residual_N @ unit_NP).max() / np.sqrt(end.cost)


def _identified(points: pd.DataFrame, law: Law) -> tuple[Law, list[str]]:
    """The law without the terms that these points cannot identify, and the reason for each: a term c x^-a in addition
    to E needs three values of x, or two with a fixed."""
    terms: list[Term] = []
    warnings: list[str] = []
    for term in law.terms:
        column, exponent = term.column, f"a_{term.symbol}"
        low, *others = sorted(set(points[column]))
        if not others:
            where = f"{column} is {low:g} at all {len(points)} points"
            warnings.append(f"{where}: the {term.name} term cannot be distinguished from E and is left out")
        elif len(others) == 1 and exponent not in law.fixed:
            where = f"{column} takes the two values {low:g} and {others[0]:g}, too few for {exponent}"
            warnings.append(f"{where}: the {term.name} term is left out (--fix {exponent}=1 keeps it)")
        else:
            terms.append(term)
    if not terms:
        raise ValueError(f"no term of the law can be identified: {'; '.join(warnings)}")
    fixed = {name: value for name, value in law.fixed.items() if name in {f"a_{term.symbol}" for term in terms}}
    return replace(law, terms=tuple(terms), fixed=fixed), warnings


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    theta: np.ndarray
    """One refit per row, (R, P)."""
    intervals: dict[str, tuple[float, float]]
    """95% percentile intervals by parameter."""


def bootstrap(fitted: FittedLaw, n_replicates: int, seed: int = 0) -> Bootstrap:
    """Refit resampled points, or clusters. Deterministic in `seed`. Raises ValueError for fewer than 20 replicates."""
    if n_replicates < 20:
        raise ValueError(f"{n_replicates} bootstrap replicates have no 95% interval; take 200 or more")
    n, generator = len(fitted.clusters.sizes), np.random.default_rng(seed)
    weight_RN = generator.multinomial(n, np.full(n, 1 / n), size=n_replicates)[:, fitted.clusters.index]
    theta_RP = np.array([refit(fitted.plan, fitted.theta, fitted.clusters, weight_N).theta_P for weight_N in weight_RN])
    intervals = {}
    for quantity in fitted.plan.quantities():
        if quantity.name not in fitted.law.fixed:
            lo, hi = np.quantile(quantity.of(theta_RP), TAILS)
            intervals[quantity.name] = lo, hi
    return Bootstrap(theta=theta_RP, intervals=intervals)
