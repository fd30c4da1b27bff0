"""Which configurations are best by a measured quantity: cells ranked by their mean over seeds.

A cell is all fields of a run but the seed, or a model that was only measured. Its score is the mean over finished
seeds, with Student's 95% interval from three seeds on, clipped to the quantity's range. The mean of the surviving seeds
is optimistic, so cells with a diverged seed, and proposals of a search that lack seeds, rank below all others. Where a
sweep tuned fields, only the chosen values are ranked. A degenerate score of depth (`store.degeneracy`) is shown beside
the form that ranks in its place. The table always includes the *baseline* (`store.setting`), or of a sampler's folder
(`store.search`) the Pareto front."""

import shlex
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from sparsedepth import quantities
from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.store.comparable_loss import layers_hint, loss_in, version_differences
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import columns_for, common_weakness, degeneracy, usable_form
from sparsedepth.store.packs import no_run_text
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import least_seeds, on_front, search_of, search_text
from sparsedepth.store.setting import (
    Configuration,
    Settings,
    only_tuning_text,
    planned_configurations,
    relative,
    settings_of,
)
from sparsedepth.store.small_sample import MIN_VALUES, mean_interval, seed_means
from sparsedepth.store.subject import import_note
from sparsedepth.store.tuning_roles import IS_CHOSEN, IS_TRAINED, parse_tuned_fields
from sparsedepth.words.plain_text import wrapped
from sparsedepth.words.table import fitted_table
from sparsedepth.words.values import number_text

FACTS = (
    *("cell_id", "seed", "model", "tuning", "tuned_fields", "outcome", "folder", "params_total", "train_flops"),
    *("origin", "unknown_fields", "packages"),
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
    knobs: tuple[Mapping[str, Any], ...]
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
    degenerate: str
    """Which of its scores are degenerate, and the form that ranks in place; empty where none is."""
    caution: str
    """Warnings about the scores, the data and package versions; empty where there are none."""


@dataclass(frozen=True, kw_only=True)
class _Ranked(Configuration):
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
    conditions = [] if depth is None else [f"n_layers = {int(depth)}"]
    conditions += [] if where is None else [store.condition(where)]
    condition = " AND ".join([*conditions, IS_CHOSEN])
    objectives = search.objectives if search else ()
    beside = tuple(dict.fromkeys((*objectives, by)))
    quantities.check_scored(by, store.sql("SELECT * FROM runs LIMIT 0").columns)
    columns = dict.fromkeys((*FACTS, *CELL_FIELDS, *beside, *chain.from_iterable(map(columns_for, beside))))
    quoted = ", ".join(f'"{name}"' for name in columns)
    rows = store.sql(f"SELECT {quoted} FROM runs WHERE {condition}").records()
    if not rows:
        raise ValueError(_why_none(store, conditions))
    notes = [degeneracy(name, rows).text for name in objectives if name != by]
    by, note = usable_form(by, rows, "ranked by")
    degenerate = "; ".join(filter(None, (note, *notes)))
    cells = _cells(rows, by, beside, _incomplete(store, search))
    values = np.array([cell.beside[: len(objectives)] for cell in cells], dtype=float)  # None becomes NaN
    cells = _ranked(cells, on_front(values, objectives) if search else [False] * len(cells), by)
    planned = [] if where or search else planned_configurations(store.roots)
    settings = settings_of(cells, [cell for cell in planned if depth in (None, cell.knobs["n_layers"])])
    baseline = None if search else next((cell for cell in cells if cell is settings.baseline), None)
    shown = [
        cell for i, cell in enumerate(cells) if i < top or cell is baseline or (cell.is_on_front and i < MAX_FRONT)
    ]
    return Ranking(
        table=_table(shown, baseline, settings.varying, by, beside),
        settings=tuple(_setting(cell, settings, search) for cell in shown),
        knobs=tuple(cell.knobs for cell in shown),
        differences=settings,
        by=by,
        beside=tuple(name for name in beside if name != by),
        n_cells=len(cells),
        top=top,
        n_runs=len(rows),
        n_diverged=sum(cell.n_diverged for cell in cells),
        search=search,
        roots=store.roots,
        degenerate=degenerate,
        caution="\n".join(filter(None, (settings.depth_text, _caution(rows, by, degenerate), settings.data_text))),
    )


def _ranked(cells: Sequence[_Ranked], is_on_front: Iterable[bool], by: str) -> list[_Ranked]:
    """The cells in order, the best first, each with its rank."""
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


def _caution(rows: Sequence[Mapping[str, Any]], by: str, degenerate: str) -> str:
    weakness = common_weakness(rows)
    notes = (
        import_note((row["origin"], row["unknown_fields"]) for row in rows),
        f"no evidence about depth: {weakness}" if weakness else "",
        degenerate,
        layers_hint(by),
        version_differences(row["packages"] for row in rows),
    )
    return "; ".join(filter(None, notes))


def heading(ranking: Ranking) -> str:
    """What the table shows, and warnings."""
    columns, quantity = ranking.table.columns, quantities.rankable(ranking.by)
    unit = f" [{quantity.unit}]" if quantity.unit not in ("", "1") else ""
    diverged = ""
    if ranking.n_diverged:
        diverged = f", {ranking.n_diverged} diverged; configurations with a diverged run rank last, by the others"
    interval, advice = f"(an interval needs {MIN_VALUES} seeds)", ""
    if ends := [(row["lo"], row["hi"]) for row in ranking.table.records() if row["lo"] is not None]:
        interval = f"with 95% interval (Student's{quantity.cut_at(*ends)})"
    if ranking.search:
        folder = shlex.join(map(str, ranking.roots))
        advice = (
            f"\nto run these again with new seeds:\n  sparsedepth best {folder} --top {min(3, ranking.n_cells)} "
            f"--again again.yaml && sparsedepth sweep again.yaml -o {folder}-again"
        )
    depths = " of all depths (--depth N for one)" if "n_layers" in columns and not ranking.search else ""
    n_shown = len(ranking.table.rows)
    more = f" (top {ranking.top} and the {'front' if ranking.search else 'baseline'})"
    part = f", {n_shown} shown{more if n_shown > ranking.top else ''}" if n_shown < ranking.n_cells else ""
    lines = (
        search_text(ranking.search) if ranking.search else "",
        f"{ranking.by}{unit}, {quantity.better}er is better, mean over seeds {interval}:",
        f"{ranking.n_cells} configurations{depths}{part}, {ranking.n_runs} runs{diverged}",
        ranking.differences.cost_text(columns),
        "" if ranking.search else ranking.differences.baseline_text,
        ranking.caution,
    )
    return f"{wrapped(filter(None, lines)).rstrip()}{advice}"


def answer(ranking: Ranking) -> str:
    """Heading, table, and the commands that test differences, which ranks do not."""
    page = f"{heading(ranking)}\n{text(ranking)}\n"
    is_measured = all(row.get("model") for row in ranking.table.records())
    if ranking.search or ranking.n_cells == 1 or is_measured:  # a search's heading has its own advice
        return page
    folders = shlex.join(map(str, ranking.roots))
    advice = (
        f"to test differences over shared seeds: `sparsedepth effects {folders}`; "
        f"to choose what to train: `sparsedepth recipe {folders}`"
    )
    return page + wrapped([advice])


def text(ranking: Ranking, width: int | None = None) -> str:
    """The ranking for a terminal, a line per configuration, with what differs from the baseline."""
    tuned, note = ranking.differences.tuned, ["note"] if ranking.search else []
    values = ("seeds", "diverged", ranking.by, "lo", "hi", *ranking.beside)
    names = ("rank", "cell_id", "source", "n_layers", *tuned, *values, "params", "flops", *note)
    names = tuple(name for name in names if name in ranking.table.columns)
    sources = {str(root): root.name for root in ranking.roots}
    if len(set(sources.values())) < len(sources):
        sources = {}

    def shown(name: str, value: Any) -> Any:
        if name == "source":
            return ", ".join(sources.get(source, source) for source in value.split(", "))
        return number_text(value) if name in tuned else value

    rows = tuple(
        (*(shown(name, row[name]) for name in names), setting)
        for row, setting in zip(ranking.table.records(), ranking.settings, strict=True)
    )
    heads = ("mean" if name == ranking.by else name for name in names)
    table = QueryResult(columns=(*heads, "setting"), rows=rows)
    return fitted_table(table, ("cell_id", "params"), width, len(rows)).text


def _setting(cell: _Ranked, settings: Settings, search: SweepDefinition | None) -> str:
    """The label of a cell, with remarks in brackets; in a search the value on every axis."""
    if search:
        return ", ".join(f"{name}={number_text(cell.knobs[name])}" for name in search.varied if name != "n_layers")
    label = cell.model or settings.label(cell.knobs)
    remarks = ["tuned to the edge"] if cell.tuning == "edge" else []
    remarks += [] if cell.values else ["no value"]
    return f"{label} ({', '.join(remarks)})" if remarks else label


def _incomplete(store: Store, search: SweepDefinition | None) -> set[str]:
    """The cells of a search that lack seeds in the whole store."""
    if search is None:
        return set()
    sql = f"SELECT cell_id FROM runs WHERE {IS_TRAINED} GROUP BY 1 HAVING count(*) < {least_seeds(search)}"
    return {cell_id for (cell_id,) in store.sql(sql).rows}


def _cells(rows: Sequence[Mapping[str, Any]], by: str, beside: Sequence[str], incomplete: set[str]) -> list[_Ranked]:
    """One entry per cell or measured model; several where the tuning roles of its runs differ between folders."""
    by_cell = defaultdict[tuple[Any, ...], list[Mapping[str, Any]]](list)
    for row in rows:
        by_cell[row["cell_id"], row["model"], row["tuning"], row["tuned_fields"]].append(row)
    return [
        _Ranked(
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


def _finished(runs: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """The values of a column in finished runs, one per seed, without missing ones."""
    return seed_means((run["seed"], run[column]) for run in runs if run["outcome"] == "ok" and run[column] is not None)


def _mean(runs: Sequence[Mapping[str, Any]], column: str) -> float | None:
    """Mean over seeds; None where a run did not finish or has no value."""
    is_complete = all(run["outcome"] == "ok" and run[column] is not None for run in runs)
    return mean_interval(_finished(runs, column))[0] if is_complete else None


def _table(
    shown: list[_Ranked], baseline: _Ranked | None, varying: Sequence[str], by: str, beside: Sequence[str]
) -> QueryResult:
    clipped = quantities.rankable(by).clipped
    rows = []
    for cell in shown:
        mean, lo, hi = mean_interval(cell.values)
        applies = (cell is baseline, cell.is_on_front, cell.is_incomplete, mean is None)
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
    optional = {name: any(row[name] for row in rows) for name in ("model", "tuning", "diverged", "params", "flops")}
    optional["source"] = len(frozenset[str]().union(*(cell.sources for cell in shown))) > 1
    names = ("rank", "cell_id", "source", "model", *varying, "tuning", "seeds", "diverged", "params", "flops")
    secondary = [name for name in beside if name != by]
    columns = tuple(name for name in (*names, by, "lo", "hi", *secondary, "note") if optional.get(name, True))
    return QueryResult(columns=columns, rows=tuple(tuple(row[name] for name in columns) for row in rows))


def _why_none(store: Store, conditions: Sequence[str]) -> str:
    depths = [str(depth) for (depth,) in store.sql("SELECT DISTINCT n_layers FROM runs ORDER BY 1").rows]
    if text := only_tuning_text(store):
        return f"{text}; `best` ranks results"
    if depths and conditions:
        asked = " and ".join(conditions).replace("\n)", ")")
        return f"no run has {asked}; the store has runs of n_layers {', '.join(depths)}"
    return no_run_text(store.roots)
