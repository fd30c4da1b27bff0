"""One model of the runs of one depth and outcome; every effect is a linear combination of its cells' values.

    y(cell, lr, seed) = a_c + b_c u + (kappa / 2) u^2 + rough(cell, lr) + block(seed) + e,     Var e = s_c^2

`u` is log lr in steps of the grid from the cell's chosen value. A cell's *value* is a_c + min over u of the curve, over
the values tried and half a step beyond: that at its own optimum. rough has a part for each lr and, as the cells differ
in curvature, one in proportion to u^2 / 2. Blocks are free; tuning runs are a block of their own.
Unknown: the scale of the noise (`Noise`), roughness rho = sd(rough) / s and the curvature kappa / s, which the
cells of a depth share. They are integrated over a grid (half-Cauchy .7; log-uniform). Given these all is normal, with

    u* = -b_c / kappa ~ N(0, omega^2),     omega^2 = min(.3^2 + 2 (rho^2 + 1 / tuning seeds) s^2 / kappa^2, 2.5^2)

the error that choosing the best of a grid makes. Without lr the values are the cells' means (Student's distribution).

Shapes: N runs, R rows (cell, lr, role), C cells, L points (cell, lr), G points of the grid, Q nodes of quadrature."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.special import gammaincinv, gammaln, ndtr

from sparsedepth.effects.verdict import Distribution

RHO = np.geomspace(0.1, 13.0, 12)
RHO_SCALE = 3.0
KAPPA = np.geomspace(0.02, 40.0, 15)
OWN_ERROR, MAX_ERROR = 0.3, 2.5
"""Steps: the least and the greatest sd of an optimum about the chosen value."""
OWN_CURVATURE = (0.0, 1.0)
"""Sd of a cell's own curvature, in units of that of the roughness: the data decide whether there is any."""
NEAR = 2.01
"""Steps from the chosen value within which a curve is a parabola."""
NEGLIGIBLE = 1e-4
"""Points of the grid with less than this of the greatest weight are left out."""
PRIOR_DF = (1.0, 2.0, 4.0)
LOG_VARIANCES = np.linspace(-3.0, 4.0, 15)
"""ln v0, about the median of the ln s_c^2."""
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True)
class Noise:
    """The variances of the cells: a mixture of scaled inverse chi^2, from the residuals of rows and seeds.

    y_rs = mean_r + block_s + e_rs,   s_c^2 = sum of squared residuals of a cell / its degrees of freedom d_c

    Variances are *moderated* (Smyth 2004, 'Linear models and empirical Bayes methods', section 3), drawn to those of
    the other cells as far as these agree: with 1 / sigma_c^2 ~ chi^2(d0) / (d0 v0),

    sigma_c^2 | s_c^2, d0, v0 ~ scaled inverse chi^2(d0 + d_c), scale (d0 v0 + d_c s_c^2) / (d0 + d_c)

    Deviates: limma plugs in moment estimates of d0 and v0, made for thousands of genes. Here they are a grid of H
    points, weighted by the likelihood of all s_c^2 (s_c^2 / v0 is an F of d_c and d0 degrees of freedom)."""

    s2_HC: np.ndarray
    df_HC: np.ndarray
    weight_H: np.ndarray
    scale_df: float
    """Degrees of freedom of the noise that all cells have in common."""
    s2: float
    """The mean square of all residuals."""
    df: float

    @property
    def s2_C(self) -> np.ndarray:
        return self.weight_H @ self.s2_HC


@dataclass(frozen=True)
class Fit:
    value_GC: np.ndarray
    cov_GCC: np.ndarray
    weight_G: np.ndarray
    outside_C: np.ndarray
    """The probability that the optimum lies beyond the values tried."""
    choice_C: np.ndarray
    """The variance of a cell's value about the expected outcome at its chosen lr."""
    noise: Noise
    n_C: np.ndarray
    """Result seeds at the chosen value (tuning seeds, where there are no others)."""
    group_C: np.ndarray
    """Cells with equal numbers are connected by common seeds."""
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
            return Distribution(mean_G, np.sqrt(variance_G), df_G, self.weight_G, share)
        # In designs with gaps the variance is not quite a sum over cells: in proportion.
        typical = float((weight_C**2 * self.noise.s2_C / self.n_C).sum())
        sd_H = np.sqrt(seeds_H * variance_G[0] / typical)
        df_H = seeds_H**2 / (part_HC**2 / self.noise.df_HC).sum(axis=1)
        return Distribution(np.full(len(sd_H), mean_G[0]), sd_H, df_H, self.noise.weight_H, seeds_share=1.0)

    def effect(self, setting: int, baseline: int) -> Distribution:
        """The distribution of the value of one cell minus that of another."""
        unit_CC = np.eye(len(self.n_C))
        return self.combine(unit_CC[setting] - unit_CC[baseline])

    def share_of_baseline(self, setting: int, baseline: int) -> float:
        """The squared loading of a setting's effect on the baseline that it shares with others."""
        variance_C = self.weight_G @ np.diagonal(self.cov_GCC, axis1=1, axis2=2)
        return float(variance_C[baseline] / (variance_C[baseline] + variance_C[setting]))


def fit(
    cell_N: np.ndarray, u_N: np.ndarray, seed_N: np.ndarray, y_N: np.ndarray, is_tuning_N: np.ndarray
) -> Fit | None:
    """The fit of the runs of a depth that have a finite outcome; None where they have no noise to judge by: no seed is
    repeated, or all agree. `cell_N`: 0 .. C - 1; `is_tuning_N`: whether a run served to choose the lr."""
    near = np.abs(u_N) <= NEAR
    cell_N, u_N, seed_N, y_N, role_N = (each[near] for each in (cell_N, u_N, seed_N, y_N, is_tuning_N))
    y_N = y_N - y_N.mean()
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
    at_CN = (cell_N == np.arange(n_cells)[:, None]) & (u_N == 0)
    results_CN = at_CN & ~role_N
    counted_CN = np.where(results_CN.any(axis=1, keepdims=True), results_CN, at_CN)
    n_C = np.array([len(np.unique(seed_N[counted_N])) for counted_N in counted_CN], dtype=float)
    group_C = _groups(cell_N, seed_N, n_cells)
    if has_curve := bool(np.ptp(u_R)):
        tuning_C = np.array([len(set(seed_N[(cell_N == c) & role_N])) or n_C[c] for c in range(n_cells)], dtype=float)
        values = _curves(
            information_RR, score_R, cell_R, u_R, s2_C / s2 / tuning_C, s2, noise.scale_df, len(np.unique(group_C))
        )
    else:
        level_RC, nothing_C = np.eye(n_cells)[cell_R], np.zeros(n_cells)
        inverse_CC = np.linalg.pinv(level_RC.T @ information_RR @ level_RC, hermitian=True)
        value_C = inverse_CC @ (level_RC.T @ score_R)
        values = value_C[None], s2 * inverse_CC[None], np.ones(1), nothing_C, nothing_C
    return Fit(*values, noise, n_C, group_C, has_curve)


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
    tuned_C: np.ndarray,
    s2: float,
    df: float,
    n_groups: int,
) -> tuple[np.ndarray, ...]:
    """The values' means and covariances at each point of the grid (roughness x curvature x noise), its weights, and of
    each cell `outside_C` and `choice_C`. `tuned_C`: the variance of its means over tuning seeds, in units of s^2."""
    n_cells = len(tuned_C)
    parts = _of_roughness(information_RR, score_R / np.sqrt(s2), cell_R, u_R, n_cells)
    _, rho_G, kappa_G = (grid.ravel() for grid in np.meshgrid(OWN_CURVATURE, RHO, KAPPA, indexing="ij"))
    precision_GTT, target_GTZ, square_GZZ, log_G = (np.repeat(part, len(KAPPA), axis=0) for part in parts)
    omega2_GC = OWN_ERROR**2 + 2 * (rho_G[:, None] ** 2 + tuned_C) / kappa_G[:, None] ** 2
    prior_GC = 1 / (kappa_G[:, None] ** 2 * np.minimum(omega2_GC, MAX_ERROR**2))
    slopes = np.arange(n_cells, 2 * n_cells)
    precision_GTT[:, slopes, slopes] += prior_GC
    inverse_GTT = np.linalg.inv(precision_GTT)
    mean_GTZ = inverse_GTT @ target_GTZ
    square_GZZ = square_GZZ - np.swapaxes(target_GTZ, 1, 2) @ mean_GTZ
    log_G = log_G + (np.log(prior_GC).sum(axis=1) - np.linalg.slogdet(precision_GTT)[1]) / 2

    # Noise: s^2 times df / chi^2(df). All but the data is in units of s, and kappa / s stays.
    scale_K = np.sqrt(df / (2 * gammaincinv(df / 2, ndtr(_NODES))))
    n_free = np.linalg.matrix_rank(information_RR, hermitian=True) - (n_cells - n_groups)
    side_KGZ = np.stack(np.broadcast_arrays(1 / scale_K[:, None], -kappa_G), axis=-1)
    square_KG = np.einsum("kgy,gyz,kgz->kg", side_KGZ, square_GZZ, side_KGZ)
    log_KG = log_G - square_KG / 2 - n_free * np.log(scale_K)[:, None] + np.log(_WEIGHTS)[:, None]
    weight_KG = np.exp(log_KG - log_KG.max())
    kept = weight_KG.max(axis=0) > NEGLIGIBLE
    weight_KG = weight_KG[:, kept] / weight_KG[:, kept].sum()
    mean_KGT = np.einsum("gtz,kgz->kgt", mean_GTZ[kept], side_KGZ[:, kept])
    value_KGC, cov_KGCC, outside_KGC, gain_KGC, choice_KGC = _values(
        mean_KGT, inverse_GTT[kept], kappa_G[kept], cell_R, u_R
    )
    unit_K = np.sqrt(s2) * scale_K
    gain_KGC = gain_KGC * unit_K[:, None, None]
    gain_C = np.einsum("kg,kgc->c", weight_KG, gain_KGC)
    choice_KGC = choice_KGC * unit_K[:, None, None] ** 2 + (gain_KGC - gain_C) ** 2
    return (
        (value_KGC * unit_K[:, None, None]).reshape(-1, n_cells),
        (cov_KGCC * unit_K[:, None, None, None] ** 2).reshape(-1, n_cells, n_cells),
        weight_KG.ravel(),
        np.einsum("kg,kgc->c", weight_KG, outside_KGC),
        np.einsum("kg,kgc->c", weight_KG, choice_KGC),
    )


def _of_roughness(
    information_RR: np.ndarray, score_R: np.ndarray, cell_R: np.ndarray, u_R: np.ndarray, n_cells: int
) -> tuple[np.ndarray, ...]:
    """At each roughness, which is integrated out but at the chosen values: the precision of levels, of slopes without
    their prior and of that roughness; what they explain of data and of u^2 / 2 (targets, squares); the log prior."""
    points, point_R = np.unique(np.stack([cell_R, u_R]), axis=1, return_inverse=True)
    rough_RL = np.eye(point_R.max() + 1)[point_R.ravel()][:, points[1] != 0]
    level_RC = np.eye(n_cells)[cell_R]
    curved_RC = level_RC * u_R[:, None] ** 2 / 2
    design_RT = np.concatenate([level_RC, level_RC * u_R[:, None], level_RC * (u_R == 0)[:, None]], axis=1)
    common_TT = np.zeros((3 * n_cells, 3 * n_cells))
    # The level of all cells is free, and no effect depends on it; nor on those of cells that share no seed.
    common_TT[:n_cells, :n_cells] = 1 / n_cells + 1e-7 * np.eye(n_cells)
    chosen = np.arange(2 * n_cells, 3 * n_cells)
    half_RZ = np.stack([np.linalg.pinv(information_RR, hermitian=True) @ score_R, u_R**2 / 2], axis=1)
    parts = []
    for own in OWN_CURVATURE:
        of_RL = np.concatenate([rough_RL, own * curved_RC], axis=1) if own else rough_RL
        inner_LL, to_rough_RL = of_RL.T @ information_RR @ of_RL, information_RR @ of_RL
        for rho in RHO:
            total_LL = inner_LL + np.eye(len(inner_LL)) / rho**2
            given_RR = information_RR - to_rough_RL @ np.linalg.solve(total_LL, to_rough_RL.T)
            log_det = np.linalg.slogdet(np.eye(len(inner_LL)) + rho**2 * inner_LL)[1]
            log_det += 2 * n_cells * np.log(rho)
            log_prior = np.log(rho / (RHO_SCALE**2 + rho**2)) - log_det / 2  # a step of the grid is one in ln rho
            explained_TR = design_RT.T @ given_RR
            precision_TT = explained_TR @ design_RT + common_TT
            precision_TT[chosen, chosen] += 1 / rho**2
            squares_ZZ = half_RZ.T @ given_RR @ half_RZ
            parts.append((precision_TT, explained_TR @ half_RZ, squares_ZZ, log_prior))
    return tuple(np.array(part) for part in zip(*parts, strict=True))


def _values(
    mean_KGT: np.ndarray, inverse_GTT: np.ndarray, kappa_G: np.ndarray, cell_R: np.ndarray, u_R: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Means and covariances of the cells' values, in units of s; the probability of an optimum beyond those tried; mean
    and variance of each value less the expected outcome at the chosen lr, a + rough."""
    n = mean_KGT.shape[-1] // 3
    low_C, high_C = (np.array([end(u_R[cell_R == c]) for c in range(n)]) for end in (np.min, np.max))
    a_KGC, b_KGC, rough_KGC = np.split(mean_KGT, 3, axis=-1)
    cov_aa, cov_ab, cov_bb = inverse_GTT[:, :n, :n], inverse_GTT[:, :n, n : 2 * n], inverse_GTT[:, n : 2 * n, n : 2 * n]
    cov_rb, cov_rr = (np.diagonal(inverse_GTT[:, m : m + n, 2 * n :], axis1=1, axis2=2) for m in (n, 2 * n))
    sd_GC = np.sqrt(np.diagonal(cov_bb, axis1=1, axis2=2))
    slope_GC = np.diagonal(cov_ab, axis1=1, axis2=2) / sd_GC  # of a, per sd of b
    kappa_G1 = kappa_G[:, None]
    best_KGCQ = -(b_KGC[..., None] + sd_GC[..., None] * _NODES) / kappa_G1[..., None]
    u_KGCQ = np.clip(best_KGCQ, low_C[:, None] - 0.5, high_C[:, None] + 0.5)
    gain_KGCQ = kappa_G1[..., None] * u_KGCQ * (u_KGCQ / 2 - best_KGCQ)
    curve_KGCQ = gain_KGCQ + slope_GC[..., None] * _NODES
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
    rough_slope_GC = cov_rb / sd_GC  # of the roughness at the chosen value, per sd of b
    gain_KGCQ = gain_KGCQ - rough_slope_GC[..., None] * _NODES
    gain_KGC = gain_KGCQ @ _WEIGHTS
    choice_KGC = (gain_KGCQ - gain_KGC[..., None]) ** 2 @ _WEIGHTS + cov_rr - rough_slope_GC**2
    return a_KGC + mean_KGC, cov_KGCC, outside_KGC, gain_KGC - rough_KGC, choice_KGC


def _groups(cell_N: np.ndarray, seed_N: np.ndarray, n_cells: int) -> np.ndarray:
    """Numbers of cells, equal where a chain of common seeds connects them."""
    has_CS = np.zeros((n_cells, seed_N.max() + 1), dtype=bool)
    has_CS[cell_N, seed_N] = True
    return connected_components(has_CS @ has_CS.T)[1]


def noise_of(row_N: np.ndarray, seed_N: np.ndarray, y_N: np.ndarray, cell_R: np.ndarray) -> Noise | None:
    """The noise of these runs; None where no seed is repeated, or runs of different seeds do not differ."""
    n_rows, n_seeds, n_cells = len(cell_R), int(seed_N.max()) + 1, int(cell_R.max()) + 1
    design = np.zeros((len(y_N), n_rows + n_seeds))
    design[np.arange(len(y_N)), row_N] = 1
    design[np.arange(len(y_N)), n_rows + seed_N] = 1
    size, right = np.linalg.eigh(design.T @ design)
    kept = size > 1e-9 * size[-1]
    left = design @ (right[:, kept] / np.sqrt(size[kept]))
    residual_N = y_N - left @ (left.T @ y_N)
    square_C = np.bincount(cell_R[row_N], residual_N**2, n_cells)
    df_C = np.bincount(cell_R[row_N], 1 - (left**2).sum(axis=1), n_cells)
    df = df_C.sum()
    if df < 0.5 or square_C.sum() / df <= 1e-20 * np.ptp(y_N) ** 2:
        return None
    has = df_C > 0.2
    if has.sum() <= 2:  # the residuals of two cells mirror each other: one estimate, equal for both by construction
        s2 = square_C.sum() / df
        return Noise(np.full((1, n_cells), s2), np.full((1, n_cells), df / 2), np.ones(1), scale_df=df, s2=s2, df=df)
    return _moderated(np.where(has, square_C / np.maximum(df_C, 1e-9), 0.0), np.where(has, df_C, 0.0))


def _moderated(own_C: np.ndarray, df_C: np.ndarray) -> Noise:
    """Cells without degrees of freedom have the prior alone."""
    has = df_C > 0
    own_C = np.maximum(own_C, 1e-5 * np.median(own_C[has]))  # agreement by chance is not certainty
    prior_df_H, log_v_H = (grid.ravel()[:, None] for grid in np.meshgrid(PRIOR_DF, LOG_VARIANCES, indexing="ij"))
    v_H = np.exp(np.median(np.log(own_C[has])) + log_v_H)
    log_H = log_f(own_C[has] / v_H, df_C[has], prior_df_H).sum(axis=1)
    weight_H = np.exp(log_H - log_H.max())
    kept = weight_H > NEGLIGIBLE
    total_HC = prior_df_H + df_C
    s2_HC = (prior_df_H * v_H + df_C * own_C) / total_HC
    weight_H = weight_H[kept] / weight_H[kept].sum()
    scale_df, s2, df = (float(each) for each in (total_HC[kept].min(), own_C @ df_C / df_C.sum(), df_C.sum()))
    return Noise(s2_HC[kept], total_HC[kept], weight_H, scale_df, s2, df)


def log_f(ratio_HC: np.ndarray, df_C: np.ndarray, prior_df_H: np.ndarray) -> np.ndarray:
    """The log density of s^2 / v, an F of (d, d0) degrees of freedom, up to terms of d and s^2 alone."""
    a_C, c_H = df_C / 2, prior_df_H / 2
    return (
        gammaln(a_C + c_H) - gammaln(c_H) + a_C * np.log(ratio_HC * df_C / (2 * c_H))
        - (a_C + c_H) * np.log1p(ratio_HC * df_C / (2 * c_H))
    )  # fmt: skip


def fit_of(parts: Sequence[dict[int, float]]) -> Fit | None:
    """The fit of these cells without a curve, from the outcome of each seed."""
    rows = [(number, 0.0, seed, value, False) for number, part in enumerate(parts) for seed, value in part.items()]
    return fit(*map(np.array, zip(*rows, strict=True))) if parts and all(parts) else None
