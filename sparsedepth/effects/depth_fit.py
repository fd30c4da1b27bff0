"""The cells of one depth, and the fit of their runs.

A value that tuning chose is the one with runs of the roles best, edge or tuning (`store.tuning_roles`); of several, as
from folders that chose apart, the one with the most runs. An lr at which a run diverged is no part of a curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import BASELINE, COSTS, Cells
from sparsedepth.effects.fit import Fit, Runs, fit


@dataclass(kw_only=True)
class CellRuns:
    """A cell of one depth: its runs."""

    setting: str
    changes: frozenset[tuple[str, Any]]
    lr_N: np.ndarray
    seed_N: np.ndarray
    value_N: np.ndarray
    diverged_N: np.ndarray
    is_tuning_N: np.ndarray
    costs: dict[str, np.ndarray]
    lr: float = math.nan
    """The value chosen."""
    edge: str = ""
    was_tuned: bool = False
    """Whether its value is one that tuning chose, even if the others are not among these runs."""

    @cached_property
    def is_result_N(self) -> np.ndarray:
        """The runs at the chosen value with seeds that did not choose it, or with any, where there are no others."""
        at_N = np.isnan(self.lr_N) | (self.lr_N == self.lr)
        fresh_N = at_N & ~self.is_tuning_N
        return fresh_N if fresh_N.any() else at_N

    @cached_property
    def n_lr(self) -> int:
        return len(np.unique(self.lr_N[~np.isnan(self.lr_N)]))

    @cached_property
    def results(self) -> dict[int, float]:
        """Seed -> outcome of the results."""
        return self.by_seed(self.is_result_N)

    def by_seed(self, which_N: np.ndarray) -> dict[int, float]:
        """Seed -> mean outcome of some runs."""
        which_N = which_N & ~np.isnan(self.value_N)
        return {
            int(s): float(self.value_N[which_N & (self.seed_N == s)].mean()) for s in np.unique(self.seed_N[which_N])
        }

    @property
    def n_diverged(self) -> int:
        return int(self.diverged_N[self.is_result_N].sum())


@dataclass(kw_only=True)
class Depth:
    """The cells of one depth and their fit."""

    depth: int
    cells: dict[str, CellRuns]
    fitted: Fit | None
    order: list[str] = field(default_factory=list)
    """The cells of the fit."""


def depth_of(cells: Cells, rows: pd.DataFrame) -> Depth:
    """The cells of one depth, and the fit of those that can be compared: the tuned ones, or else those with results."""
    arrays = {name: rows[name].to_numpy() for name in rows.columns}
    setting_N = arrays["setting"]
    found = [_cell_runs({name: array[setting_N == s] for name, array in arrays.items()}) for s in set(setting_N)]
    of = {cell.setting: cell for cell in found if cell is not None}
    order = sorted(of, key=lambda setting: (setting != BASELINE, setting))
    of = {setting: of[setting] for setting in order}
    tuned = [setting for setting in order if of[setting].n_lr > 1]
    if cells.is_tuned and tuned:
        order = tuned
        runs = _runs_with_curves([of[setting] for setting in order])
    else:
        order = [setting for setting in order if of[setting].results]
        runs = runs_of([of[setting].results for setting in order])
    return Depth(depth=int(rows["n_layers"].iloc[0]), cells=of, fitted=fit(runs) if runs else None, order=order)


def _cell_runs(arrays: dict[str, np.ndarray]) -> CellRuns | None:
    """None for a cell none of whose runs has an outcome or diverged."""
    value_N, diverged_N, lr_N = (arrays[name] for name in ("value", "diverged", "lr"))
    if np.isnan(value_N).all() and not diverged_N.any():
        return None
    cell = CellRuns(
        setting=arrays["setting"][0],
        changes=arrays["changes"][0],
        lr_N=lr_N,
        seed_N=arrays["seed"],
        value_N=value_N,
        diverged_N=diverged_N,
        is_tuning_N=arrays["role"] == "tuning",
        costs={name: arrays[name] for name in COSTS if name in arrays},
    )
    tried = np.unique(lr_N[~np.isnan(lr_N)])
    if len(tried):
        chosen_N = np.isin(arrays["tuning"].astype(str), ["best", "edge", "tuning"])
        cell.was_tuned = bool(chosen_N.any())
        chosen_N = chosen_N if chosen_N.any() else ~cell.is_tuning_N if not cell.is_tuning_N.all() else chosen_N | True
        runs_at = {float(lr): chosen_N & (lr_N == lr) for lr in tried if (chosen_N & (lr_N == lr)).any()}
        means = {
            lr: np.nanmean(value_N[at]) if (~np.isnan(value_N[at])).any() else math.inf for lr, at in runs_at.items()
        }
        cell.lr = min(runs_at, key=lambda lr: (-int(runs_at[lr].sum()), means[lr]))
        if len(tried) > 1:
            cell.edge = {float(tried[0]): "lowest", float(tried[-1]): "highest"}.get(cell.lr, "")
    return cell


def runs_of(parts: Sequence[dict[int, float]]) -> Runs | None:
    """The runs of these cells without a curve, from the outcome of each seed."""
    if not parts or not all(parts):
        return None
    n = [len(part) for part in parts]
    return Runs(
        cell_N=np.repeat(np.arange(len(parts)), n),
        u_N=np.zeros(sum(n)),
        seed_N=np.array([seed for part in parts for seed in part]),
        y_N=np.array([value for part in parts for value in part.values()]),
        is_tuning_N=np.zeros(sum(n), dtype=bool),
    )


def _runs_with_curves(cells: Sequence[CellRuns]) -> Runs | None:
    """A value that diverged with a seed is no part of a curve."""
    gaps = [gap for cell in cells for gap in np.diff(np.log(np.unique(cell.lr_N[~np.isnan(cell.lr_N)])))]
    step = float(np.median(gaps))
    rows: list[tuple[int, float, int, float, bool]] = []
    for number, cell in enumerate(cells):
        bad = set(cell.lr_N[cell.diverged_N]) - {cell.lr}
        for lr in np.unique(cell.lr_N[~np.isnan(cell.value_N)]):
            u = math.log(lr / cell.lr) / step
            for is_tuning in (False, True) if lr not in bad else ():
                values = cell.by_seed((cell.lr_N == lr) & (cell.is_tuning_N == is_tuning))
                rows += [(number, u, seed, value, is_tuning) for seed, value in values.items()]
        if not any(row[0] == number and row[1] == 0 for row in rows):
            return None
    cell_N, u_N, seed_N, y_N, is_tuning_N = (np.array(column) for column in zip(*rows, strict=True))
    return Runs(cell_N=cell_N, u_N=u_N, seed_N=seed_N, y_N=y_N, is_tuning_N=is_tuning_N)
