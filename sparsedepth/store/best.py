"""Which configurations are best by a measured quantity: cells ranked by their mean over seeds.

A cell is all fields of a run but the seed, or a model that was only measured. Its score is the mean over finished
seeds, with Student's 95% interval from three seeds on, clipped to the quantity's range. The mean of the surviving seeds
is optimistic, so cells with a diverged seed, and proposals of a search that lack seeds, rank below all others. Where a
sweep tuned fields, only the chosen values are ranked. A degenerate score of depth (`store.degeneracy`) is shown beside
the form that ranks in its place. The table always includes the *baseline* (`store.setting`), or of a sampler's folder
(`store.search`) the Pareto front."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sparsedepth import quantities
from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.quantities.quantity import Named, Row
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import (
    CommonWeakness,
    Degeneracy,
    UsableForm,
    columns_for,
    common_weakness,
    degeneracy,
    usable_form,
)
from sparsedepth.store.made_with import refuse_other_code, version_differences
from sparsedepth.store.packs import no_run
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import least_seeds, on_front, search_of
from sparsedepth.store.setting import (
    Configuration,
    Settings,
    only_tuning,
    planned_configurations,
    relative,
    settings_of,
)
from sparsedepth.store.small_sample import MIN_VALUES, mean_interval, seed_means
from sparsedepth.store.subject import Imported, imported_among
from sparsedepth.store.tuning_roles import IS_CHOSEN, IS_TRAINED, parse_tuned_fields
from sparsedepth.words.best import row_label
from sparsedepth.words.differences import only_tuning_text

FACTS = (
    *("cell_id", "seed", "model", "tuning", "tuned_fields", "outcome", "folder", "params_total", "train_flops"),
    *("origin", "unknown_fields", "packages", "plugins"),
)
"""Columns of `runs` that a ranking needs beside those of the configuration."""
MAX_FRONT = 30
"""Points of a search's front are shown down to this rank."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The first cells of a ranking, as a table, with what its heading needs."""

    table: QueryResult
    """rank (equal means share one; NULL without a mean), cell_id, source (of several results folders), model (where any
    was only measured), the knobs that vary, seeds (with a value), diverged (where any did), params and flops (of
    training) over the baseline's, mean, lo, hi (95% over seeds), `beside`, note (baseline, front, incomplete, no
    value)."""
    settings: tuple[str, ...]
    """The label of each row: how it differs from the baseline."""
    knobs: tuple[Row, ...]
    """All fields of each row's configuration."""
    differences: Settings
    by: str
    """The sound form of a degenerate score, if it has one."""
    beside: tuple[str, ...]
    """Quantities whose means stand beside it: the score asked for, and a search's other objectives."""
    n_cells: int
    top: int
    """Cells that were asked for; the table may have more (the baseline, the front)."""
    n_runs: int
    n_diverged: int
    search: SweepDefinition | None
    roots: tuple[Path, ...]
    n_for_interval: ClassVar[int] = MIN_VALUES
    """Seeds that an interval needs."""
    form: UsableForm
    """The score asked for, and what ranks in its place."""
    judged: tuple[Degeneracy, ...]
    """The other objectives of a search."""
    weakness: CommonWeakness | None
    imported: Imported | None
    versions: Mapping[str, Mapping[str, int]]
    """Packages of several versions -> version -> runs."""


@dataclass(frozen=True, kw_only=True)
class Ranked(Configuration):
    tuning: str | None
    values: list[float]
    """Of `by`, one per seed."""
    sources: frozenset[str]
    """Results folders of its runs."""
    n_diverged: int
    is_incomplete: bool
    """Whether it is a search's proposal that lacks seeds."""
    beside: list[float | None]
    """Mean over seeds of each objective of a search, then of the score asked for; None where a seed has no value."""
    rank: int | None = None
    is_on_front: bool = False

    @property
    def mean(self) -> float | None:
        return mean_interval(self.values)[0]


def best(
    store: Store, by: str | None = None, depth: int | None = None, top: int = 5, where: str | None = None
) -> Ranking:
    """The `top` cells by the mean of a quantity of `runs` (default: the loss that compares them), of one `depth` and of
    the runs that meet an SQL condition. Raises ValueError for a quantity that is unknown or has no better direction,
    for an invalid condition, and where no run meets it."""
    search = search_of(store.roots)
    by = by or (search.objectives[0] if search else loss_in(store))
    quantities.rankable(by)
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    objectives = search.objectives if search else ()
    beside = tuple(dict.fromkeys((*objectives, by)))
    rows = _rows(store, by, beside, depth, where)
    form = usable_form(by, rows)
    cells = _ranked(_cells(rows, form.form, beside, _incomplete(store, search)), objectives, form.form)
    planned = [] if where or search else planned_configurations(store.roots)
    settings = settings_of(cells, [cell for cell in planned if depth in (None, cell.knobs["n_layers"])])
    baseline = None if search else next((cell for cell in cells if cell is settings.baseline), None)
    shown = [
        cell for i, cell in enumerate(cells) if i < top or cell is baseline or (cell.is_on_front and i < MAX_FRONT)
    ]
    return Ranking(
        table=_table(shown, baseline, settings.varying, form.form, beside),
        settings=tuple(row_label(cell, settings, search) for cell in shown),
        knobs=tuple(cell.knobs for cell in shown),
        differences=settings,
        by=form.form,
        beside=tuple(name for name in beside if name != form.form),
        n_cells=len(cells),
        top=top,
        n_runs=len(rows),
        n_diverged=sum(cell.n_diverged for cell in cells),
        search=search,
        roots=store.roots,
        form=form,
        judged=tuple(degeneracy(name, rows) for name in objectives if name != by),
        weakness=common_weakness(rows),
        imported=imported_among((row["origin"], row["unknown_fields"]) for row in rows),
        versions=version_differences(row["packages"] for row in rows),
    )


def _rows(store: Store, by: str, beside: Sequence[str], depth: int | None, where: str | None) -> list[Named]:
    """The runs that are ranked. Raises ValueError where there are none, with the reason, and for numbers of
    plugins of different code."""
    conditions = [] if depth is None else [f"n_layers = {int(depth)}"]
    conditions += [] if where is None else [store.condition(where)]
    quantities.check_scored(by, store.sql("SELECT * FROM runs LIMIT 0").columns)
    columns = dict.fromkeys((*FACTS, *CELL_FIELDS, *beside, *chain.from_iterable(map(columns_for, beside))))
    quoted = ", ".join(f'"{name}"' for name in columns)
    if rows := store.sql(f"SELECT {quoted} FROM runs WHERE {' AND '.join([*conditions, IS_CHOSEN])}").records():
        for name in beside:
            refuse_other_code(name, (row["plugins"] for row in rows if row[name] is not None))
        return rows
    if progress := only_tuning(store):
        raise ValueError(f"{only_tuning_text(progress)}; `best` ranks results")
    depths = [str(depth) for (depth,) in store.sql("SELECT DISTINCT n_layers FROM runs ORDER BY 1").rows]
    if not depths or not conditions:
        raise no_run(store.roots)
    asked = " and ".join(conditions).replace("\n)", ")")
    raise ValueError(f"no run has {asked}; the store has runs of n_layers {', '.join(depths)}")


def _ranked(cells: Sequence[Ranked], objectives: Sequence[str], by: str) -> list[Ranked]:
    """The cells in order, the best first, each with its rank; on the front of a search with these objectives."""
    values = np.array([cell.beside[: len(objectives)] for cell in cells], dtype=float)  # None becomes NaN
    is_on_front = on_front(values, objectives) if objectives else [False] * len(cells)
    sign = -quantities.sign(by)
    places = [
        (cell.n_diverged > 0 or cell.is_incomplete, cell.mean is None, sign * (cell.mean or 0.0)) for cell in cells
    ]
    in_order = sorted(zip(places, cells, is_on_front, strict=True), key=lambda each: (each[0], each[1].cell_id))
    places.sort()
    return [
        replace(cell, rank=bisect_left(places, place) + 1 if cell.values else None, is_on_front=bool(on_front))
        for place, cell, on_front in in_order
    ]


def _incomplete(store: Store, search: SweepDefinition | None) -> set[str]:
    """The cells of a search that lack seeds in the whole store."""
    if search is None:
        return set()
    sql = f"SELECT cell_id FROM runs WHERE {IS_TRAINED} GROUP BY 1 HAVING count(*) < {least_seeds(search)}"
    return {cell_id for (cell_id,) in store.sql(sql).rows}


def _cells(rows: Sequence[Row], by: str, beside: Sequence[str], incomplete: set[str]) -> list[Ranked]:
    """One entry per cell or measured model; several where the tuning roles of its runs differ between folders."""
    by_cell = defaultdict[tuple[Any, ...], list[Row]](list)
    for row in rows:
        by_cell[row["cell_id"], row["model"], row["tuning"], row["tuned_fields"]].append(row)
    return [
        Ranked(
            cell_id=cell_id,
            model=model,
            tuning=tuning,
            tuned=frozenset(parse_tuned_fields(tuned)),
            knobs={name: runs[0][name] for name in CELL_FIELDS},
            beside=[None if cell_id in incomplete else _mean(runs, name) for name in beside],
            values=_finished(runs, by),
            params=mean_interval(_finished(runs, "params_total"))[0],
            flops=mean_interval(_finished(runs, "train_flops"))[0],
            sources=frozenset(str(Path(run["folder"]).parent.parent) for run in runs),
            n_diverged=sum(run["outcome"] == "diverged" for run in runs),
            is_incomplete=cell_id in incomplete,
        )
        for (cell_id, model, tuning, tuned), runs in by_cell.items()
    ]


def _finished(runs: Sequence[Row], column: str) -> list[float]:
    """The values of a column in finished runs, one per seed, without missing ones."""
    return seed_means((run["seed"], run[column]) for run in runs if run["outcome"] == "ok" and run[column] is not None)


def _mean(runs: Sequence[Row], column: str) -> float | None:
    """Mean over seeds; None where a run did not finish or has no value."""
    is_complete = all(run["outcome"] == "ok" and run[column] is not None for run in runs)
    return mean_interval(_finished(runs, column))[0] if is_complete else None


def _table(
    shown: list[Ranked], baseline: Ranked | None, varying: Sequence[str], by: str, beside: Sequence[str]
) -> QueryResult:
    """The ranking as a table, without the columns that would be empty."""
    clipped = quantities.rankable(by).clipped
    rows = []
    for cell in shown:
        mean, lo, hi = mean_interval(cell.values)
        is_baseline = cell is baseline and not cell.model  # of models it is what their sizes are relative to
        applies = (is_baseline, cell.is_on_front, cell.is_incomplete, mean is None)
        rows.append(
            {
                **vars(cell),
                **dict(zip(beside, cell.beside, strict=True)),
                **cell.knobs,
                "source": ", ".join(sorted(cell.sources)),
                "seeds": len(cell.values),
                "diverged": cell.n_diverged,
                "params": relative(cell.params, baseline.params if baseline else None),
                "flops": relative(cell.flops, baseline.flops if baseline else None),
                by: mean,
                "lo": clipped(lo),
                "hi": clipped(hi),
                "note": ", ".join(compress(("baseline", "front", "incomplete", "no value"), applies)) or None,
            }
        )
    empty = {name for name in ("model", "tuning", "diverged", "params", "flops") if not any(row[name] for row in rows)}
    if len({source for cell in shown for source in cell.sources}) < 2:
        empty.add("source")
    names = ("rank", "cell_id", "source", "model", *varying, "tuning", "seeds", "diverged", "params", "flops")
    names = (*names, by, "lo", "hi", *(name for name in beside if name != by), "note")
    return QueryResult.of_records(rows, [name for name in names if name not in empty])
