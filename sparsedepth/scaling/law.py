"""The depth law, its parts and its derivatives (2602.05970, section on the scaling of large models).

    L(m, l, D) = c_m m^-a_m + c_l (l - s)^-a_l + c_D D^-a_D + E

m: width d_model. l: n_layers, counted in hundredths of a layer (x 100); s: layers left out of the count, 0 or 2.
D: training tokens, in millions. These are the paper's units, in which the coefficients c are stated [nat/token].

A fit uses the same law with centred logarithms z_k = ln x_k - mean ln x_k, because c_k and a_k are otherwise almost
collinear:

    L = sum_k exp(g_k - a_k z_k) + exp(e),      c_k = exp(g_k + a_k mean ln x_k),      E = exp(e)

exp(g_k) is the contribution of term k at the geometric mean of its predictor. Contributions and E are positive by
construction.

Shapes: K terms, N points, R fits at a time, P = 2 K + 1 parameters in the order g_1..g_K, a_1..a_K, e.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Term:
    name: str
    symbol: str
    column: str
    factor: float
    """The column times this is the predictor x, in the unit in which the coefficient is stated."""
    unit: str


TERMS = (
    Term(name="width", symbol="m", column="d_model", factor=1.0, unit="d_model"),
    Term(name="depth", symbol="l", column="n_layers", factor=100.0, unit="n_layers x 100"),
    Term(name="data", symbol="D", column="num_tokens", factor=1e-6, unit="million tokens"),
)


@dataclass(frozen=True, kw_only=True)
class Law:
    """The terms of the law, fixed exponents, and how layers are counted."""

    terms: tuple[Term, ...] = TERMS
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Exponents that are not fitted: {'a_l': 1.0}."""
    minus_layers: float = 0.0
    """Layers that do not count, such as the first and the last."""

    def __post_init__(self) -> None:
        known = {f"a_{term.symbol}" for term in self.terms}
        for name, value in self.fixed.items():
            if name not in known:
                raise ValueError(f"cannot fix {name!r}: the exponents of this law are {', '.join(sorted(known))}")
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"cannot fix {name}={value}: an exponent is a positive number, such as 1")
        if not 0 <= self.minus_layers < np.inf:
            raise ValueError(f"minus_layers={self.minus_layers} must be 0 or more layers, such as 2")
        if not self.terms:
            raise ValueError("a law without width, depth and data has nothing to fit; keep at least one term")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters of a fit."""
        symbols = [term.symbol for term in self.terms]
        return (*(f"g_{symbol}" for symbol in symbols), *(f"a_{symbol}" for symbol in symbols), "e")

    def index(self, name: str) -> int:
        """The index of a parameter in `names`."""
        return self.names.index(name)

    @property
    def free(self) -> np.ndarray:
        return np.array([name not in self.fixed for name in self.names])

    def text(self) -> str:
        """L = c_m m^-a_m + c_l (l - 2)^-a_l + E, with a_l = 1."""
        parts = []
        for term in self.terms:
            predictor = f"(l - {self.minus_layers:g})" if term.name == "depth" and self.minus_layers else term.symbol
            parts.append(f"c_{term.symbol} {predictor}^-a_{term.symbol}")
        fixed = ", ".join(f"{name} = {value:g}" for name, value in self.fixed.items())
        return f"L = {' + '.join(parts)} + E{f', with {fixed}' if fixed else ''}"

    def predictor(self, term: Term, values: np.ndarray | float) -> np.ndarray:
        """x of a term from its column, in the law's unit; not positive where `minus_layers` leaves no layer."""
        shift = self.minus_layers if term.name == "depth" else 0.0
        return term.factor * (np.asarray(values, dtype=float) - shift)


@dataclass(frozen=True)
class FittedQuantity:
    """A reported quantity: a weighted sum of a fit's parameters, or its exponential."""

    name: str
    unit: str
    weights: np.ndarray
    """(P,)."""
    is_log: bool = True

    def of(self, theta: np.ndarray) -> np.ndarray:
        """Its value for each row of parameters."""
        return self.value(theta @ self.weights)

    def value(self, total: np.ndarray) -> np.ndarray:
        return np.exp(total) if self.is_log else total


@dataclass(frozen=True, kw_only=True)
class ClusterEffect:
    """The points of a cluster share a random effect u_c on ln L, normal with variance s_u^2, in addition to independent
    errors of variance s_e^2. Whitening subtracts from each residual the share lambda_c of its cluster's mean:

        lambda_c = k_c s_u^2 / (k_c s_u^2 + s_e^2),   k_c points in the cluster      (generalised least squares)
    """

    index: np.ndarray
    """The cluster of each point, (N,)."""
    between: float
    """s_u: standard deviation of ln L between clusters, about the law."""
    within: float
    """s_e."""

    @cached_property
    def members(self) -> np.ndarray:
        """1 where a point is in a cluster, (N, C)."""
        return (self.index[:, None] == np.arange(self.n_clusters)).astype(float)

    @property
    def n_clusters(self) -> int:
        return int(self.index.max()) + 1

    def mean_share(self, values: np.ndarray) -> np.ndarray:
        """lambda_c times the mean of the cluster, at each of its points; values (..., N)."""
        k_C = self.members.sum(axis=0)
        share_C = self.between**2 / (k_C * self.between**2 + self.within**2) if self.between else np.zeros_like(k_C)
        return (values @ self.members * share_C) @ self.members.T


def cluster_effect(index: np.ndarray, residual_N: np.ndarray, n_free: int) -> ClusterEffect:
    """The variances from residuals, by the method of moments (analysis of variance). Parameters reduce the degrees of
    freedom between clusters, since width and depth do not vary within one."""
    draft = ClusterEffect(index=index, between=0.0, within=1.0)
    k_C = draft.members.sum(axis=0)
    mean_C = residual_N @ draft.members / k_C
    n, n_clusters = len(index), len(k_C)
    if n == n_clusters:  # the two variances cannot be separated
        return replace(draft, within=float(np.sqrt((residual_N**2).sum() / max(1, n - n_free))))
    within = float(((residual_N - mean_C[index]) ** 2).sum()) / (n - n_clusters)
    between = float((k_C * mean_C**2).sum()) / max(1, n_clusters - n_free)
    k_mean = (n - float((k_C**2).sum()) / n) / max(1, n_clusters - 1)
    return ClusterEffect(
        index=index, between=float(np.sqrt(max(0.0, between - within) / k_mean)), within=float(np.sqrt(within))
    )


@dataclass(frozen=True, kw_only=True)
class DesignMatrix:
    """The points in the form that a fit uses."""

    law: Law
    z: np.ndarray
    """Centred logarithms of the predictors, (K, N)."""
    centre: np.ndarray
    """mean ln x of each term, (K,)."""
    y: np.ndarray
    """ln loss, (N,)."""
    shared: ClusterEffect | None = None
    """None where the points are independent."""

    @property
    def n_points(self) -> int:
        return len(self.y)

    @property
    def units(self) -> str:
        """The units of bootstrap and folds."""
        return "clusters" if self.shared else "points"

    @property
    def n_units(self) -> int:
        return self.shared.n_clusters if self.shared else self.n_points

    def quantities(self) -> list[FittedQuantity]:
        """Coefficients, exponents, E, and each term's contribution at the geometric mean of its predictor."""
        parameter = dict(zip(self.law.names, np.eye(len(self.law.names)), strict=True))
        quantities, parts = [], []
        for term, centre in zip(self.law.terms, self.centre, strict=True):
            g, a = parameter[f"g_{term.symbol}"], parameter[f"a_{term.symbol}"]
            quantities.append(FittedQuantity(f"c_{term.symbol}", f"nat/token x ({term.unit})^a", g + centre * a))
            quantities.append(FittedQuantity(f"a_{term.symbol}", "1", a, is_log=False))
            parts.append(FittedQuantity(f"{term.name}_part", "nat/token at mean", g))
        return [*quantities, FittedQuantity("E", "nat/token", parameter["e"]), *parts]


def design(points: pd.DataFrame, law: Law) -> DesignMatrix:
    """Points under a law. Raises ValueError where l - s is not positive."""
    x_KN = np.array([law.predictor(term, points[term.column].to_numpy()) for term in law.terms])
    if (x_KN <= 0).any():
        least = points["n_layers"].min()
        raise ValueError(f"minus_layers={law.minus_layers:g} leaves no layer of n_layers={least:g}; take fewer off")
    log_KN = np.log(x_KN)
    centre_K = log_KN.mean(axis=1)
    return DesignMatrix(law=law, z=log_KN - centre_K[:, None], centre=centre_K, y=np.log(points["loss"].to_numpy()))


def contributions(theta_RP: np.ndarray, z_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each term's contribution to the loss, (R, K, N), and E, (R,)."""
    n_terms = len(z_KN)
    g_RK, a_RK = theta_RP[:, :n_terms], theta_RP[:, n_terms : 2 * n_terms]
    return np.exp(g_RK[:, :, None] - a_RK[:, :, None] * z_KN), np.exp(theta_RP[:, -1])


def jacobian(theta_RP: np.ndarray, z_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ln L at every point, (R, N), and its derivative with respect to every parameter, (R, P, N)."""
    term_RKN, e_R = contributions(theta_RP, z_KN)
    loss_RN = term_RKN.sum(axis=1) + e_R[:, None]
    share_RKN = term_RKN / loss_RN[:, None]
    by_RPN = np.concatenate([share_RKN, -z_KN * share_RKN, (e_R[:, None] / loss_RN)[:, None]], axis=1)
    return np.log(loss_RN), by_RPN


def predict(theta_RP: np.ndarray, plan: DesignMatrix, points: pd.DataFrame) -> np.ndarray:
    """Loss [nat/token] at points, (R, N), under each row of parameters."""
    x_KN = np.array([plan.law.predictor(term, points[term.column].to_numpy()) for term in plan.law.terms])
    term_RKN, e_R = contributions(theta_RP, np.log(x_KN) - plan.centre[:, None])
    return term_RKN.sum(axis=1) + e_R[:, None]
