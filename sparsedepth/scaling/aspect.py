"""The best depth per width at equal training FLOPs, from a ladder of shapes: a run each of many sizes.

    L = E + A N^-alpha + B D^-beta + k a^2 + (g + h c) a          (or ln L of the same right side)

N = C / 6D, which is FLOPs per token, so that equal N and D are equal FLOPs C; D: tokens; a = log2(n_layers / (d_model /
64)), the aspect; c = ln C less its mean. The best aspect at a budget is a*(c) = -(g + h c) / 2k, where k > 0 is shown:
its interval is Fieller's, the wider one of both forms of the law where neither is clearly better. It moves where h is
shown. Runs of a cluster (a shape, a training) may deviate from the law together: errors are by leaving out one cluster
at a time (CR3: Bell and McCaffrey 2002), with Student's distribution of clusters - P.

Sources of form: Hoffmann et al. 2203.15556, eq. 10, for N and D; the rest is ours.
Shapes: N runs, K terms (N, D), P parameters (E, ln A, ln B, alpha, beta, k, g, h)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.quantities.levels import ALPHA
from sparsedepth.scaling.nonlinear import At, Solved, power_law, solve
from sparsedepth.store.small_sample import t_critical, two_sided_p

N_PARAMETERS = 8
WIDTH = 64
"""Of a head: the unit of width, as in dials by depth."""
K, G, H = np.eye(N_PARAMETERS)[5:]
STARTS = (0.5, 0.85, 0.0)
"""Of E, as shares of the lowest loss; the last one keeps it at 0."""
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

    def linear(self, weight_P: np.ndarray) -> tuple[float, float, float, float]:
        """A combination of the parameters, its 95% interval and its p, the wider and the larger of the forms."""
        mean_G = np.array([weight_P @ fit.theta_P for fit in self.forms])
        error_G = np.sqrt([max(weight_P @ fit.covariance_PP @ weight_P, 1e-30) for fit in self.forms])
        half_G = error_G * [t_critical(fit.df) for fit in self.forms]
        p = max(two_sided_p(t, fit.df) for t, fit in zip(np.abs(mean_G) / error_G, self.forms, strict=True))
        return mean_G[0], (mean_G - half_G).min(), (mean_G + half_G).max(), p

    @cached_property
    def p_move(self) -> float:
        """Of h = 0."""
        return self.linear(H)[3]

    @property
    def moves(self) -> bool:
        return self.p_move < ALPHA and self.has_optimum

    @cached_property
    def has_optimum(self) -> bool:
        """Whether the loss is shown to rise on both sides: k > 0."""
        return self.linear(K)[1] > 0

    def loss_at(self, C_B: np.ndarray) -> np.ndarray:
        """At budgets [FLOPs], of one layer per 64 of width, where size and tokens grow alike from their means."""
        return power_law(self.main.theta_P[:5], np.tile((np.log(C_B) - self.middle) / 2, (2, 1)))[0]

    def best_at(self, budgets: Sequence[float]) -> list[Best]:
        """The best aspect at each budget [FLOPs]."""
        least, most, (k, g, h) = self.runs["aspect"].min(), self.runs["aspect"].max(), self.main.theta_P[5:].tolist()
        found = []
        for C in budgets:
            c, lo, hi = math.log(C) - self.middle, None, None
            estimate = -(g + h * c) / (2 * k)
            ends = [end for fit in self.forms for end in _optimum(fit, c)] if self.has_optimum else []
            if len(ends) == 2 * len(self.forms):
                lo = None if min(ends) < least - FAR else min(ends)
                hi = None if max(ends) > most + FAR else max(ends)
            found.append(Best(C, estimate if k > 0 else None, lo, hi, bool(least <= estimate <= most) and k > 0))
        return found

    def doublings(self, C: float) -> list[Doubling]:
        """From each whole aspect that was run, to twice as many layers per width."""
        low, high = math.floor(self.runs["aspect"].min()), math.ceil(self.runs["aspect"].max())
        slope_P = G + (math.log(C) - self.middle) * H
        return [
            Doubling(aspect, *self.linear(((aspect + 1) ** 2 - aspect**2) * K + slope_P)) for aspect in range(low, high)
        ]


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
    middle = log_C_N.mean()
    fits = [fit for is_log in (False, True) if (fit := _fit(runs, middle, is_log)) is not None]
    if not fits:
        raise ValueError("no law of size and tokens fits these runs")
    fits.sort(key=lambda fit: fit.square)
    log_weight = [-len(runs) / 2 * math.log(fit.square / fits[0].square) for fit in fits]
    likely = [fit for fit, log in zip(fits, log_weight, strict=True) if log > -CLEARLY]
    return AspectLaw(runs=runs, forms=likely, middle=middle)


def _law(runs: pd.DataFrame, middle: float, is_log: bool) -> At:
    """`is_log`: of ln L."""
    aspect_N, log_C_N = runs["aspect"].to_numpy(), np.log(runs["flops"].to_numpy())
    log_D_N = np.log(runs["tokens"].to_numpy())
    z_KN = np.stack([log_C_N - log_D_N, log_D_N])
    z_KN -= z_KN.mean(axis=1, keepdims=True)
    shape_NX = np.stack([aspect_N**2, aspect_N, aspect_N * (log_C_N - middle)], axis=1)

    def at(theta_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        law_N, by_NX = power_law(theta_P[:5], z_KN)
        law_N = np.maximum(law_N, 1e-9)
        if is_log:
            law_N, by_NX = np.log(law_N), by_NX / law_N[:, None]
        return law_N + shape_NX @ theta_P[5:], np.concatenate([by_NX, shape_NX], axis=1)

    return at


def _fit(runs: pd.DataFrame, middle: float, is_log: bool) -> AspectFit | None:
    """Coefficients k, g, h of the law of ln L are brought to nat/token at the mean loss."""
    loss_N = runs["loss"].to_numpy()
    law, y_N, lowest, ends = _law(runs, middle, is_log), np.log(loss_N) if is_log else loss_N, loss_N.min(), []
    for share in STARTS:
        part = math.log((1 - share) * lowest / 2)
        start_P = np.array([share * lowest, part, part, EXPONENT, EXPONENT, 0, 0, 0])
        ends.append(solve(law, y_N, start_P, np.arange(N_PARAMETERS) >= (share == 0)))
    within = [end for end in ends if end.theta_P[0] >= 0 and end.theta_P[3:5].min() > 0]
    if not within:
        return None
    end = min(within, key=lambda end: end.cost)
    index_N = pd.factorize(runs["cluster"])[0]
    scale_P = np.repeat([1.0, loss_N.mean() if is_log else 1.0], (5, 3))
    fitted_N = y_N - end.residual_N
    return AspectFit(
        theta_P=end.theta_P * scale_P,
        covariance_PP=_by_clusters(end, index_N) * np.outer(scale_P, scale_P),
        square=(((np.exp(fitted_N) if is_log else fitted_N) - loss_N) ** 2).sum(),
        df=max(1, int(index_N.max()) + 1 - int(end.free_P.sum())),
    )


def _by_clusters(end: Solved, index_N: np.ndarray) -> np.ndarray:
    """The covariance of the parameters by leaving out one cluster at a time, to first order (CR3)."""
    by_NP = end.jacobian_NP * end.free_P
    inverse_PP = np.linalg.pinv(by_NP.T @ by_NP)
    n_clusters = int(index_N.max()) + 1
    covariance_PP = np.zeros_like(inverse_PP)
    for cluster in range(n_clusters):
        own_XP, left_X = by_NP[index_N == cluster], end.residual_N[index_N == cluster]
        hat_XX = own_XP @ inverse_PP @ own_XP.T
        move_P = inverse_PP @ own_XP.T @ np.linalg.lstsq(np.eye(len(left_X)) - hat_XX, left_X, rcond=1e-6)[0]
        covariance_PP += np.outer(move_P, move_P)
    return covariance_PP * (n_clusters - 1) / n_clusters


def _optimum(fit: AspectFit, c: float) -> Sequence[float]:
    """Fieller's 95% interval of -(g + h c) / 2k; none where it is not bounded."""
    side_XP, t2 = np.stack([-G - c * H, 2 * K]), t_critical(fit.df) ** 2
    top, below = side_XP @ fit.theta_P
    (v_tt, v_tb), (_, v_bb) = side_XP @ fit.covariance_PP @ side_XP.T
    a, b, d = below**2 - t2 * v_bb, top * below - t2 * v_tb, top**2 - t2 * v_tt
    if a <= 0 or b**2 - a * d < 0:
        return ()
    root = math.sqrt(b**2 - a * d)
    return (b - root) / a, (b + root) / a
