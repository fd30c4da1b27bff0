"""Which runs are results and which only served tuning: one rule for `best`, saved questions, effects, plots, the law.

A row of `runs` is a result if it was trained (not only measured), was not rejected in tuning, and does not have a seed
of tuning alone. The best value of a configuration has the lowest mean loss (first objective) over the tuning seeds; a
diverged run counts as infinite loss, and a value that lacks tuning runs is not chosen while others have them all. The
roles are derived from the runs and the sweep.yaml of their results folder whenever a store is opened:

    best      a run at the best value, with a worse value on either side
    edge      a run at the best value, which is the lowest or highest tried: the optimum may lie beyond
    rejected  a run at another value: no result, in no comparison
    tuning    a run at the best value with a seed that was used to choose it: no result, since its loss is optimistic
    carried   a run at the value that was chosen at another shape (`tune: {at: ...}`)

A training watched in somebody's own loop (`sparsedepth.watch`) has a row for each point. One of them is its result: at
the largest budget that most trainings of its depth have, or its last; the others have the role 'earlier', and are in
no comparison but those over training.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TypeVar

from sparsedepth import quantities
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.config.space import grid_points
from sparsedepth.quantities.quantity import Named, Row
from sparsedepth.words.values import assignment

if TYPE_CHECKING:
    import pandas as pd


TuningRole = Literal["best", "edge", "rejected", "tuning", "carried", "earlier"]
TunedValues = tuple[float, ...]
"""A value for each tuned field, in their order."""
Point = TypeVar("Point", float, TunedValues)
GridPoint = dict[str, float]
DEFINITIONS = ("sweep.yaml", "import.yaml")
"""Without either nothing is tuned, and a query loads no module that reads them."""
IS_TRAINED = "model IS NULL"
IS_CHOSEN = "coalesce(tuning NOT IN ('rejected', 'tuning', 'earlier'), true)"
IS_POINT = "tuning IS DISTINCT FROM 'earlier'"
"""Of a watched training the one point that is compared, and every other run."""
CHOSEN_ROLES = ("best", "edge", "tuning", "carried")
"""The roles of runs at the value that tuning chose."""
IS_RESULT = f"{IS_TRAINED} AND {IS_CHOSEN}"
"""The rule as an SQL condition over `runs`; `result_rows` is the same for a frame."""


def parse_tuned_fields(text: object) -> tuple[str, ...]:
    """The fields named in the column `tuned_fields`; none where it is NULL."""
    return tuple(text.split(",")) if isinstance(text, str) and text else ()


def result_rows(runs: "pd.DataFrame") -> "pd.DataFrame":
    trained = without_measured_models(runs)
    return trained[~trained["tuning"].isin(["rejected", "tuning"])] if "tuning" in trained.columns else trained


def without_measured_models(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Without models that were only measured, and earlier points of watched trainings; rejected tuning values
    included."""
    runs = runs[runs["tuning"] != "earlier"] if "tuning" in runs.columns else runs
    return runs[runs["model"].isna()] if "model" in runs.columns else runs


def earlier_points(points: Sequence[Row]) -> dict[str, Named]:
    """run_id -> it and its role, of the points of watched trainings (their run_id, training, n_layers, steps and
    tokens_trained) that are not compared."""
    by_depth = defaultdict[int, defaultdict[str, dict[int, str]]](lambda: defaultdict(dict))
    has_tokens = all(point["tokens_trained"] is not None for point in points)
    for point in points:
        place = point["tokens_trained" if has_tokens else "steps"]
        by_depth[point["n_layers"]][point["training"]][place] = point["run_id"]
    chosen = set()
    for trainings in by_depth.values():
        n_at = Counter(place for training in trainings.values() for place in training)
        common = max(n_at, key=lambda place: (n_at[place], place))
        chosen |= {training.get(common, training[max(training)]) for training in trainings.values()}
    return {id: {"run_id": id, "tuning": "earlier"} for point in points if (id := point["run_id"]) not in chosen}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a sweep tunes, and by which objective."""

    fields: tuple[str, ...]
    grid: tuple[tuple[float, ...], ...] = ()
    """The values of each field that the sweep starts from; empty for imported runs, where every value counts."""
    extensions: int = 0
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    """Seeds of the results; empty for imported runs, where every seed serves both tuning and results."""
    objective: str
    at: Row = field(default_factory=dict)
    """The shape that was tuned for all others; empty: each was."""
    carry_regret: float | None = None


def read_tuning(results: Path) -> Tuning | None:
    """What the sweep of a results folder tunes, if anything. Raises ValueError for an invalid one."""
    if not any((results / name).is_file() for name in DEFINITIONS):
        return None
    from sparsedepth.config.sweep import DEFINITION, read_definition
    from sparsedepth.store.table_map import MAP, TableMap

    if (results / MAP).is_file():
        table_map = build(TableMap, read_yaml(results / MAP), str(results / MAP))
        if not table_map.tuned:
            return None
        return Tuning(fields=tuple(table_map.tuned), tuning_seeds=(), seeds=(), objective=table_map.objective)
    definition = read_definition(results) if "tune" in read_yaml(results / DEFINITION) else None
    if definition is None or not definition.tune:
        return None
    return Tuning(
        fields=tuple(definition.tune),
        grid=tuple(map(tuple, definition.tune.values())),
        extensions=definition.tune_extensions,
        tuning_seeds=tuple(definition.tuning_seeds),
        seeds=tuple(definition.result_seeds),
        objective=definition.objective,
        at=definition.tune_at,
        carry_regret=definition.carry_regret,
    )


def tuning_columns(tuning: Tuning, runs: Sequence[Row]) -> dict[str, Named]:
    """run_id -> it and its TUNING_COLUMNS, from the runs of a results folder; none where only one value was run."""
    groups = defaultdict(list)
    configuration = itemgetter(*(name for name in CELL_FIELDS if name not in tuning.fields))
    for run in runs:
        if None not in _point(tuning, run):  # an imported run whose value is unknown was not tuned
            groups[configuration(run)].append(run)
    shared = {"tuned_fields": ",".join(tuning.fields), "tuned_by": tuning.objective}
    shape = ", ".join(assignment(*each) for each in tuning.at.items())
    carrying = {"carried_from": shape, "carry_regret": tuning.carry_regret}
    roles = [role for group in groups.values() for role in _roles(tuning, group).items()]
    return {
        run_id: {"run_id": run_id, "tuning": role, **shared, **(carrying if role == "carried" else {})}
        for run_id, role in roles
    }


def _roles(tuning: Tuning, group: Sequence[Row]) -> dict[str, TuningRole]:
    """The role of each run of one tuned cell, by the same search that chose its point."""
    if any(group[0][name] != value for name, value in tuning.at.items()):
        return {run["run_id"]: "carried" for run in group}
    losses = _losses(tuning, group)
    tuning_only = {*tuning.tuning_seeds} - {*tuning.seeds}
    if len(losses) < 2:
        return {run["run_id"]: "tuning" for run in group if run["seed"] in tuning_only}
    axes = tuning.grid or [sorted({*axis}) for axis in zip(*losses, strict=True)]
    grid = dict(zip(tuning.fields, axes, strict=True))
    points, best_of_grid, _ = tune(grid, lambda point: losses.get((*point.values(),), math.inf), tuning.extensions)
    tried = [values for point in points if (values := (*point.values(),)) in losses]
    best = (*best_of_grid.values(),)
    chosen: TuningRole = "edge" if any(map(is_at_edge, best, zip(*tried, strict=True))) else "best"
    return {
        run["run_id"]: "rejected" if _point(tuning, run) != best else "tuning" if run["seed"] in tuning_only else chosen
        for run in group
    }


def _losses(tuning: Tuning, group: Sequence[Row]) -> dict[TunedValues, float]:
    """The mean loss of each value over the tuning seeds; math.inf where one diverged, or fewer were run than at others.

    Configurations without any tuning seed are of sweeps from before these existed: tuned with the first seed."""
    were_run = {run["seed"] for run in group}
    seeds = were_run.intersection(tuning.tuning_seeds) or tuning.seeds[:1] or were_run
    losses = defaultdict[TunedValues, defaultdict[int | None, list[float]]](lambda: defaultdict(list))
    for run in group:
        if run["seed"] in seeds:  # several have one seed only where it is NULL, in imported runs
            losses[_point(tuning, run)][run["seed"]].append(objective_as_loss(run, tuning.objective))
    most = max(map(len, losses.values()), default=0)
    return {
        point: fmean(map(fmean, by_seed.values())) if len(by_seed) == most else math.inf
        for point, by_seed in losses.items()
    }


def objective_as_loss(summary: Row, objective: str) -> float:
    """The objective of a row of `runs`, or of a summary, as a loss (lower is better); math.inf if it diverged."""
    value = summary.get(objective)
    is_scored = summary.get("outcome") == "ok" and isinstance(value, int | float)
    return -quantities.sign(objective) * value if is_scored else math.inf


def best_point(losses: Mapping[Point, float]) -> Point:
    """The value, or values of several fields, of the lowest loss (ties: the lowest). That of a diverged one is inf."""
    return min(sorted(losses), key=lambda point: losses[point])


def tune(
    grid: Mapping[str, Sequence[float]], loss_of: Callable[[GridPoint], float | None], extensions: int = 1
) -> tuple[list[GridPoint], GridPoint, bool]:
    """The points to run with the tuning seeds, that of the lowest mean loss so far (ties: the first, lowest), and
    whether it is final: each point has a loss, math.inf if a run diverged or failed. If the best is at an edge of an
    axis, that is extended and the new points are run, up to `extensions` times."""
    axes = {name: list(values) for name, values in grid.items()}
    while True:
        points: list[GridPoint] = list(grid_points(axes))
        losses = {tuple(point.values()): loss for point in points if (loss := loss_of(point)) is not None}
        best = dict(zip(axes, best_point(losses), strict=True)) if losses else points[0]
        if len(losses) < len(points):
            return points, best, False
        wider = {name: extended(values, best[name]) for name, values in axes.items()} if extensions else axes
        if wider == axes:
            return points, best, True
        axes = wider
        extensions = extensions - 1


def is_at_edge(value: float, values: Collection[float]) -> bool:
    """Whether a value is the lowest or highest of several tried: the optimum may lie beyond."""
    return min(values) < max(values) and value in (min(values), max(values))


def extended(values: Sequence[float], best: float) -> list[float]:
    """The axis with one more value if the best is at its edge, by the ratio there: [1, 2, 4] and 4 -> [1, 2, 4, 8].
    Values are rounded to 12 digits, so that 0.1 x 3 is 0.3 on every machine."""
    if best == values[-1]:
        return [*values, float(f"{values[-1] * values[-1] / values[-2]:.12g}")]
    if best == values[0]:
        return [float(f"{values[0] * values[0] / values[1]:.12g}"), *values]
    return list(values)


def _point(tuning: Tuning, run: Row) -> TunedValues:
    return tuple(run[name] for name in tuning.fields)
