"""One model of the runs of one depth and outcome; every effect is a linear combination of its cells' values.

    y(cell, lr, seed) = a_c + b_c u + (kappa / 2) u^2 + rough(cell, lr) + block(seed) + e,     Var e = s_c^2

`u` is log lr in steps of the grid from the cell's chosen value. A cell's *value* is a_c + min over u of the curve, over
the values tried and half a step beyond: that at its own optimum. rough has a part for each lr and, as the cells differ
in curvature, one in proportion to u^2 / 2. Blocks are free; tuning runs are a block of their own.
Unknown: the scale of the noise (`Noise`), roughness rho = sd(rough) / s and the curvature kappa / s, which the
cells of a depth share. They are integrated over a grid (half-Cauchy .7; log-uniform). Given these all is normal, with

    u* = -b_c / kappa ~ N(0, omega^2),     omega^2 = min(.3^2 + 2 (rho^2 + 1 / tuning seeds) s^2 / kappa^2, 2.5^2)

the error that choosing the best of a grid makes. Without lr the values are the cells' means (Student's distribution).

Steps: the noise (`effects.noise`); at each roughness what the rows say of the parameters (`_given_roughness`), then at
each curvature (`_posterior`); the values (`_optima`), weighed over the grid and the scale of the noise (`_curves`).

Shapes: N runs, R rows (cell, lr, role), C cells, L points (cell, lr), T = 3 C parameters (level a, slope b, roughness
at the chosen value), G points of the grid, K scales of the noise, Q nodes of quadrature."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.special import gammaincinv, ndtr

from sparsedepth.effects.noise import NEGLIGIBLE, Noise, noise_of
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


@dataclass(frozen=True)
class Fit:
    values: Values
    noise: Noise
    n_C: np.ndarray
    """Result seeds at the chosen value (tuning seeds, where there are no others)."""
    group_C: np.ndarray
    """Cells with equal numbers are connected by common seeds."""
    has_curve: bool
    level: float
    """Of the outcome; values are about it."""

    def times(self, sign: int) -> "Fit":
        """Of the outcome with this sign."""
        values = self.values._replace(mean_GC=sign * self.values.mean_GC, gain_C=sign * self.values.gain_C)
        return replace(self, values=values, level=sign * self.level)

    def value(self, cell: int) -> float:
        """The fitted value of a cell: the effect of two cells is the difference of theirs."""
        return self.level + float(self.values.weight_G @ self.values.mean_GC[:, cell])

    def connects(self, cells: Sequence[int]) -> bool:
        """Whether a chain of common seeds connects these cells, so that their values can be combined."""
        return len({*self.group_C[[*cells]].tolist()}) == 1

    def combine(self, weight_C: np.ndarray) -> Distribution:
        """The distribution of a combination of the cells' values, whose weights add up to 0."""
        values, noise = self.values, self.noise
        mean_G = values.mean_GC @ weight_C
        variance_G = np.maximum(np.einsum("c,gcd,d->g", weight_C, values.cov_GCC, weight_C), 1e-300)
        part_HC = weight_C**2 * noise.s2_HC / self.n_C
        seeds_H = part_HC.sum(axis=1)
        seeds = float(noise.weight_H @ seeds_H)
        if self.has_curve:
            share = min(seeds / float(values.weight_G @ variance_G), 1.0)
            return Distribution(mean_G, np.sqrt(variance_G), np.full(len(mean_G), np.inf), values.weight_G, share)
        # In designs with gaps the variance is not quite a sum over cells: in proportion.
        sd_H = np.sqrt(seeds_H * variance_G[0] / seeds)
        df_H = seeds_H**2 / (part_HC**2 / noise.df_HC).sum(axis=1)
        return Distribution(np.full(len(sd_H), mean_G[0]), sd_H, df_H, noise.weight_H, seeds_share=1.0)

    def effect(self, setting: int, baseline: int) -> Distribution:
        """The distribution of the value of one cell minus that of another."""
        unit_CC = np.eye(len(self.n_C))
        return self.combine(unit_CC[setting] - unit_CC[baseline])

    def share_of_baseline(self, setting: int, baseline: int) -> float:
        """The squared loading of a setting's effect on the baseline that it shares with others."""
        variance_C = self.values.weight_G @ np.diagonal(self.values.cov_GCC, axis1=1, axis2=2)
        return float(variance_C[baseline] / (variance_C[baseline] + variance_C[setting]))


def fit(
    cell_N: np.ndarray, u_N: np.ndarray, seed_N: np.ndarray, y_N: np.ndarray, is_tuning_N: np.ndarray
) -> Fit | None:
    """The fit of the runs of a depth that have a finite outcome; None where they have no noise to judge by: no seed is
    repeated, or all agree. `cell_N`: 0 .. C - 1; `is_tuning_N`: whether a run served to choose the lr."""
    near_N = np.abs(u_N) <= NEAR
    cell_N, u_N, seed_N, y_N, role_N = (each[near_N] for each in (cell_N, u_N, seed_N, y_N, is_tuning_N))
    middle = y_N.mean()
    y_N = y_N - middle
    (cell_R, u_R, _), row_N = _distinct(cell_N, np.round(u_N, 4), role_N)
    cell_R, seed_N = cell_R.astype(int), _distinct(seed_N, role_N)[1]
    noise = noise_of(row_N, seed_N, y_N, cell_R)
    if noise is None:
        return None
    s2_C = noise.s2_C
    s2 = float(np.exp(np.log(s2_C).mean()))
    rows = Rows(cell_R, u_R, *_information(row_N, seed_N, y_N, (s2 / s2_C)[cell_R]))
    of_which = (u_N == 0) & ~role_N, role_N, u_N == 0
    seeds_C, tuning_C, any_C = (_seeds(cell_N, seed_N, which_N, len(s2_C)) for which_N in of_which)
    n_C = np.where(seeds_C > 0, seeds_C, any_C)
    group_C = _groups(cell_N, seed_N, len(s2_C))
    if has_curve := bool(np.ptp(u_R)):
        tuned_C = s2_C / s2 / np.where(tuning_C > 0, tuning_C, n_C)
        values = _curves(rows, tuned_C, s2, noise.scale_df, len({*group_C}))
    else:
        values = _levels(rows, s2)
    # Only differences are estimated: on average the cells are where their results are, each moved to its optimum.
    result_N = (u_N == 0) & ~(role_N & (seeds_C > 0)[cell_N])
    at_chosen_C = np.bincount(cell_N[result_N], y_N[result_N]) / np.bincount(cell_N[result_N])
    about = at_chosen_C + values.gain_C - values.weight_G @ values.mean_GC
    return Fit(values, noise, n_C, group_C, has_curve, float(middle + about.mean()))


def _levels(rows: Rows, s2: float) -> Values:
    """Of cells that were run at one lr each."""
    inverse_CC = np.linalg.pinv(rows.level_RC.T @ rows.information_RR @ rows.level_RC, hermitian=True)
    mean_C, nothing_C = inverse_CC @ (rows.level_RC.T @ rows.score_R), np.zeros(len(inverse_CC))
    return Values(mean_C[None], s2 * inverse_CC[None], np.ones(1), nothing_C, nothing_C, nothing_C)


class Contrast(NamedTuple):
    """Two cells of a fit."""

    effect: Distribution
    """The value of the first minus that of the second."""
    shared: float
    """The second's share of its variance, squared loading."""
    fitted: tuple[float, float]
    """Their values."""


def contrast_of(fitted: Fit, setting: int, baseline: int) -> Contrast:
    values = fitted.value(setting), fitted.value(baseline)
    return Contrast(fitted.effect(setting, baseline), fitted.share_of_baseline(setting, baseline), values)


def _distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct combinations of values, a column each, and the number of each run's."""
    found, number_N = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return found, number_N.ravel()


def _seeds(cell_N: np.ndarray, seed_N: np.ndarray, which_N: np.ndarray, n_cells: int) -> np.ndarray:
    """Different seeds of each cell among some runs."""
    return np.bincount(_distinct(cell_N[which_N], seed_N[which_N])[0][0], minlength=n_cells).astype(float)


def _information(
    row_N: np.ndarray, seed_N: np.ndarray, y_N: np.ndarray, weight_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The information of the row means and their score, with a free level for each seed, in units of s^2."""
    count_RS = np.zeros((len(weight_R), seed_N.max() + 1))
    total_RS = np.zeros_like(count_RS)
    np.add.at(count_RS, (row_N, seed_N), weight_R[row_N])
    np.add.at(total_RS, (row_N, seed_N), weight_R[row_N] * y_N)
    share_RS = count_RS / count_RS.sum(axis=0)
    information_RR = np.diag(count_RS.sum(axis=1)) - share_RS @ count_RS.T
    return information_RR, total_RS.sum(axis=1) - share_RS @ total_RS.sum(axis=0)


def _curves(rows: Rows, tuned_C: np.ndarray, s2: float, df: float, n_groups: int) -> Values:
    """The values over the grid (own curvature x roughness x curvature) and the scale of the noise. `tuned_C`: the
    variance of a cell's means over tuning seeds, in units of s^2."""
    n_cells = len(tuned_C)
    given = _given_roughness(rows._replace(score_R=rows.score_R / np.sqrt(s2)))
    _, rho_G, kappa_G = (grid.ravel() for grid in np.meshgrid(OWN_CURVATURE, RHO, KAPPA, indexing="ij"))
    cov_GTT, mean_GTZ, square_GZZ, log_G = _posterior(given, rho_G, kappa_G, tuned_C)

    # Noise: s^2 times df / chi^2(df). All but the data is in units of s, and kappa / s stays.
    scale_K = np.sqrt(df / (2 * gammaincinv(df / 2, ndtr(_NODES))))
    n_free = np.linalg.matrix_rank(rows.information_RR, hermitian=True) - (n_cells - n_groups)
    side_KGZ = np.stack(np.broadcast_arrays(1 / scale_K[:, None], -kappa_G), axis=-1)
    square_KG = np.einsum("kgy,gyz,kgz->kg", side_KGZ, square_GZZ, side_KGZ)
    log_KG = log_G - square_KG / 2 + (np.log(_WEIGHTS) - n_free * np.log(scale_K))[:, None]
    weight_KG = np.exp(log_KG - log_KG.max())
    kept_G = weight_KG.max(axis=0) > NEGLIGIBLE
    weight_KG = weight_KG[:, kept_G] / weight_KG[:, kept_G].sum()

    mean_KGT = np.einsum("gtz,kgz->kgt", mean_GTZ[kept_G], side_KGZ[:, kept_G])
    optima = _optima(mean_KGT, cov_GTT[kept_G], kappa_G[kept_G], rows)
    unit_K = np.sqrt(s2) * scale_K[:, None, None]
    gain_KGC = optima.gain_KGC * unit_K
    over_grid = partial(np.einsum, "kg,kgc->c", weight_KG)
    return Values(
        mean_GC=(optima.value_KGC * unit_K).reshape(-1, n_cells),
        cov_GCC=(optima.cov_KGCC * unit_K[..., None] ** 2).reshape(-1, n_cells, n_cells),
        weight_G=weight_KG.ravel(),
        outside_C=over_grid(optima.outside_KGC),
        gain_C=over_grid(gain_KGC),
        choice_C=over_grid(optima.gain_variance_KGC * unit_K**2 + (gain_KGC - over_grid(gain_KGC)) ** 2),
    )


def _given_roughness(rows: Rows) -> Normal:
    """The parameters at each own curvature and roughness, without the prior of slopes. The roughness of values that
    were not chosen is integrated out."""
    u_R, level_RC = rows.u_R, rows.level_RC
    points, point_R = _distinct(rows.cell_R, u_R)
    rough_RL = np.eye(len(points[1]))[point_R][:, points[1] != 0]
    curved_RC = level_RC * u_R[:, None] ** 2 / 2
    design_RT = np.concatenate([level_RC, level_RC * u_R[:, None], level_RC * (u_R == 0)[:, None]], axis=1)
    half_RZ = np.stack([np.linalg.pinv(rows.information_RR, hermitian=True) @ rows.score_R, u_R**2 / 2], axis=1)
    parts = [
        _at_roughness(rows.information_RR, of_RL, design_RT, half_RZ, rho)
        for own in OWN_CURVATURE
        for of_RL in [np.concatenate([rough_RL, own * curved_RC], axis=1) if own else rough_RL]
        for rho in RHO
    ]
    return Normal(*map(np.array, zip(*parts, strict=True)))


def _at_roughness(
    information_RR: np.ndarray, rough_RL: np.ndarray, design_RT: np.ndarray, half_RZ: np.ndarray, rho: float
) -> Normal:
    """The same at one roughness, N(0, rho^2) of each of L points."""
    n_cells = design_RT.shape[1] // 3
    to_rough_RL = information_RR @ rough_RL
    inner_LL = rough_RL.T @ to_rough_RL
    own_LL = np.eye(len(inner_LL))
    given_RR = information_RR - to_rough_RL @ np.linalg.solve(inner_LL + own_LL / rho**2, to_rough_RL.T)
    log_det = np.linalg.slogdet(own_LL + rho**2 * inner_LL)[1] + 2 * n_cells * np.log(rho)
    explained_TR = design_RT.T @ given_RR
    prior_TT = np.diag(np.repeat([1e-7, 0.0, 1 / rho**2], n_cells))
    # The level of all cells is free, and no effect depends on it; nor on those of cells that share no seed.
    prior_TT[:n_cells, :n_cells] += 1 / n_cells
    return Normal(
        precision_GTT=explained_TR @ design_RT + prior_TT,
        target_GTZ=explained_TR @ half_RZ,
        square_GZZ=half_RZ.T @ given_RR @ half_RZ,
        log_G=np.log(rho / (RHO_SCALE**2 + rho**2)) - log_det / 2,  # a step of the grid is one in ln rho
    )


class Posterior(NamedTuple):
    cov_GTT: np.ndarray
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
    cov_GTT = np.linalg.inv(precision_GTT)
    mean_GTZ = cov_GTT @ target_GTZ
    log_det_G = np.log(prior_GC).sum(axis=1) - np.linalg.slogdet(precision_GTT)[1]
    return Posterior(cov_GTT, mean_GTZ, square_GZZ - np.swapaxes(target_GTZ, 1, 2) @ mean_GTZ, log_G + log_det_G / 2)


def _optima(mean_KGT: np.ndarray, cov_GTT: np.ndarray, kappa_G: np.ndarray, rows: Rows) -> Optima:
    """A cell's value a + kappa u (u / 2 - u*), u within half a step of the values tried: by quadrature over b, which is
    -kappa u*; the rest of a and of the roughness is normal."""
    n = mean_KGT.shape[-1] // 3
    low_C, high_C = rows.ends
    a_KGC, b_KGC, rough_KGC = np.split(mean_KGT, 3, axis=-1)
    cov_GXCXC = cov_GTT.reshape(-1, 3, n, 3, n)  # X: a, b, roughness
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


def _groups(cell_N: np.ndarray, seed_N: np.ndarray, n_cells: int) -> np.ndarray:
    """Numbers of cells, equal where a chain of common seeds connects them."""
    has_CS = np.zeros((n_cells, seed_N.max() + 1), dtype=bool)
    has_CS[cell_N, seed_N] = True
    return connected_components(has_CS @ has_CS.T)[1]


def fit_of(parts: Sequence[dict[int, float]]) -> Fit | None:
    """The fit of these cells without a curve, from the outcome of each seed."""
    rows = [(number, 0.0, seed, value, False) for number, part in enumerate(parts) for seed, value in part.items()]
    return fit(*map(np.array, zip(*rows, strict=True))) if parts and all(parts) else None


@dataclass(frozen=True)
class ByLr:
    """Cells at each value of the tuned field apart, in one fit without curves."""

    order: list[tuple[Any, float]]
    """(cell, value of the tuned field), without values at which a run of the cell diverged."""
    seeds: list[int]
    fitted: Fit | None

    def common(self, names: Collection[Any]) -> list[float]:
        """The values at which all these cells were run, ascending."""
        tried = [{lr for other, lr in self.order if other == name} for name in names]
        return sorted(set[float].intersection(*tried))

    def n_seeds(self, names: Collection[Any], values: Collection[float]) -> int:
        """The fewest seeds of a cell at one of these values."""
        parts = zip(self.order, self.seeds, strict=True)
        return min(seeds for (name, lr), seeds in parts if name in names and lr in values)
