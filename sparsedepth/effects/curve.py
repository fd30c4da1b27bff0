"""The values of cells at the optima of their curves in log lr: a part of the fit of a depth (`effects.fit`).

    y(cell, lr) = a_c + b_c u + (kappa / 2) u^2 + rough(cell, lr),     value = a_c + min over u of the curve

`u` is log lr in steps of the grid from the cell's chosen value, within two of it; the least is over the values tried
and half a step beyond. rough has a part for each lr and, as cells differ in curvature, one in proportion to u^2 / 2.
Roughness rho = sd(rough) / s and curvature kappa / s, which the cells of a depth share, are integrated over a grid
(half-Cauchy .7; log-uniform). Given these all is normal, with the error that choosing the best of a grid makes:

    u* = -b_c / kappa ~ N(0, omega^2),     omega^2 = min(.3^2 + 2 (rho^2 + 1 / tuning seeds) s^2 / kappa^2, 2.5^2)

Beyond its optimum a curve may be steeper, ln steepness ~ N(0, ln 2.5), as near divergence: there u is stretched by the
root of the steepness, so that the same parabola holds, and fits at several steepnesses are weighed by their evidence.

Shapes: R rows (cell, lr, role), C cells, L points (cell, lr), T = 3 C parameters (level a, slope b, roughness
at the chosen value), G points of the grid, K scales of the noise, Q nodes of quadrature, P steepnesses."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.special import gammaincinv, logsumexp, ndtr

from sparsedepth.effects.noise import NEGLIGIBLE

RHO = np.geomspace(0.1, 13.0, 12)
RHO_SCALE = 3.0
KAPPA = np.geomspace(0.02, 40.0, 15)
OWN_ERROR, MAX_ERROR = 0.3, 2.5
"""Steps: the least and the greatest sd of an optimum about the chosen value."""
OWN_CURVATURE = (0.0, 1.0)
"""Sd of a cell's own curvature, in units of that of the roughness: the data decide whether there is any."""
STEEPNESS, STEEPNESS_SD = (1.0, 4.0, 16.0), np.log(2.5)
"""Curvature beyond the optimum over that before it, and the sd of its logarithm."""
KINKS = 3
"""Times that the optima are put in."""
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


class Rows(NamedTuple):
    """The rows of a depth, and what the runs say of their means, with a free level for each seed, in units of the
    noise."""

    cell_R: np.ndarray
    u_R: np.ndarray
    information_RR: np.ndarray
    score_R: np.ndarray

    @property
    def level_RC(self) -> np.ndarray:
        """1 where a row is of a cell."""
        return np.eye(self.cell_R.max() + 1)[self.cell_R]

    @property
    def ends(self) -> np.ndarray:
        """The lowest and the highest value tried of each cell, (2, C)."""
        of_cells = [self.u_R[of_R > 0] for of_R in self.level_RC.T]
        return np.array([(of_cell.min(), of_cell.max()) for of_cell in of_cells]).T


def distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct combinations of values, a column each, and the number of each run's."""
    found, number_N = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return found, number_N.ravel()


class Normal(NamedTuple):
    """The parameters at each point of a grid, normal: their mean is precision^-1 target. Of Z = 2 causes: the data in
    units of s, and minus the curvature, which the curve's known part u^2 / 2 has."""

    precision_GTT: np.ndarray
    target_GTZ: np.ndarray
    square_GZZ: np.ndarray
    """Squares that the parameters are to explain."""
    log_G: np.ndarray
    """The log weight."""


class Optima(NamedTuple):
    """Of each cell at each point, in units of s."""

    value_KGC: np.ndarray
    cov_KGCC: np.ndarray
    outside_KGC: np.ndarray
    """The probability that the optimum lies beyond the values tried."""
    gain_KGC: np.ndarray
    """The value less the expected outcome at the chosen lr, a + rough: the mean, and the variance."""
    gain_variance_KGC: np.ndarray


class Values(NamedTuple):
    """The values of the cells, normal at each point of the grid."""

    mean_GC: np.ndarray
    cov_GCC: np.ndarray
    weight_G: np.ndarray
    outside_C: np.ndarray
    """The probability that the optimum lies beyond the values tried."""
    gain_C: np.ndarray
    """A cell's value less the expected outcome at its chosen lr."""
    choice_C: np.ndarray
    """The variance of a cell's value about the expected outcome at its chosen lr."""


class Curves(NamedTuple):
    """At one steepness."""

    values: Callable[[], Values]
    """Called for those that have a weight."""
    best_C: np.ndarray
    """The optimum of each cell."""
    evidence: float
    """The logarithm of the probability of the data, up to a constant."""


def curves_of(rows: Rows, tuned_C: np.ndarray, s2: float, df: float, n_groups: int) -> Values:
    """The values over steepnesses s: beyond a cell's optimum u is stretched by the root of s, where the curve is a
    parabola; its kink is put in from the fit before. `tuned_C`: the variance of a cell's means over tuning seeds, in
    units of s^2."""
    fit_at = partial(_one_steepness, tuned_C=tuned_C, s2=s2, df=df, n_groups=n_groups)
    parts = [_at_steepness(rows, steepness, fit_at) for steepness in STEEPNESS]
    log_P = np.array([part.evidence for part in parts]) - np.log(STEEPNESS) ** 2 / (2 * STEEPNESS_SD**2)
    weight_P = np.exp(log_P - log_P.max())
    weight_P = np.where(weight_P > NEGLIGIBLE, weight_P, 0.0)
    weight_P /= weight_P.sum()  # of what is kept: a part without a weight would be missing in the tails
    weighed = [(weight, part.values()) for weight, part in zip(weight_P, parts, strict=True) if weight]
    means = [sum(weight * getattr(of, name) for weight, of in weighed) for name in Values._fields[3:]]
    return Values(
        np.concatenate([of.mean_GC for _, of in weighed]),
        np.concatenate([of.cov_GCC for _, of in weighed]),
        np.concatenate([weight * of.weight_G for weight, of in weighed]),
        *means,
    )


def _at_steepness(rows: Rows, steepness: float, fit_at: Callable[[Rows], Curves]) -> Curves:
    kink_C = np.zeros(rows.cell_R.max() + 1)
    for _ in range(1 if steepness == 1 else KINKS):
        origin_C = _stretched(0.0, kink_C, steepness)
        u_R = _stretched(rows.u_R, kink_C[rows.cell_R], steepness) - origin_C[rows.cell_R]
        found = fit_at(rows._replace(u_R=np.round(u_R, 9)))
        kink_C = np.clip(_stretched(found.best_C + origin_C, kink_C, 1 / steepness), -1, 1)
    return found


def _stretched(u: np.ndarray | float, kink: np.ndarray, steepness: float) -> np.ndarray:
    return np.where(u > kink, kink + (u - kink) * np.sqrt(steepness), u)


def _one_steepness(rows: Rows, tuned_C: np.ndarray, s2: float, df: float, n_groups: int) -> Curves:
    """The values over the grid (own curvature x roughness x curvature) and the scale of the noise."""
    n_cells = len(tuned_C)
    given = _given_roughness(rows._replace(score_R=rows.score_R / np.sqrt(s2)))
    _, rho_G, kappa_G = (grid.ravel() for grid in np.meshgrid(OWN_CURVATURE, RHO, KAPPA, indexing="ij"))
    precision_GTT, mean_GTZ, square_GZZ, log_G = _posterior(given, rho_G, kappa_G, tuned_C)

    # Noise: s^2 times df / chi^2(df). All but the data is in units of s, and kappa / s stays.
    scale_K = np.sqrt(df / (2 * gammaincinv(df / 2, ndtr(_NODES))))
    n_free = np.linalg.matrix_rank(rows.information_RR, hermitian=True) - (n_cells - n_groups)
    side_KGZ = np.stack(np.broadcast_arrays(1 / scale_K[:, None], -kappa_G), axis=-1)
    log_KG = _log_weights(side_KGZ, square_GZZ, scale_K, n_free) + log_G
    weight_KG = np.exp(log_KG - log_KG.max())
    kept_G = weight_KG.max(axis=0) > NEGLIGIBLE
    weight_KG = weight_KG[:, kept_G] / weight_KG[:, kept_G].sum()

    mean_KGT = np.einsum("gtz,kgz->kgt", mean_GTZ[kept_G], side_KGZ[:, kept_G])
    best_KGC = -np.split(mean_KGT, 3, axis=-1)[1] / kappa_G[kept_G][:, None]
    unit_K11 = np.sqrt(s2) * scale_K[:, None, None]

    def values() -> Values:
        return _in_units(_optima(mean_KGT, precision_GTT[kept_G], kappa_G[kept_G], rows), weight_KG, unit_K11)

    return Curves(values, np.einsum("kg,kgc->c", weight_KG, best_KGC), logsumexp(log_KG))


def _in_units(optima: Optima, weight_KG: np.ndarray, unit_K11: np.ndarray) -> Values:
    """The values in units of the outcome, `unit_K11` for each scale of the noise."""
    n_cells = optima.value_KGC.shape[-1]
    gain_KGC = optima.gain_KGC * unit_K11
    over_grid = partial(np.einsum, "kg,kgc->c", weight_KG)
    return Values(
        mean_GC=(optima.value_KGC * unit_K11).reshape(-1, n_cells),
        cov_GCC=(optima.cov_KGCC * unit_K11[..., None] ** 2).reshape(-1, n_cells, n_cells),
        weight_G=weight_KG.ravel(),
        outside_C=over_grid(optima.outside_KGC),
        gain_C=over_grid(gain_KGC),
        choice_C=over_grid(optima.gain_variance_KGC * unit_K11**2 + (gain_KGC - over_grid(gain_KGC)) ** 2),
    )


def _log_weights(side_KGZ: np.ndarray, square_GZZ: np.ndarray, scale_K: np.ndarray, n_free: int) -> np.ndarray:
    """What the squares that stay unexplained and the scale of the noise say of each point [K, G]."""
    square_KG = np.einsum("kgy,gyz,kgz->kg", side_KGZ, square_GZZ, side_KGZ)
    return (np.log(_WEIGHTS) - n_free * np.log(scale_K))[:, None] - square_KG / 2


def _given_roughness(rows: Rows) -> Normal:
    """The parameters at each own curvature and roughness, without the prior of slopes. The roughness of values that
    were not chosen is integrated out."""
    u_R, level_RC = rows.u_R, rows.level_RC
    points, point_R = distinct(rows.cell_R, u_R)
    rough_RL = np.eye(len(points[1]))[point_R][:, points[1] != 0]
    curved_RC = level_RC * u_R[:, None] ** 2 / 2
    design_RT = np.concatenate([level_RC, level_RC * u_R[:, None], level_RC * (u_R == 0)[:, None]], axis=1)
    half_RZ = np.stack([np.linalg.pinv(rows.information_RR, hermitian=True) @ rows.score_R, u_R**2 / 2], axis=1)
    parts = [
        _at_roughness(rows.information_RR, of_RL, design_RT, half_RZ)
        for own in OWN_CURVATURE
        for of_RL in [np.concatenate([rough_RL, own * curved_RC], axis=1) if own else rough_RL]
    ]
    return Normal(*map(np.concatenate, zip(*parts, strict=True)))


def _at_roughness(
    information_RR: np.ndarray, rough_RL: np.ndarray, design_RT: np.ndarray, half_RZ: np.ndarray
) -> Normal:
    """The same at each roughness, N(0, rho^2) of each of L points."""
    n_cells, rho2_G = design_RT.shape[1] // 3, (RHO**2)[:, None, None]
    to_rough_RL = information_RR @ rough_RL
    inner_LL = rough_RL.T @ to_rough_RL
    own_LL = np.eye(len(inner_LL))
    solved_GLR = np.linalg.solve(inner_LL + own_LL / rho2_G, to_rough_RL.T)
    given_GRR = information_RR - to_rough_RL @ solved_GLR
    log_det_G = np.linalg.slogdet(own_LL + rho2_G * inner_LL)[1] + n_cells * np.log(RHO**2)
    explained_GTR = design_RT.T @ given_GRR
    level_TT, rough_TT = (np.diag(np.repeat(prior, n_cells)) for prior in ([1e-7, 0.0, 0.0], [0.0, 0.0, 1.0]))
    prior_GTT = level_TT + rough_TT / rho2_G
    # The level of all cells is free, and no effect depends on it; nor on those of cells that share no seed.
    prior_GTT[:, :n_cells, :n_cells] += 1 / n_cells
    return Normal(
        precision_GTT=explained_GTR @ design_RT + prior_GTT,
        target_GTZ=explained_GTR @ half_RZ,
        square_GZZ=half_RZ.T @ given_GRR @ half_RZ,
        log_G=np.log(RHO / (RHO_SCALE**2 + RHO**2)) - log_det_G / 2,  # a step of the grid is one in ln rho
    )


class Posterior(NamedTuple):
    precision_GTT: np.ndarray
    mean_GTZ: np.ndarray
    square_GZZ: np.ndarray
    """Squares that stay unexplained."""
    log_G: np.ndarray


def _posterior(given: Normal, rho_G: np.ndarray, kappa_G: np.ndarray, tuned_C: np.ndarray) -> Posterior:
    """The parameters at each curvature too, with the prior of slopes: b = -kappa u*, u* ~ N(0, omega^2)."""
    precision_GTT, target_GTZ, square_GZZ, log_G = (np.repeat(part, len(KAPPA), axis=0) for part in given)
    omega2_GC = OWN_ERROR**2 + 2 * (rho_G[:, None] ** 2 + tuned_C) / kappa_G[:, None] ** 2
    prior_GC = 1 / (kappa_G[:, None] ** 2 * np.minimum(omega2_GC, MAX_ERROR**2))
    slopes = np.arange(len(tuned_C), 2 * len(tuned_C))
    precision_GTT[:, slopes, slopes] += prior_GC
    mean_GTZ = np.linalg.solve(precision_GTT, target_GTZ)
    log_det_G = np.log(prior_GC).sum(axis=1) - np.linalg.slogdet(precision_GTT)[1]
    left_GZZ = square_GZZ - np.swapaxes(target_GTZ, 1, 2) @ mean_GTZ
    return Posterior(precision_GTT, mean_GTZ, left_GZZ, log_G + log_det_G / 2)


def _optima(mean_KGT: np.ndarray, precision_GTT: np.ndarray, kappa_G: np.ndarray, rows: Rows) -> Optima:
    """A cell's value a + kappa u (u / 2 - u*), u within half a step of the values tried: by quadrature over b, which is
    -kappa u*; the rest of a and of the roughness is normal."""
    n = mean_KGT.shape[-1] // 3
    low_C, high_C = rows.ends
    a_KGC, b_KGC, rough_KGC = np.split(mean_KGT, 3, axis=-1)
    cov_GXCXC = np.linalg.inv(precision_GTT).reshape(-1, 3, n, 3, n)  # X: a, b, roughness
    own_GXXC = np.einsum("gxcyc->gxyc", cov_GXCXC)
    sd_GC, kappa_G1 = np.sqrt(own_GXXC[:, 1, 1]), kappa_G[:, None]
    a_slope_GC, _, rough_slope_GC = np.moveaxis(own_GXXC[:, 1], 1, 0) / sd_GC  # per sd of b

    best_KGCQ = -(b_KGC[..., None] + sd_GC[..., None] * _NODES) / kappa_G1[..., None]
    u_KGCQ = np.clip(best_KGCQ, low_C[:, None] - 0.5, high_C[:, None] + 0.5)
    gain_KGCQ = kappa_G1[..., None] * u_KGCQ * (u_KGCQ / 2 - best_KGCQ)
    curve_KGC, variance_KGC = _moments(gain_KGCQ + a_slope_GC[..., None] * _NODES)
    gain_KGC, choice_KGC = _moments(gain_KGCQ - rough_slope_GC[..., None] * _NODES)

    cov_KGCC = _between_cells(cov_GXCXC, u_KGCQ[..., len(_NODES) // 2])
    cov_KGCC[..., np.arange(n), np.arange(n)] = own_GXXC[:, 0, 0] - a_slope_GC**2 + variance_KGC
    best_KGC, sd_u_GC = -b_KGC / kappa_G1, sd_GC / kappa_G1
    return Optima(
        value_KGC=a_KGC + curve_KGC,
        cov_KGCC=cov_KGCC,
        outside_KGC=ndtr((low_C - best_KGC) / sd_u_GC) + ndtr((best_KGC - high_C) / sd_u_GC),
        gain_KGC=gain_KGC - rough_KGC,
        gain_variance_KGC=choice_KGC + own_GXXC[:, 2, 2] - rough_slope_GC**2,
    )


def _between_cells(cov_GXCXC: np.ndarray, u_KGC: np.ndarray) -> np.ndarray:
    """The covariances of a + b u at these u."""
    cross_KGCC = u_KGC[..., None, :] * cov_GXCXC[:, 0, :, 1]  # cov(a_c, b_d u_d)
    slopes_KGCC = u_KGC[..., :, None] * cov_GXCXC[:, 1, :, 1] * u_KGC[..., None, :]
    return cov_GXCXC[:, 0, :, 0] + slopes_KGCC + cross_KGCC + np.swapaxes(cross_KGCC, -1, -2)


def _moments(at_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance over the nodes, the last axis."""
    mean = at_Q @ _WEIGHTS
    return mean, (at_Q - mean[..., None]) ** 2 @ _WEIGHTS
