"""One model of the runs of one depth and outcome; every effect is a linear combination of its cells' values.

    y(cell, lr, seed) = a_c + b_c u + (kappa / 2) u^2 + rough(cell, lr) + block(seed) + e,     Var e = s_c^2

`u` is log lr in steps of the grid from the cell's chosen value. A cell's *value* is a_c + min over u of the curve, over
the values tried and half a step beyond: that at its own optimum. Blocks are free; tuning runs are a block of their own.
Unknown: the scale of the noise (`effects.noise`), roughness rho = sd(rough) / s and the curvature kappa / s, which the
cells of a depth share. They are integrated over a grid (half-Cauchy .7; log-uniform). Given these all is normal, with

    u* = -b_c / kappa ~ N(0, omega^2),     omega^2 = min(.3^2 + 2 (rho^2 + 1 / tuning seeds) s^2 / kappa^2, 2.5^2)

the error that choosing the best of a grid makes. Without lr the values are the cells' means (Student's distribution).

Shapes: N runs, R rows (cell, lr, role), C cells, L points (cell, lr), G points of the grid, Q nodes of quadrature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtr

from sparsedepth.effects.noise import Noise, noise_of

RHO = np.geomspace(0.1, 13.0, 12)
RHO_SCALE = 3.0
KAPPA = np.geomspace(0.02, 40.0, 15)
OWN_ERROR, MAX_ERROR = 0.3, 2.5
"""Steps: the least and the greatest sd of an optimum about the chosen value."""
NEAR = 2.01
"""Steps from the chosen value within which a curve is a parabola."""
NEGLIGIBLE = 1e-4
"""Points of the grid with less than this of the greatest weight are left out."""
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one depth that have a finite outcome."""

    cell_N: np.ndarray
    """0 .. C - 1."""
    u_N: np.ndarray
    """Steps of the lr grid from the cell's chosen value; 0 without tuning."""
    seed_N: np.ndarray
    y_N: np.ndarray
    is_tuning_N: np.ndarray
    """Whether a run served to choose the lr."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What the runs say of one number: a mixture of Student's distributions (normal ones: df of inf)."""

    mean_G: np.ndarray
    sd_G: np.ndarray
    df_G: np.ndarray
    weight_G: np.ndarray
    seeds_share: float
    """The part of the variance that seeds alone explain; the rest is the choice of lr."""

    def below(self, x_X: np.ndarray) -> np.ndarray:
        """The probability of less than each x."""
        z_XG = (x_X[:, None] - self.mean_G) / self.sd_G
        return (ndtr(z_XG) if np.isinf(self.df_G[0]) else stdtr(self.df_G, z_XG)) @ self.weight_G

    @property
    def estimate(self) -> float:
        return float(self.weight_G @ self.mean_G)

    @property
    def sd(self) -> float:
        """The standard error."""
        spread_G = self.sd_G**2 + (self.mean_G - self.estimate) ** 2
        return float(np.sqrt(self.weight_G @ spread_G))

    @property
    def p(self) -> float:
        """Two-sided."""
        (low,) = self.below(np.zeros(1)).tolist()
        return 2 * min(low, 1 - low)

    @property
    def df(self) -> float:
        """Typical degrees of freedom."""
        return float(self.weight_G @ np.minimum(self.df_G, 200.0))

    def quantile(self, share: float) -> float:
        (value,) = self.quantiles([share])
        return value

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """By refining a grid, whose last step is interpolated; precise to 1e-6 standard errors."""
        share_K = np.array(shares)
        half = 2 * float(self.weight_G @ self.sd_G)
        below_X = np.ones(1)
        while below_X[0] > share_K.min() or below_X[-1] < share_K.max():
            half *= 4
            x_X = self.estimate + half * np.linspace(-1, 1, 65)
            below_X = self.below(x_X)
        i_K = np.clip(np.searchsorted(below_X, share_K), 1, len(x_X) - 1)
        low_K, high_K, at = x_X[i_K - 1], x_X[i_K], np.arange(len(share_K))
        for _ in range(2):
            x_KX = np.linspace(low_K, high_K, 17, axis=1)
            below_KX = self.below(x_KX.ravel()).reshape(x_KX.shape)
            i_K = np.clip((below_KX < share_K[:, None]).sum(axis=1), 1, 16)
            low_K, high_K = x_KX[at, i_K - 1], x_KX[at, i_K]
        left_K, right_K = below_KX[at, i_K - 1], below_KX[at, i_K]
        return (low_K + (high_K - low_K) * (share_K - left_K) / (right_K - left_K)).tolist()


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The values of the cells of a depth, jointly."""

    value_GC: np.ndarray
    cov_GCC: np.ndarray
    weight_G: np.ndarray
    noise: Noise
    n_C: np.ndarray
    """Result seeds at the chosen value (tuning seeds, where there are no others)."""
    group_C: np.ndarray
    """Cells with equal numbers are connected by common seeds."""
    outside_C: np.ndarray
    """The probability that the optimum lies beyond the values tried."""
    has_curve: bool

    def combine(self, weight_C: np.ndarray) -> Distribution:
        """The distribution of a combination of the cells' values, whose weights add up to 0."""
        mean_G = self.value_GC @ weight_C
        variance_G = np.maximum(np.einsum("c,gcd,d->g", weight_C, self.cov_GCC, weight_C), 1e-300)
        part_HC = weight_C**2 * self.noise.s2_HC / self.n_C
        seeds_H = part_HC.sum(axis=1)
        if self.has_curve:
            share = float(min(self.noise.weight_H @ seeds_H / (self.weight_G @ variance_G), 1.0))
            df_G = np.full(len(mean_G), np.inf)
            return Distribution(
                mean_G=mean_G, sd_G=np.sqrt(variance_G), df_G=df_G, weight_G=self.weight_G, seeds_share=share
            )
        # In designs with gaps the variance is not quite a sum over cells: in proportion.
        typical = float((weight_C**2 * self.noise.s2_C / self.n_C).sum())
        return Distribution(
            mean_G=np.full(len(seeds_H), mean_G[0]),
            sd_G=np.sqrt(seeds_H * variance_G[0] / typical),
            df_G=seeds_H**2 / (part_HC**2 / self.noise.df_HC).sum(axis=1),
            weight_G=self.noise.weight_H,
            seeds_share=1.0,
        )

    def share_of_baseline(self, setting: int, baseline: int) -> float:
        """The squared loading of a setting's effect on the baseline that it shares with others."""
        variance_C = self.weight_G @ np.diagonal(self.cov_GCC, axis1=1, axis2=2)
        return float(variance_C[baseline] / (variance_C[baseline] + variance_C[setting]))


def fit(runs: Runs) -> Fit | None:
    """None where the runs have no noise to judge by: no seed is repeated, or all agree."""
    near = np.abs(runs.u_N) <= NEAR
    cell_N, u_N, seed_N = runs.cell_N[near], runs.u_N[near], runs.seed_N[near]
    y_N, role_N = runs.y_N[near] - runs.y_N[near].mean(), runs.is_tuning_N[near]
    n_cells = int(cell_N.max()) + 1
    rows, row_N = np.unique(np.stack([cell_N, np.round(u_N, 4), role_N]), axis=1, return_inverse=True)
    row_N, cell_R, u_R = row_N.ravel(), rows[0].astype(int), rows[1]
    seed_N = np.unique(np.stack([seed_N, role_N]), axis=1, return_inverse=True)[1].ravel()
    noise = noise_of(row_N, seed_N, y_N, cell_R)
    if noise is None:
        return None
    s2_C = noise.s2_C
    s2 = float(np.exp(np.log(s2_C).mean()))
    information_RR, score_R = _information(row_N, seed_N, y_N, (s2 / s2_C)[cell_R])
    n_C = np.array([_n_seeds(seed_N, role_N, (cell_N == c) & (u_N == 0)) for c in range(n_cells)], dtype=float)
    if not np.ptp(u_R):
        level_RC = np.eye(n_cells)[cell_R]
        inverse_CC = np.linalg.pinv(level_RC.T @ information_RR @ level_RC, hermitian=True)
        value_GC, cov_GCC = (inverse_CC @ (level_RC.T @ score_R))[None], s2 * inverse_CC[None]
        weight_G, outside_C = np.ones(1), np.zeros(n_cells)
    else:
        tuning_C = np.array([len(set(seed_N[(cell_N == c) & role_N])) or n_C[c] for c in range(n_cells)], dtype=float)
        value_GC, cov_GCC, weight_G, outside_C = _curves(
            information_RR, score_R, cell_R, u_R, s2_C / s2 / tuning_C, s2, noise.scale_df, n_cells
        )
    return Fit(
        value_GC=value_GC,
        cov_GCC=cov_GCC,
        weight_G=weight_G,
        outside_C=outside_C,
        has_curve=bool(np.ptp(u_R)),
        noise=noise,
        n_C=n_C,
        group_C=_groups(cell_N, seed_N, n_cells),
    )


def _information(
    row_N: np.ndarray, seed_N: np.ndarray, y_N: np.ndarray, weight_R: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The information of the row means and their score, with a free level for each seed, in units of s^2."""
    count_RS = np.zeros((len(weight_R), seed_N.max() + 1))
    total_RS = np.zeros_like(count_RS)
    np.add.at(count_RS, (row_N, seed_N), 1)
    np.add.at(total_RS, (row_N, seed_N), y_N)
    count_RS, total_RS = weight_R[:, None] * count_RS, weight_R[:, None] * total_RS
    of_seed_S = count_RS.sum(axis=0)
    information_RR = np.diag(count_RS.sum(axis=1)) - (count_RS / of_seed_S) @ count_RS.T
    score_R = total_RS.sum(axis=1) - (count_RS / of_seed_S) @ total_RS.sum(axis=0)
    return information_RR, score_R


def _curves(
    information_RR: np.ndarray,
    score_R: np.ndarray,
    cell_R: np.ndarray,
    u_R: np.ndarray,
    choice_C: np.ndarray,
    s2: float,
    df: float,
    n_cells: int,
) -> tuple[np.ndarray, ...]:
    """The values' means and covariances at each point of the grid (roughness x curvature x noise)."""
    s = np.sqrt(s2)
    _, point_R = np.unique(np.stack([cell_R, u_R]), axis=1, return_inverse=True)
    rough_RL = np.eye(point_R.max() + 1)[point_R.ravel()]
    level_RC = np.eye(n_cells)[cell_R]
    design_RT = np.concatenate([level_RC, level_RC * u_R[:, None]], axis=1)
    target_RZ = np.stack([score_R / s, information_RR @ (u_R**2 / 2)], axis=1)
    common = np.zeros((2 * n_cells, 2 * n_cells))
    common[:n_cells, :n_cells] = 1 / n_cells  # the level of all cells is free, and no effect depends on it
    inner_LL = rough_RL.T @ information_RR @ rough_RL
    to_rough_RL = information_RR @ rough_RL
    precisions, targets, squares, log_priors = [], [], [], []
    half_RZ = np.stack([np.linalg.pinv(information_RR, hermitian=True) @ target_RZ[:, 0], u_R**2 / 2], axis=1)
    for rho in RHO:
        total_LL = inner_LL + np.eye(len(inner_LL)) / rho**2
        given_RR = information_RR - to_rough_RL @ np.linalg.solve(total_LL, to_rough_RL.T)
        precisions.append(design_RT.T @ given_RR @ design_RT + common)
        targets.append(design_RT.T @ given_RR @ half_RZ)
        squares.append(half_RZ.T @ given_RR @ half_RZ)
        log_det = np.linalg.slogdet(np.eye(len(inner_LL)) + rho**2 * inner_LL)[1]
        # A step of the grid is one in ln rho.
        log_priors.append(np.log(rho / (RHO_SCALE**2 + rho**2)) - log_det / 2)
    rho_G, kappa_G = (grid.ravel() for grid in np.meshgrid(RHO, KAPPA, indexing="ij"))
    at_G = np.repeat(np.arange(len(RHO)), len(KAPPA))
    omega2_GC = OWN_ERROR**2 + 2 * (rho_G[:, None] ** 2 + choice_C) / kappa_G[:, None] ** 2
    prior_GC = 1 / (kappa_G[:, None] ** 2 * np.minimum(omega2_GC, MAX_ERROR**2))
    precision_GTT = np.array(precisions)[at_G]
    slopes = np.arange(n_cells, 2 * n_cells)
    precision_GTT[:, slopes, slopes] += prior_GC
    inverse_GTT = np.linalg.inv(precision_GTT)
    target_GTZ = np.array(targets)[at_G]
    mean_GTZ = inverse_GTT @ target_GTZ
    square_GZZ = np.array(squares)[at_G] - np.swapaxes(target_GTZ, 1, 2) @ mean_GTZ
    log_G = np.array(log_priors)[at_G] + (np.log(prior_GC).sum(axis=1) - np.linalg.slogdet(precision_GTT)[1]) / 2

    # Noise: s^2 times df / chi^2(df). All but the data is in units of s, and kappa / s stays.
    scale_K = np.sqrt(df / (2 * gammaincinv(df / 2, ndtr(_NODES))))
    n_free = np.linalg.matrix_rank(information_RR, hermitian=True) - (n_cells - 1)
    data_KG = 1 / scale_K[:, None]
    square_KG = (
        square_GZZ[:, 0, 0] * data_KG**2
        - 2 * kappa_G * square_GZZ[:, 0, 1] * data_KG
        + kappa_G**2 * square_GZZ[:, 1, 1]
    )
    log_KG = log_G - square_KG / 2 - n_free * np.log(scale_K)[:, None] + np.log(_WEIGHTS)[:, None]
    weight_KG = np.exp(log_KG - log_KG.max())
    kept = weight_KG.max(axis=0) > NEGLIGIBLE
    weight_KG, kappa_G, mean_GTZ, inverse_GTT = weight_KG[:, kept], kappa_G[kept], mean_GTZ[kept], inverse_GTT[kept]
    mean_KGT = mean_GTZ[:, :, 0] * data_KG[:, :, None] - kappa_G[:, None] * mean_GTZ[:, :, 1]
    low_C = np.array([u_R[cell_R == c].min() for c in range(n_cells)])
    high_C = np.array([u_R[cell_R == c].max() for c in range(n_cells)])
    value_KGC, cov_KGCC, outside_KGC = _values(mean_KGT, inverse_GTT, kappa_G, low_C, high_C)
    weight_KG = weight_KG / weight_KG.sum()
    unit_K = s * scale_K
    return (
        (value_KGC * unit_K[:, None, None]).reshape(-1, n_cells),
        (cov_KGCC * unit_K[:, None, None, None] ** 2).reshape(-1, n_cells, n_cells),
        weight_KG.ravel(),
        np.einsum("kg,kgc->c", weight_KG, outside_KGC),
    )


def _values(
    mean_KGT: np.ndarray, inverse_GTT: np.ndarray, kappa_G: np.ndarray, low_C: np.ndarray, high_C: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Means and covariances of the cells' values, in units of s; the probability of an optimum beyond those tried."""
    n = len(low_C)
    a_KGC, b_KGC = mean_KGT[..., :n], mean_KGT[..., n:]
    cov_aa, cov_ab, cov_bb = inverse_GTT[:, :n, :n], inverse_GTT[:, :n, n:], inverse_GTT[:, n:, n:]
    sd_GC = np.sqrt(np.diagonal(cov_bb, axis1=1, axis2=2))
    slope_GC = np.diagonal(cov_ab, axis1=1, axis2=2) / sd_GC  # of a, per sd of b
    kappa_G1 = kappa_G[:, None]
    best_KGCQ = -(b_KGC[..., None] + sd_GC[..., None] * _NODES) / kappa_G1[..., None]
    u_KGCQ = np.clip(best_KGCQ, low_C[:, None] - 0.5, high_C[:, None] + 0.5)
    curve_KGCQ = kappa_G1[..., None] * u_KGCQ * (u_KGCQ / 2 - best_KGCQ) + slope_GC[..., None] * _NODES
    mean_KGC = curve_KGCQ @ _WEIGHTS
    variance_KGC = (curve_KGCQ - mean_KGC[..., None]) ** 2 @ _WEIGHTS
    u_KGC = u_KGCQ[..., len(_NODES) // 2]
    cross = u_KGC[..., None, :] * cov_ab  # cov(a_c, b_d u_d)
    cov_KGCC = cov_aa + cross + np.swapaxes(cross, -1, -2) + u_KGC[..., :, None] * cov_bb * u_KGC[..., None, :]
    at = np.arange(n)
    cov_KGCC[..., at, at] = np.diagonal(cov_aa, axis1=1, axis2=2) - slope_GC**2 + variance_KGC
    sd_u = sd_GC / kappa_G1
    best_KGC = -b_KGC / kappa_G1
    outside_KGC = ndtr((low_C - best_KGC) / sd_u) + ndtr((best_KGC - high_C) / sd_u)
    return a_KGC + mean_KGC, cov_KGCC, outside_KGC


def _n_seeds(seed_N: np.ndarray, is_tuning_N: np.ndarray, of_cell_N: np.ndarray) -> int:
    results = of_cell_N & ~is_tuning_N
    return len(set(seed_N[results if results.any() else of_cell_N].tolist()))


def _groups(cell_N: np.ndarray, seed_N: np.ndarray, n_cells: int) -> np.ndarray:
    """Numbers of cells, equal where a chain of common seeds connects them."""
    has_CS = np.zeros((n_cells, seed_N.max() + 1), dtype=bool)
    has_CS[cell_N, seed_N] = True
    group_C = np.arange(n_cells)
    for _ in range(n_cells):
        group_S = np.where(has_CS, group_C[:, None], n_cells).min(axis=0)
        group_C = np.where(has_CS, group_S, n_cells).min(axis=1)
    return group_C
