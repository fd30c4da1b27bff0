"""One model of the runs of one depth and outcome; every effect is a linear combination of its cells' values.

    y(cell, lr, seed) = curve of the cell at lr + block(seed) + e,     Var e = s_c^2

Where lr was tuned, a cell's *value* is that at the optimum of its curve (`effects.curve`), else the mean over its seeds
(Student's distribution). Blocks are free; tuning runs are a block of their own. The scale of the noise is unknown, and
integrated over (`effects.noise`).

Shapes: N runs, R rows (cell, lr, role), S seeds, C cells, G points of the grid, H scales of the noise."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from sparsedepth.effects.curve import Rows, Values, curves_of, distinct
from sparsedepth.effects.noise import Noise, noise_of
from sparsedepth.effects.verdict import Distribution

NEAR = 2.01
"""Steps from the chosen value within which a curve is a parabola."""


@dataclass(frozen=True)
class Fit:
    values: Values
    noise: Noise
    n_C: np.ndarray
    """Result seeds at the chosen value (tuning seeds, where there are no others)."""
    group_C: np.ndarray
    """Cells with equal numbers are connected by common seeds."""
    has_curve: bool
    level_C: np.ndarray
    """Of the outcome, equal for connected cells; values are about it."""

    def value(self, cell: int) -> float:
        """The fitted value of a cell: the effect of two cells is the difference of theirs."""
        return float(self.level_C[cell] + self.values.weight_G @ self.values.mean_GC[:, cell])

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
        seeds = noise.weight_H @ seeds_H
        if self.has_curve:
            share = min(seeds / (values.weight_G @ variance_G), 1.0)
            return Distribution(mean_G, np.sqrt(variance_G), np.full(len(mean_G), np.inf), values.weight_G, share)
        # In designs with gaps the variance is not quite a sum over cells: in proportion.
        sd_H = np.sqrt(seeds_H * variance_G[0] / seeds)
        df_H = seeds_H**2 / (part_HC**2 / noise.df_HC).sum(axis=1)
        return Distribution(np.full(len(sd_H), mean_G[0]), sd_H, df_H, noise.weight_H, seeds_share=1.0)

    def share_of_baseline(self, setting: int, baseline: int) -> float:
        """The squared loading of a setting's effect on the baseline that it shares with others."""
        variance_C = self.values.weight_G @ np.diagonal(self.values.cov_GCC, axis1=1, axis2=2)
        return variance_C[baseline] / (variance_C[baseline] + variance_C[setting])


def fit(
    cell_N: np.ndarray,
    u_N: np.ndarray,
    seed_N: np.ndarray,
    y_N: np.ndarray,
    is_tuning_N: np.ndarray,
    is_carried: bool = False,
) -> Fit | None:
    """The fit of the runs of a depth that have a finite outcome; None where they have no noise to judge by: no seed is
    repeated, or all agree. `cell_N`: 0 .. C - 1; `is_tuning_N`: whether a run served to choose the lr; `is_carried`: it
    was chosen elsewhere, so that the optimum may be far from it, and all runs given count."""
    near_N = is_carried | (np.abs(u_N) <= NEAR)
    columns = (tuple(each_N[near_N].tolist()) for each_N in (cell_N, u_N, seed_N, y_N, is_tuning_N))
    return _fit(*columns, is_carried=is_carried)


@lru_cache(maxsize=256)  # the doors of a report ask for the same
def _fit(*columns: tuple[float, ...], is_carried: bool) -> Fit | None:
    cell_N, u_N, seed_N, y_N, role_N = map(np.array, columns)
    middle = y_N.mean()
    y_N = y_N - middle
    (cell_R, u_R, _), row_N = distinct(cell_N, np.round(u_N, 4), role_N)
    cell_R, seed_N = cell_R.astype(int), distinct(seed_N, role_N)[1]
    noise = noise_of(row_N, seed_N, y_N, cell_R)
    if noise is None:
        return None
    s2_C = noise.s2_C
    s2 = np.exp(np.log(s2_C).mean())
    rows = Rows(cell_R, u_R, *_information(row_N, seed_N, y_N, (s2 / s2_C)[cell_R]))
    of_which = (u_N == 0) & ~role_N, role_N, u_N == 0
    seeds_C, tuning_C, any_C = (_seeds(cell_N, seed_N, which_N, len(s2_C)) for which_N in of_which)
    n_C = np.where(seeds_C > 0, seeds_C, any_C)
    group_C = _groups(cell_N, seed_N, len(s2_C))
    if has_curve := bool(np.ptp(u_R)):
        tuned_C = np.full(len(s2_C), np.inf) if is_carried else s2_C / s2 / np.where(tuning_C > 0, tuning_C, n_C)
        values = curves_of(rows, tuned_C, s2, noise.scale_df, len({*group_C}))
    else:
        values = _levels(rows, s2)
    # Only differences of connected cells are estimated: on average these are where their results are, each moved to its
    # optimum.
    result_N = (u_N == 0) & ~(role_N & (seeds_C > 0)[cell_N])
    at_chosen_C = np.bincount(cell_N[result_N], y_N[result_N]) / np.bincount(cell_N[result_N])
    about = at_chosen_C + values.gain_C - values.weight_G @ values.mean_GC
    of_group = np.bincount(group_C, about) / np.bincount(group_C)
    return Fit(values, noise, n_C, group_C, has_curve, middle + of_group[group_C])


def _levels(rows: Rows, s2: float) -> Values:
    """Of cells that were run at one lr each."""
    inverse_CC = np.linalg.pinv(rows.level_RC.T @ rows.information_RR @ rows.level_RC, hermitian=True)
    mean_C, nothing_C = inverse_CC @ (rows.level_RC.T @ rows.score_R), np.zeros(len(inverse_CC))
    return Values(mean_C[None], s2 * inverse_CC[None], np.ones(1), nothing_C, nothing_C, nothing_C)


def _seeds(cell_N: np.ndarray, seed_N: np.ndarray, which_N: np.ndarray, n_cells: int) -> np.ndarray:
    """Different seeds of each cell among some runs."""
    return np.bincount(distinct(cell_N[which_N], seed_N[which_N])[0][0], minlength=n_cells).astype(float)


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


def _groups(cell_N: np.ndarray, seed_N: np.ndarray, n_cells: int) -> np.ndarray:
    """Numbers of cells, equal where a chain of common seeds connects them."""
    from scipy.sparse.csgraph import connected_components  # slow to import

    has_CS = np.zeros((n_cells, seed_N.max() + 1), dtype=bool)
    has_CS[cell_N, seed_N] = True
    return connected_components(has_CS @ has_CS.T)[1]


# Fits of several cells by name


class Contrast(NamedTuple):
    """A combination of cells of a fit."""

    effect: Distribution
    shared: float
    """The last one's share of the variance of the first one's difference from it, squared loading."""
    fitted: tuple[float, ...]
    """The values of the cells."""


@dataclass(frozen=True)
class NamedFit:
    names: Sequence[Any]
    """Of its cells, in their order."""
    found: Fit | None
    """None where they have no noise to judge by."""

    def contrast(self, weights: Mapping[Any, float]) -> Contrast | None:
        """A combination of cells, whose weights add up to 0; None without a fit of all, or if no seeds connect them."""
        if self.found is None or not {*weights} <= {*self.names}:
            return None
        numbers = [self.names.index(name) for name in weights]
        if not self.found.connects(numbers):
            return None
        weight_C = np.zeros(len(self.names))
        weight_C[numbers] = [*weights.values()]
        shared = self.found.share_of_baseline(numbers[0], numbers[-1])
        return Contrast(self.found.combine(weight_C), shared, tuple(map(self.found.value, numbers)))

    def outside(self, name: Any) -> float:
        """The probability that the optimum of a cell lies beyond the values tried; 0 of one without a curve."""
        if self.found is None or name not in self.names:
            return 0.0
        return self.found.values.outside_C[self.names.index(name)]


def fit_of(parts: Mapping[Any, Mapping[int, float]]) -> NamedFit:
    """The fit of these cells without a curve, from the outcome of each seed."""
    rows = [(cell, 0.0, seed, value, False) for cell, of in enumerate(parts.values()) for seed, value in of.items()]
    is_known = parts and all(parts.values())
    return NamedFit([*parts], fit(*map(np.array, zip(*rows, strict=True))) if is_known else None)


@dataclass(frozen=True)
class ByLr(NamedFit):
    """Cells at each value of the tuned field apart, in one fit without curves: (cell, value), without values at which a
    run of the cell diverged."""

    seeds: Mapping[tuple[Any, float], int]
    """How many a cell has at a value."""

    def common(self, names: Collection[Any]) -> list[float]:
        """The values at which all these cells were run, ascending."""
        tried = [{lr for other, lr in self.seeds if other == name} for name in names]
        return sorted(set[float].intersection(*tried))

    def n_seeds(self, names: Collection[Any], values: Collection[float]) -> int:
        """The fewest seeds of these cells at one of these values, which all have."""
        return min(self.seeds[name, lr] for name in names for lr in values)


# The runs of a setting at one depth, and fits of several


Changes = frozenset[tuple[str, Any]]
"""(field, value) of a setting, where it differs from the baseline."""


@dataclass(kw_only=True)
class CellRuns:
    setting: str
    changes: Changes
    lr_N: np.ndarray
    seed_N: np.ndarray
    value_N: np.ndarray
    diverged_N: np.ndarray
    is_tuning_N: np.ndarray
    costs: dict[str, np.ndarray]
    lr: float = math.nan
    """The value chosen."""
    edge: str = ""
    """'lr 0.003 is the highest', where it is that of all tried, or one of another tuned field that is."""
    was_tuned: bool = False
    """Whether its value is one that tuning chose, even if the others are not among these runs."""
    carry_regret: float | None = None
    """What carrying that value from another shape adds to the loss; NaN: not known; None: it was not carried."""

    @cached_property
    def is_result_N(self) -> np.ndarray:
        """The runs at the chosen value with seeds that did not choose it, or with any, where there are no others."""
        at_N = np.isnan(self.lr_N) | (self.lr_N == self.lr)
        fresh_N = at_N & ~self.is_tuning_N
        return fresh_N if fresh_N.any() else at_N

    @cached_property
    def tried(self) -> list[float]:
        """The values of the tuned field, ascending."""
        return np.unique(self.lr_N[~np.isnan(self.lr_N)]).tolist()

    @cached_property
    def results(self) -> dict[int, float]:
        """Seed -> outcome of the results."""
        return self.by_seed(self.is_result_N)

    def by_seed(self, which_N: np.ndarray) -> dict[int, float]:
        """Seed -> mean outcome of some runs."""
        which_N = which_N & ~np.isnan(self.value_N)
        seeds = np.unique(self.seed_N[which_N])
        return {int(seed): float(self.value_N[which_N & (self.seed_N == seed)].mean()) for seed in seeds}

    def at_lr(self, lr: float) -> dict[int, float]:
        """Seed -> mean outcome of the runs at one value of the tuned field."""
        return self.by_seed(self.lr_N == lr)

    def cost(self, name: str) -> float:
        """The mean of a cost over the results that have it; NaN without any."""
        values = self.costs[name][self.is_result_N & ~self.diverged_N]
        known = values[~np.isnan(values)]
        return known.mean() if len(known) else math.nan

    @property
    def n_diverged(self) -> int:
        return int(self.diverged_N[self.is_result_N].sum())


def with_carrying(effect: Distribution, sides: Sequence[CellRuns]) -> Distribution:
    """With the error of carrying lr to the shape of a side, where it is known: each side may lose by the regret that a
    sweep has measured, independently of the others."""
    regrets = [side.carry_regret for side in sides if side.carry_regret is not None]
    if not regrets or np.isnan(regrets).any():
        return effect
    return effect.widened(max(regrets) * math.sqrt(len(sides)))


def fit_by_lr(cells: Mapping[Any, CellRuns]) -> ByLr:
    parts = {
        (name, lr): by_seed
        for name, cell in cells.items()
        for lr in cell.tried
        if lr not in cell.lr_N[cell.diverged_N] and (by_seed := cell.at_lr(lr))
    }
    return ByLr([*parts], fit_of(parts).found, {at: len(by_seed) for at, by_seed in parts.items()})


def fit_with_curves(cells: Mapping[Any, CellRuns], sign: int) -> NamedFit:
    """A value that diverged with a seed is no part of a curve, but for the chosen one. A curve has a lowest point: of
    an outcome with sign 1 it is the negative's."""
    step = np.median(np.concatenate([np.diff(np.log(cell.tried)) for cell in cells.values()]))
    parts = []
    for number, cell in enumerate(cells.values()):
        diverged_N = np.isin(cell.lr_N, cell.lr_N[cell.diverged_N & (cell.lr_N != cell.lr)])
        y_N = np.where(diverged_N, np.nan, -sign * cell.value_N)
        columns = number, np.log(cell.lr_N / cell.lr) / step, cell.seed_N, cell.is_tuning_N, y_N
        parts.append(np.stack(np.broadcast_arrays(*columns)))
    runs_XN = np.concatenate(parts, axis=1)
    runs_XN = runs_XN[:, ~np.isnan(runs_XN).any(axis=0)]
    if len({*runs_XN[0, runs_XN[1] == 0]}) < len(cells):
        return NamedFit([*cells], None)
    (cell_N, u_N, seed_N, tuning_N), number_N = distinct(*runs_XN[:4])
    mean_N = np.bincount(number_N, runs_XN[4]) / np.bincount(number_N)
    found = fit(cell_N.astype(int), u_N, seed_N.astype(int), mean_N, tuning_N.astype(bool))
    if found and sign > 0:
        values = found.values._replace(mean_GC=-found.values.mean_GC, gain_C=-found.values.gain_C)
        found = replace(found, values=values, level_C=-found.level_C)
    return NamedFit([*cells], found)
