"""What it costs to carry lr from one shape to others, from a sweep that was tuned at every shape.

    regret(shape) = mean over seeds of  loss(shape, lr of `at`) - loss(shape, lr of the shape)

The lr of a shape has the lowest mean loss over its seeds. At the shape itself that is chosen on the runs that are
scored, so the regret is never below 0: cautious where lr hardly matters. The mean over shapes has Student's interval
over seeds, or over shapes if that is wider; rms is the root of the mean square over shapes. A shape that did not run
the carried lr has no regret and is in neither. A diverged run has an infinite loss.

Shapes: S seeds, L values of lr, P shapes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.small_sample import t_critical
from sparsedepth.words.values import assignment

ROLES = roles(RunConfig)


class ShapeRegret(NamedTuple):
    shape: str
    lr: float
    """The carried one."""
    best: float
    regret: float | None
    """None where the carried lr was not run at this shape."""


class Carried(NamedTuple):
    """A setting whose lr is carried. Losses in nat/token."""

    setting: str
    shapes: list[ShapeRegret]
    regret: tuple[float, float, float]
    """The mean over shapes, and its interval."""
    rms: float
    n_seeds: int


def is_shape(name: str) -> bool:
    return name in ROLES and ROLES[name].touches("shapes", "batch") and ROLES[name].kind != "data"


def carry_of(runs: pd.DataFrame, loss: str, at: Mapping[str, Any]) -> list[Carried]:
    """Each setting of these rows of `runs` that was run at several lr at the shape `at` and at another. Raises
    ValueError for a shape that was not run, or without any such setting."""
    if not at or (wrong := [name for name in at if not is_shape(name)]):
        told = assignment(wrong[0], at[wrong[0]]) + ": at is a shape" if at else "names the shape"
        raise ValueError(f"--at {told}, such as n_layers=12")
    runs = runs.assign(**{loss: runs[loss].where(runs["outcome"] == "ok", math.inf)}).dropna(subset=[loss])
    texts = runs[[*CELL_FIELDS]].astype(str)
    varying = [name for name in CELL_FIELDS if texts[name].nunique() > 1 and name != "lr"]
    sizes = [name for name in varying if is_shape(name)]
    knobs = [name for name in varying if name not in sizes]
    is_home = (runs[[*at]] == pd.Series(at)).all(axis=1)
    if not is_home.any():
        tried = "; ".join(f"{name}: {', '.join(sorted(texts[name].unique()))}" for name in at)
        raise ValueError(f"no run has {', '.join(assignment(*each) for each in at.items())}; these runs have {tried}")
    found = []
    for _, of_setting in runs.groupby([texts[name] for name in knobs] or np.zeros(len(runs))):
        home = _losses(of_setting[is_home[of_setting.index]], loss)
        others = _by_shape(of_setting[~is_home[of_setting.index]], texts, sizes, loss)
        if home.shape[1] > 1 and others:
            found.append(_carried(_label(texts, of_setting, knobs) or "all runs", home, others))
    if not found:
        raise ValueError("these runs lack several lr at that shape and at another; run a sweep with `tune` and no `at`")
    return found


def _by_shape(runs: pd.DataFrame, texts: pd.DataFrame, sizes: Sequence[str], loss: str) -> dict[str, pd.DataFrame]:
    """Name of a shape -> its losses, of shapes run at several lr."""
    shown = [name for name in sizes if not ROLES[name].derived_if_missing]
    shapes = runs.groupby([texts.loc[runs.index, name] for name in sizes])
    losses = {_label(texts, rows, shown): _losses(rows, loss) for _, rows in shapes}
    return {shape: table for shape, table in losses.items() if table.shape[1] > 1}


def _label(texts: pd.DataFrame, rows: pd.DataFrame, names: Sequence[str]) -> str:
    """'n_layers=24, d_model=64', of runs that agree in these fields."""
    return ", ".join(assignment(name, str(texts.at[rows.index[0], name])) for name in names)


def _losses(rows: pd.DataFrame, loss: str) -> pd.DataFrame:
    """Seeds by lr, those at which every seed was run."""
    table = rows.pivot_table(index="seed", columns="lr", values=loss, dropna=False)
    return table[table.notna().sum(axis=1) == table.notna().sum(axis=1).max()].dropna(axis=1)


def _carried(setting: str, home: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> Carried:
    """The regret of a setting over the shapes that ran the carried lr and the seeds that all of these have, with the
    wider interval of seeds and shapes."""
    lr = home.columns[home.mean().argmin()]
    known = {shape: table for shape, table in others.items() if lr in table}
    if not known:
        told = f"{setting}: lr={lr:g}, the best at that shape, was not run at {', '.join(others)}"
        raise ValueError(f"{told}; run it there: the same values of `tune: lr` at every shape")
    seeds = sorted(set[int].intersection(*({*table.index} for table in known.values())))
    if not seeds:
        raise ValueError(f"{setting}: {', '.join(known)} have no seed in common; give them the same `tuning_seeds`")
    best = {shape: table.columns[table.mean().argmin()] for shape, table in others.items()}
    regret_PS = np.array([(table[lr] - table[best[shape]]).loc[seeds] for shape, table in known.items()])
    mean = dict(zip(known, regret_PS.mean(axis=1).tolist(), strict=True))
    shapes = [ShapeRegret(shape, lr, best[shape], mean.get(shape)) for shape in others]
    sides = [_interval(regret_PS.mean(axis=0)), *([_interval(regret_PS.mean(axis=1))] if len(known) > 1 else [])]
    rms = float(np.sqrt(np.mean(np.square([*mean.values()]))))
    return Carried(setting, shapes, max(sides, key=lambda side: side[-1]), rms, len(seeds))


def _interval(value_X: np.ndarray) -> tuple[float, float, float]:
    mean = float(value_X.mean())
    if not np.isfinite(value_X).all() or len(value_X) < 2:
        return mean, -math.inf, math.inf
    half = t_critical(len(value_X) - 1) * float(value_X.std(ddof=1)) / math.sqrt(len(value_X))
    return mean, mean - half, mean + half


def carry_table(found: Sequence[Carried]) -> QueryResult:
    """A row for each setting and shape."""
    rows = tuple((one.setting, *shape) for one in found for shape in one.shapes)
    return QueryResult(("setting", "shape", "lr", "best_lr", "regret"), rows)
