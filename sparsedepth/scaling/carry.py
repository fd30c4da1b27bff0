"""What it costs to carry lr from one shape to others, from a sweep that was tuned at every shape.

    regret(shape) = expected loss(shape, lr of `at`) - least value of the shape's curve in log lr

The lr of `at` has the lowest mean loss there. The curves of a setting's shapes are fitted together (`effects.curve`),
each about the carried lr. The loss at that minus the lowest mean tried would be above 0 by the noise alone: where lr
hardly matters, by all of it. Where runs do not differ by seed, or there is one, it is that difference all the same.
The mean over shapes has a normal interval, cautious since their errors are added as if they were one, or Student's over
shapes if that is wider. rms is the root of the mean square, with the error. A shape that did not run the carried lr has
no regret and is in neither. A diverged run has an infinite loss.

Shapes: P shapes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.effects.cells import ROUNDED, joined
from sparsedepth.effects.fit import NEAR, fit
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
    edge: Literal["highest", "lowest"] | None = None
    """Whether the best is an end of the values tried at this shape: a better one may lie beyond."""


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
    runs = runs.assign(lr=joined(runs["lr"].astype(float), ROUNDED))
    texts = runs[[*CELL_FIELDS]].astype(str)
    varying = [name for name in CELL_FIELDS if texts[name].nunique() > 1 and name != "lr"]
    sizes = [name for name in varying if is_shape(name)]
    knobs = [name for name in varying if name not in sizes]
    is_home = _at_shape(runs, at)
    found = []
    for _, of_setting in runs.groupby([texts[name] for name in knobs] or np.zeros(len(runs))):
        at_home = of_setting[is_home[of_setting.index]]
        _check_one_shape(at_home, sizes)
        home = _losses(at_home, loss)
        others = _by_shape(of_setting[~is_home[of_setting.index]], texts, sizes, loss)
        if home.shape[1] > 1 and others:
            found.append(_carried(_label(texts, of_setting, knobs) or "all runs", home, others))
    if not found:
        raise ValueError("these runs lack several lr at that shape and at another; run a sweep with `tune` and no `at`")
    return found


def _at_shape(runs: pd.DataFrame, at: Mapping[str, Any]) -> pd.Series:
    """Whether a run has the shape `at`. Raises ValueError if none has."""
    is_home = (runs[[*at]] == pd.Series(at)).all(axis=1)
    if not is_home.any():
        tried = "; ".join(f"{name}: {_values(runs[name])}" for name in at)
        raise ValueError(f"no run has {', '.join(assignment(*each) for each in at.items())}; these runs have {tried}")
    return is_home


def _check_one_shape(runs: pd.DataFrame, sizes: Sequence[str]) -> None:
    """Raises ValueError where the runs of a setting at the shape that was named differ in size."""
    for name in sizes:
        if not ROLES[name].derived_if_missing and runs[name].nunique() > 1:
            one = assignment(name, runs[name].min())
            raise ValueError(f"that shape was run with several {name}: {_values(runs[name])}; name one: --at {one}")


def _values(column: pd.Series) -> str:
    return ", ".join(map(str, sorted(column.unique().tolist())))


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
    """The regret of a setting over the shapes that ran the carried lr, with the wider interval of curves and shapes."""
    lr = _best(home)
    known = {shape: table for shape, table in others.items() if lr in table}
    if not known:
        told = f"{setting}: lr={lr:g}, the best at that shape, was not run at {', '.join(others)}"
        raise ValueError(f"{told}; run it there: the same values of `tune: lr` at every shape")
    regret_P, sd_P = _regrets(lr, home, [*known.values()])
    of_shape = dict(zip(known, regret_P.tolist(), strict=True))
    shapes = [ShapeRegret(shape, lr, _best(t), of_shape.get(shape), _edge(t)) for shape, t in others.items()]
    mean, half = regret_P.mean(), 1.96 * sd_P.mean()
    if math.isinf(mean):
        half = 0.0
    elif len(known) > 1:
        half = max(half, t_critical(len(known) - 1) * regret_P.std(ddof=1) / math.sqrt(len(known)))
    rms = np.sqrt(np.mean(regret_P**2 + sd_P**2))
    return Carried(setting, shapes, (mean, mean - half, mean + half), rms, min(map(len, known.values())))


def _best(table: pd.DataFrame) -> float:
    return table.columns[table.mean().argmin()]


def _edge(table: pd.DataFrame) -> Literal["highest", "lowest"] | None:
    best = _best(table)
    return "highest" if best == max(table.columns) else "lowest" if best == min(table.columns) else None


def _regrets(lr: float, home: pd.DataFrame, tables: Sequence[pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation of the regret of each of `tables`."""
    plain_P = np.array([table[lr].mean() - table.mean().min() for table in tables])
    sound = [number for number, regret in enumerate(plain_P) if math.isfinite(regret)]
    parts = [_rows(lr, number, tables[number]) for number in sound]
    rows = pd.concat([*parts, _rows(lr, len(tables), home)])
    _, rows["cell"] = np.unique(rows["cell"], return_inverse=True)
    fitted = fit(*(rows[name].to_numpy() for name in ("cell", "u", "seed", "loss", "is_tuning")), is_carried=True)
    sd_P = np.where([len(table) > 1 for table in tables], 0.0, math.inf)
    if fitted and fitted.has_curve:
        # The carried lr is one of those tried: a curve whose least value lies above it is off.
        plain_P[sound] = np.maximum(-fitted.values.gain_C[:-1], 0.0)
        sd_P[sound] = np.sqrt(fitted.values.choice_C[:-1])
    return plain_P, sd_P


def _rows(lr: float, number: int, table: pd.DataFrame) -> pd.DataFrame:
    """The runs of a shape at the carried and the best lr, between these, and two steps beyond."""
    step = np.median(np.diff(np.log(table.columns)))
    table = table.set_axis(np.log(table.columns / lr) / step, axis=1)
    low, high = sorted((0.0, _best(table)))
    near = table.loc[:, np.isfinite(table).all()].loc[:, low - NEAR : high + NEAR]
    rows = near.melt(ignore_index=False, var_name="u", value_name="loss")
    # Levels of a seed at different shapes are different.
    return rows.assign(cell=number, seed=rows.index + number / 1000, is_tuning=False)


def carry_table(found: Sequence[Carried]) -> QueryResult:
    """A row for each setting and shape."""
    rows = tuple((one.setting, *shape) for one in found for shape in one.shapes)
    return QueryResult(("setting", "shape", "lr", "best_lr", "regret", "edge"), rows)
