"""The depth law, its parts and its derivatives (2602.05970, section on the scaling of large models).

    L(m, l, D) = c_m m^-a_m + c_l l^-a_l + c_D D^-a_D + E

m: width d_model. l: n_layers x 100. D: training tokens, in millions: the paper's units of the coefficients [nat/token].
A fit uses centred logarithms z_k = ln x_k - mean ln x_k, because c_k and a_k are otherwise almost collinear:

    L = sum_k exp(g_k - a_k z_k) + exp(e),      c_k = exp(g_k + a_k mean ln x_k),      E = exp(e)

exp(g_k) > 0 is the contribution of term k at the geometric mean of its predictor.

Shapes: K terms, N points, P = 1 + 2 K parameters in the order e, g_1..g_K, a_1..a_K; R fits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from sparsedepth.scaling.nonlinear import LARGEST, power_law


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
    terms: tuple[Term, ...] = TERMS
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Exponents that are not fitted: {'a_l': 1.0}."""

    def __post_init__(self) -> None:
        known = {f"a_{term.symbol}" for term in self.terms}
        for name, value in self.fixed.items():
            if name not in known:
                raise ValueError(f"cannot fix {name!r}: the exponents of this law are {', '.join(sorted(known))}")
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"cannot fix {name}={value}: an exponent is a positive number, such as 1")
        if not self.terms:
            raise ValueError("a law without width, depth and data has nothing to fit; keep at least one term")

    @property
    def names(self) -> tuple[str, ...]:
        symbols = [term.symbol for term in self.terms]
        return ("e", *(f"g_{symbol}" for symbol in symbols), *(f"a_{symbol}" for symbol in symbols))

    @property
    def free(self) -> np.ndarray:
        return np.array([name not in self.fixed for name in self.names])


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
class DesignMatrix:
    """The points in the form that a fit uses."""

    law: Law
    z: np.ndarray
    """Centred logarithms of the predictors, (K, N)."""
    centre: np.ndarray
    """mean ln x of each term, (K,)."""
    y: np.ndarray
    """ln loss, (N,)."""

    def at(self, theta_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ln L of the law at each point, and its derivatives, (N, P)."""
        E = np.exp(np.clip(theta_P[0], -LARGEST, LARGEST))
        loss_N, by_NP = power_law(np.array([E, *theta_P[1:]]), self.z)
        by_NP[:, 0] *= E
        return np.log(loss_N), by_NP / loss_N[:, None]

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
    log_KN = np.log([term.factor * points[term.column].to_numpy(float) for term in law.terms])
    centre_K = log_KN.mean(axis=1)
    return DesignMatrix(law=law, z=log_KN - centre_K[:, None], centre=centre_K, y=np.log(points["loss"].to_numpy()))
