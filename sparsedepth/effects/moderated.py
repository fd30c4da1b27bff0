"""Moderated variances: contrasts of few seeds borrow strength from each other's variances.

The model is limma's (Smyth 2004, 'Linear models and empirical Bayes methods', section 3):

    s_j^2 | sigma_j^2 ~ sigma_j^2 chi^2(d_j) / d_j          1 / sigma_j^2 ~ chi^2(d0) / (d0 v0),   j = 1..J contrasts
    sigma_j^2 | s_j^2, d0, v0 ~ scaled inverse chi^2(d0 + d_j), scale (d0 v0 + d_j s_j^2) / (d0 + d_j)

Deviates: limma plugs in moment estimates of d0 and v0 (`squeezeVar`), made for thousands of genes. With 2 to 20
contrasts such intervals are too narrow: they cover 91 to 94%. Here (d0, ln v0) are integrated over a grid, each point
weighted by the likelihood of all s_j^2 (s_j^2 / v0 is an F of d_j and d0 degrees of freedom). The result is a mixture
of Student's distributions, approximated by the one Student's distribution with the same two-sided 5% and 1% points,
which gives the error and its degrees of freedom. A single contrast keeps its own.

Contrasts that share a baseline are not independent: the others' log likelihood is weighted by 1 / (1 + (J - 1) r^2),
r^2 the mean squared correlation of two contrasts over their seeds, minus its expectation by chance.

Shapes: J contrasts, P times V points of the grid (d0 and v0), S seeds.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, stdtr, stdtrit

from sparsedepth.effects.noise import log_f

PRIOR_DF = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1e4)
LOG_VARIANCES = np.linspace(-3.0, 4.0, 15)
"""ln v0, about the median of the ln s_j^2."""
TAILS = (0.05, 0.01)
"""Two-sided levels at which the mixture and its approximation agree: the interval's, and Holm's over five."""
_DFS = np.geomspace(1e5, 1.0, 400)
_RATIOS = (stdtrit(_DFS, 1 - TAILS[1] / 2) / stdtrit(_DFS, 1 - TAILS[0] / 2), _DFS)
SHARED = 0.25
"""r^2 of two contrasts with one baseline and equal noise: assumed where two seeds cannot show it."""


def squeeze(variances: Sequence[float], dfs: Sequence[float], shared: float = SHARED) -> tuple[np.ndarray, np.ndarray]:
    """The moderated variances of J estimates, from positive ones with these degrees of freedom (1 or more each), and
    their degrees of freedom, borrowed ones included. `shared` is r^2."""
    own_J, df_J = np.asarray(variances, dtype=float), np.asarray(dfs, dtype=float)
    n = len(own_J)
    if n < 2:
        return own_J, df_J
    s2_J = np.maximum(own_J, 1e-5 * np.median(own_J))  # agreement by chance is not certainty
    prior_df_P11 = np.reshape(PRIOR_DF, (-1, 1, 1))
    prior_V1 = np.exp(np.median(np.log(s2_J)) + LOG_VARIANCES)[:, None]
    likelihood_PVJ = log_f(s2_J / prior_V1, df_J, prior_df_P11)
    weight = 1 / (1 + (n - 1) * shared)
    log_PVJ = likelihood_PVJ.sum(axis=-1, keepdims=True) * weight + likelihood_PVJ * (1 - weight)
    weight_PVJ = np.exp(log_PVJ - log_PVJ.max(axis=(0, 1)))
    weight_PVJ /= weight_PVJ.sum(axis=(0, 1))
    total_P1J = prior_df_P11 + df_J
    error_PVJ = np.sqrt((prior_df_P11 * prior_V1 + df_J * s2_J) / total_P1J)
    inner_J, outer_J = (_half_width(weight_PVJ, error_PVJ, total_P1J, level) for level in TAILS)
    total_J = np.maximum(np.interp(outer_J / inner_J, *_RATIOS), df_J)
    return (inner_J / stdtrit(total_J, 1 - TAILS[0] / 2)) ** 2, total_J


def _half_width(weight_PVJ: np.ndarray, error_PVJ: np.ndarray, df_P1J: np.ndarray, level: float) -> np.ndarray:
    """The two-sided `level` point of a mixture of Student's distributions, by Newton's method on ln tail over ln width.
    It converges quadratically: the step after the last would be below 1e-9."""
    density_P1J = np.exp(gammaln((df_P1J + 1) / 2) - gammaln(df_P1J / 2)) / np.sqrt(np.pi * df_P1J)
    half_J = (weight_PVJ * error_PVJ * stdtrit(df_P1J, 1 - level / 2)).sum(axis=(0, 1))
    for _ in range(10):
        t_PVJ = half_J / error_PVJ
        tail_J = 2 * (weight_PVJ * stdtr(df_P1J, -t_PVJ)).sum(axis=(0, 1))
        slope_PVJ = weight_PVJ * t_PVJ * density_P1J * (1 + t_PVJ**2 / df_P1J) ** (-(df_P1J + 1) / 2)
        step_J = np.log(tail_J / level) * tail_J / (2 * slope_PVJ.sum(axis=(0, 1)))
        half_J = half_J * np.exp(step_J)
        if np.abs(step_J).max() < 1e-5:
            break
    return half_J


def shared_correlation(by_seed: Sequence[Sequence[float]]) -> float:
    """r^2 over the contrasts with the commonest number of seeds; SHARED if that is two."""
    counts = [len(values) for values in by_seed]
    n_seeds = max(set(counts), key=counts.count)
    values_JS = np.array([values for values in by_seed if len(values) == n_seeds], dtype=float)
    values_JS = values_JS - values_JS.mean(axis=1, keepdims=True)
    norm_J = np.sqrt((values_JS**2).sum(axis=1))
    values_JS = values_JS[norm_J > 0] / norm_J[norm_J > 0, None]
    if n_seeds < 3 or len(values_JS) < 2:
        return SHARED
    r_JJ = values_JS @ values_JS.T
    chance = 1 / (n_seeds - 1)
    mean = float((r_JJ[np.triu_indices(len(r_JJ), 1)] ** 2).mean())
    return max(0.0, (mean - chance) / (1 - chance))
