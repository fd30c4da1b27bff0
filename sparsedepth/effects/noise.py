"""The noise of the runs of a depth: the variance between seeds of each cell.

y_rs = mean_r + block_s + e_rs,   s_c^2 = sum of squared residuals of a cell / its degrees of freedom d_c

Variances are *moderated* (Smyth 2004, 'Linear models and empirical Bayes methods', section 3), drawn to those of
the other cells as far as these agree: with 1 / sigma_c^2 ~ chi^2(d0) / (d0 v0),

sigma_c^2 | s_c^2, d0, v0 ~ scaled inverse chi^2(d0 + d_c), scale (d0 v0 + d_c s_c^2) / (d0 + d_c)

Deviates: limma plugs in moment estimates of d0 and v0, made for thousands of genes. Here they are a grid of H
points, weighted by the likelihood of all s_c^2 (s_c^2 / v0 is an F of d_c and d0 degrees of freedom).

Shapes: N runs, R rows (cell, lr, role), C cells, H points of the grid."""

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

PRIOR_DF = (1.0, 2.0, 4.0)
LOG_VARIANCES = np.linspace(-3.0, 4.0, 15)
"""ln v0, about the median of the ln s_c^2."""
NEGLIGIBLE = 1e-4
"""Points of the grid with less than this of the greatest weight are left out."""


@dataclass(frozen=True)
class Noise:
    """The variances of the cells: a mixture of scaled inverse chi^2."""

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


def noise_of(row_N: np.ndarray, seed_N: np.ndarray, y_N: np.ndarray, cell_R: np.ndarray) -> Noise | None:
    """The noise of these runs; None where no seed is repeated, or runs of different seeds do not differ."""
    n_rows, n_seeds, n_cells = len(cell_R), int(seed_N.max()) + 1, int(cell_R.max()) + 1
    design = np.concatenate([np.eye(n_rows)[row_N], np.eye(n_seeds)[seed_N]], axis=1)
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
        both_HC = np.ones((1, n_cells))
        return Noise(s2 * both_HC, df / 2 * both_HC, np.ones(1), scale_df=df, s2=s2, df=df)
    return _moderated(np.where(has, square_C / np.maximum(df_C, 1e-9), 0.0), np.where(has, df_C, 0.0))


def _moderated(own_C: np.ndarray, df_C: np.ndarray) -> Noise:
    """Cells without degrees of freedom have the prior alone."""
    has = df_C > 0
    own_C = np.maximum(own_C, 1e-5 * np.median(own_C[has]))  # agreement by chance is not certainty
    prior_df_H, log_v_H = (grid.ravel()[:, None] for grid in np.meshgrid(PRIOR_DF, LOG_VARIANCES, indexing="ij"))
    v_H = np.exp(np.median(np.log(own_C[has])) + log_v_H)
    # The log density of s^2 / v, an F of (d, d0) degrees of freedom, up to terms of d and s^2 alone.
    a_C, c_H, ratio_HC = df_C[has] / 2, prior_df_H / 2, own_C[has] * df_C[has] / (v_H * prior_df_H)
    log_HC = gammaln(a_C + c_H) - gammaln(c_H) + a_C * np.log(ratio_HC) - (a_C + c_H) * np.log1p(ratio_HC)
    log_H = log_HC.sum(axis=1)
    weight_H = np.exp(log_H - log_H.max())
    kept = weight_H > NEGLIGIBLE
    total_HC = prior_df_H + df_C
    s2_HC = (prior_df_H * v_H + df_C * own_C) / total_HC
    weight_H = weight_H[kept] / weight_H[kept].sum()
    df = df_C.sum()
    return Noise(s2_HC[kept], total_HC[kept], weight_H, total_HC[kept].min(), own_C @ df_C / df, df)
