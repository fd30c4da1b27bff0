"""The best depth per width at equal training FLOPs, from a ladder of shapes: a run each of many sizes.

    L = E + A N^-alpha + B D^-beta + k a^2 + (g + h c) a          (or ln L of the same right side)

N = C / 6D, which is FLOPs per token, so that equal N and D are equal FLOPs C; D: tokens; a = log2(n_layers / (d_model /
64)), the aspect; c = ln C less its mean. The best aspect at a budget is a*(c) = -(g + h c) / 2k, where k > 0 is shown:
its interval is Fieller's, the wider one of both forms of the law where neither is clearly better. It moves where h is
shown. Runs of a cluster (a shape, a training) may deviate from the law together: errors are by leaving out one cluster
at a time (CR3: Bell and McCaffrey 2002), with Student's distribution of clusters - P.

Sources of form: Hoffmann et al. 2203.15556, eq. 10, for N and D; the rest is ours.
Shapes: N runs, P parameters (E, ln A, alpha, ln B, beta, k, g, h)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from sparsedepth.quantities.levels import ALPHA
from sparsedepth.store.small_sample import t_critical, two_sided_p

N_PARAMETERS = 8
WIDTH = 64
"""Of a head: the unit of width, as in dials by depth."""
STARTS = (0.5, 0.85)
"""Of E, as shares of the lowest loss."""
EXPONENT = 0.3
"""Of N and D, from which a fit starts."""
MIN_ASPECTS = 4
FAR = 1.0
"""Doublings."""
CLEARLY = 4.0
"""A form whose weight is less than 1 / e^CLEARLY of the other's is left out."""


class Best(NamedTuple):
    """The best aspect at a budget, in log2 of layers per 64 of width."""

    flops: float
    estimate: float | None
    """None without a curvature."""
    lo: float | None
    hi: float | None
    """None where the runs do not bound it, or at more than FAR beyond those run."""
    is_within: bool
    """Whether the estimate lies between the aspects that were run."""


class Doubling(NamedTuple):
    """What twice the layers per width change the loss by, at equal FLOPs, from an aspect."""

    aspect: float
    estimate: float
    lo: float
    hi: float
    p: float


@dataclass(frozen=True, kw_only=True, eq=False)
class AspectFit:
    """One form of the law."""

    theta_P: np.ndarray
    covariance_PP: np.ndarray
    square: float
    df: int


@dataclass(frozen=True, kw_only=True, eq=False)
class AspectLaw:
    runs: pd.DataFrame
    forms: Sequence[AspectFit]
    """Those that are likely, the likelier first."""
    middle: float
    """Of ln C."""

    @property
    def main(self) -> AspectFit:
        return self.forms[0]

    @cached_property
    def p_move(self) -> float:
        """Of h = 0: the larger of the forms."""
        return max(_p(fit, np.eye(N_PARAMETERS)[7]) for fit in self.forms)

    @property
    def moves(self) -> bool:
        return self.p_move < ALPHA and self.has_optimum

    @property
    def has_optimum(self) -> bool:
        """Whether the loss is shown to rise on both sides: k > 0."""
        return all(fit.theta_P[5] > 0 and _p(fit, np.eye(N_PARAMETERS)[5]) < ALPHA for fit in self.forms)

    def loss_at(self, C_B: np.ndarray) -> np.ndarray:
        """At budgets [FLOPs], of one layer per 64 of width, where size and tokens grow alike from their means."""
        E, log_A, alpha, log_B, beta, *_ = self.main.theta_P
        half_B = (np.log(C_B) - self.middle) / 2
        return E + np.exp(log_A - alpha * half_B) + np.exp(log_B - beta * half_B)

    def best_at(self, budgets: Sequence[float]) -> list[Best]:
        """The best aspect at each budget [FLOPs]."""
        aspects = self.runs["aspect"]
        found = []
        for C in budgets:
            c = math.log(C) - self.middle
            ends = [_optimum(fit, c) for fit in self.forms]
            estimate = -(self.main.theta_P[6] + self.main.theta_P[7] * c) / (2 * self.main.theta_P[5])
            is_within = bool(aspects.min() <= estimate <= aspects.max()) and self.main.theta_P[5] > 0
            lo = hi = None
            if all(ends) and self.has_optimum:
                lo, hi = min(end[0] for end in ends if end), max(end[1] for end in ends if end)
                lo = None if lo < aspects.min() - FAR else lo
                hi = None if hi > aspects.max() + FAR else hi
            found.append(Best(C, estimate if self.main.theta_P[5] > 0 else None, lo, hi, is_within))
        return found

    def doublings(self, C: float) -> list[Doubling]:
        """From each whole aspect that was run, to twice as many layers per width."""
        c = math.log(C) - self.middle
        low, high = math.floor(self.runs["aspect"].min()), math.ceil(self.runs["aspect"].max())
        found = []
        for aspect in range(low, high):
            weight_P = np.zeros(N_PARAMETERS)
            weight_P[5:] = (aspect + 1) ** 2 - aspect**2, 1.0, c
            sides = [(fit, float(weight_P @ fit.theta_P), _error(fit, weight_P)) for fit in self.forms]
            halves = [t_critical(fit.df) * error for fit, _, error in sides]
            lo = min(middle - half for (_, middle, _), half in zip(sides, halves, strict=True))
            hi = max(middle + half for (_, middle, _), half in zip(sides, halves, strict=True))
            found.append(Doubling(aspect, sides[0][1], lo, hi, max(_p(fit, weight_P) for fit in self.forms)))
        return found


def aspect_law(runs: pd.DataFrame) -> AspectLaw:
    """From n_layers, d_model, tokens, flops (training), loss, cluster. Raises ValueError for too few runs, shapes or
    aspects, or a loss that does not fall."""
    runs = runs.assign(aspect=np.log2(WIDTH * runs["n_layers"] / runs["d_model"])).reset_index(drop=True)
    n_aspects, n_clusters = runs["aspect"].round(2).nunique(), runs["cluster"].nunique()
    if len(runs) <= N_PARAMETERS + 2 or n_clusters < MIN_ASPECTS + 1:
        raise ValueError(f"{len(runs)} runs of {n_clusters} shapes are too few for a law of {N_PARAMETERS} parameters")
    if n_aspects < MIN_ASPECTS:
        raise ValueError(f"{n_aspects} aspects (layers per width) were run, and {MIN_ASPECTS} are needed")
    for name in ("tokens", "flops"):
        if runs[name].nunique() < 2:
            raise ValueError(f"all runs have {name} {runs[name].iloc[0]:.3g}: a law needs several")
    log_C_N = np.log(runs["flops"])
    if np.polyfit(log_C_N, runs["loss"], 1)[0] >= 0:
        raise ValueError("the loss does not fall with FLOPs; tune lr at each size")
    middle = float(log_C_N.mean())
    fits = [fit for is_log in (False, True) if (fit := _fit(runs, middle, is_log)) is not None]
    if not fits:
        raise ValueError("no law of size and tokens fits these runs")
    fits.sort(key=lambda fit: fit.square)
    log_weight = [-len(runs) / 2 * math.log(fit.square / fits[0].square) for fit in fits]
    likely = [fit for fit, log in zip(fits, log_weight, strict=True) if log > -CLEARLY]
    return AspectLaw(runs=runs, forms=likely, middle=middle)


@dataclass(frozen=True, kw_only=True, eq=False)
class _RightSide:
    """The law's columns, logarithms less their mean, and its value at parameters."""

    n_N: np.ndarray
    t_N: np.ndarray
    shape_NX: np.ndarray
    """Columns of k, g, h."""
    is_log: bool

    def at(self, theta_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The right side and its derivatives, (N, P)."""
        E, log_A, alpha, log_B, beta, *shape = theta_P
        size_N, data_N = np.exp(log_A - alpha * self.n_N), np.exp(log_B - beta * self.t_N)
        law_N = np.maximum(E + size_N + data_N, 1e-9)
        by_law_NX = np.stack([np.ones(len(law_N)), size_N, -size_N * self.n_N, data_N, -data_N * self.t_N], axis=1)
        if self.is_log:
            by_law_NX /= law_N[:, None]
        first_N = np.log(law_N) if self.is_log else law_N
        return first_N + self.shape_NX @ np.array(shape), np.concatenate([by_law_NX, self.shape_NX], axis=1)

    def solved(self, y_N: np.ndarray, start_P: np.ndarray) -> tuple[np.ndarray, float]:
        """Parameters of least squares, and their sum."""
        end = least_squares(
            lambda theta_P: self.at(theta_P)[0] - y_N,
            start_P,
            jac=lambda theta_P: self.at(theta_P)[1],
            bounds=([0.0, -np.inf, 0.0, -np.inf, 0.0, *[-np.inf] * 3], np.inf),
            x_scale=np.array([1.0, 1.0, 0.1, 1.0, 0.1, 0.01, 0.01, 0.01]),
            max_nfev=200,
        )
        return end.x, 2 * float(end.cost)


def _right_side(runs: pd.DataFrame, middle: float, is_log: bool) -> _RightSide:
    aspect_N, log_C_N = runs["aspect"].to_numpy(), np.log(runs["flops"].to_numpy())
    log_D_N = np.log(runs["tokens"].to_numpy())
    log_N_N = log_C_N - log_D_N
    shape_NX = np.stack([aspect_N**2, aspect_N, aspect_N * (log_C_N - middle)], axis=1)
    return _RightSide(n_N=log_N_N - log_N_N.mean(), t_N=log_D_N - log_D_N.mean(), shape_NX=shape_NX, is_log=is_log)


def _fit(runs: pd.DataFrame, middle: float, is_log: bool) -> AspectFit | None:
    """`is_log`: in ln L; its coefficients k, g, h are brought to nat/token at the mean loss."""
    loss_N, side = runs["loss"].to_numpy(), _right_side(runs, middle, is_log)
    y_N = np.log(loss_N) if is_log else loss_N
    lowest = loss_N.min()
    ends = [
        side.solved(y_N, np.array([share * lowest, *[math.log((1 - share) * lowest / 2), EXPONENT] * 2, 0, 0, 0]))
        for share in STARTS
    ]
    theta_P, _ = min(ends, key=lambda end: end[1])
    if theta_P[2] <= 0 or theta_P[4] <= 0:
        return None
    fitted_N, by_NP = side.at(theta_P)
    index_N = pd.factorize(runs["cluster"])[0]
    free_P = np.array([theta_P[0] > 1e-6, *[True] * (N_PARAMETERS - 1)])
    scale_P = np.array([*[1.0] * 5, *[float(loss_N.mean()) if is_log else 1.0] * 3])
    covariance_PP = np.zeros((N_PARAMETERS, N_PARAMETERS))
    covariance_PP[np.ix_(free_P, free_P)] = _by_clusters(by_NP[:, free_P], y_N - fitted_N, index_N)
    left_N = (np.exp(fitted_N) if is_log else fitted_N) - loss_N
    return AspectFit(
        theta_P=theta_P * scale_P,
        covariance_PP=covariance_PP * np.outer(scale_P, scale_P),
        square=float((left_N**2).sum()),
        df=max(1, int(index_N.max()) + 1 - int(free_P.sum())),
    )


def _by_clusters(by_NP: np.ndarray, residual_N: np.ndarray, index_N: np.ndarray) -> np.ndarray:
    """The covariance of the parameters by leaving out one cluster at a time, to first order (CR3)."""
    inverse_PP = np.linalg.pinv(by_NP.T @ by_NP)
    n_clusters = int(index_N.max()) + 1
    covariance_PP = np.zeros_like(inverse_PP)
    for cluster in range(n_clusters):
        own_XP, left_X = by_NP[index_N == cluster], residual_N[index_N == cluster]
        hat_XX = own_XP @ inverse_PP @ own_XP.T
        move_P = inverse_PP @ own_XP.T @ np.linalg.lstsq(np.eye(len(left_X)) - hat_XX, left_X, rcond=1e-6)[0]
        covariance_PP += np.outer(move_P, move_P)
    return covariance_PP * (n_clusters - 1) / n_clusters


def _error(fit: AspectFit, weight_P: np.ndarray) -> float:
    return math.sqrt(max(float(weight_P @ fit.covariance_PP @ weight_P), 1e-30))


def _p(fit: AspectFit, weight_P: np.ndarray) -> float:
    return two_sided_p(abs(float(weight_P @ fit.theta_P)) / _error(fit, weight_P), fit.df)


def _optimum(fit: AspectFit, c: float) -> tuple[float, float] | None:
    """Fieller's 95% interval of -(g + h c) / 2k; None where it is not bounded."""
    top_P, below_P = np.zeros(N_PARAMETERS), np.zeros(N_PARAMETERS)
    top_P[6:], below_P[5] = (-1.0, -c), 2.0
    top, below = float(top_P @ fit.theta_P), float(below_P @ fit.theta_P)
    t2 = t_critical(fit.df) ** 2
    v_tt, v_tb, v_bb = (
        float(one @ fit.covariance_PP @ other) for one, other in ((top_P, top_P), (top_P, below_P), (below_P, below_P))
    )
    a, b, d = below**2 - t2 * v_bb, top * below - t2 * v_tb, top**2 - t2 * v_tt
    if a <= 0 or b**2 - a * d < 0:
        return None
    root = math.sqrt(b**2 - a * d)
    return (b - root) / a, (b + root) / a
