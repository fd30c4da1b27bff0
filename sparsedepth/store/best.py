"""Which configurations are best by a measured quantity: cells ranked by their mean over seeds.

A cell is every field of a run but the seed, or a model that was only measured. Its score is the mean over the seeds
that trained to the end; a diverged seed has no score, so a cell that has one is never ranked by the seeds that
survived: it comes after all cells without, as does a proposal of a search that lacks seeds. Its 95% interval is
Student's over seeds, from three seeds on: at two, the half-width is 9 standard deviations. It ends where the quantity's
range does: no loss is below 0.

The *baseline* (`store.setting`) stands beside the best, at the end where it is none of them. In a folder that a sampler
filled (`store.search`) no proposal is a baseline: there the whole front of its objectives is shown.

Where a sweep tuned fields, a configuration is ranked at its best values alone; those that were only tried do not count.
"""

import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsedepth import quantities
from sparsedepth.config.images import unit_for
from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.store import render
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import SCORES, degeneracy_note, read_scores
from sparsedepth.store.imported_run import import_note_of_rows
from sparsedepth.store.packages import version_differences
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import Search, on_front, search_of
from sparsedepth.store.setting import Configuration, Settings, number_text, settings_of
from sparsedepth.store.small_sample import MIN_VALUES, mean_interval
from sparsedepth.store.tuning_roles import IS_CHOSEN, IS_TRAINED, parse_tuned_fields

MAX_FRONT = 30
"""Ranks among which the front of a search is shown."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The first cells of a ranking, as a table, and what stands behind it."""

    table: QueryResult
    """rank (equal means share one; NULL without a mean), cell_id, source (of several results folders), model (where any
    was only measured), the knobs that vary, seeds (with a value), diverged (where any did), params and flops (of
    training) over the baseline's, mean, lo, hi (95% over seeds), note (baseline, front, incomplete, no value)."""
    settings: tuple[str, ...]
    """What each row has away from the baseline, in words."""
    tuned: tuple[str, ...]
    """The fields that vary because they were tuned."""
    by: str
    unit: str
    better: str
    """low or high."""
    n_cells: int
    n_runs: int
    n_diverged: int
    search: Search | None
    """The search that filled the folder; None where a grid did, or there are several folders."""
    roots: tuple[Path, ...]
    knobs: tuple[Mapping[str, Any], ...]
    """Every field of each row's configuration."""
    cost: str
    """Whose parameters and FLOPs those of the table are divided by; empty where they are not known."""
    caution: str
    """What to know of the score, the data and the runs' packages before it is believed; empty where all is well."""


@dataclass(frozen=True, kw_only=True)
class _Ranked(Configuration):
    tuning: str | None
    """best or edge, where the sweep tuned fields for this configuration."""
    values: list[float]
    sources: frozenset[str]
    """The results folders that its runs lie in."""
    n_diverged: int
    is_incomplete: bool
    """Whether it is a search's proposal that lacks seeds."""
    objectives: list[float | None] = field(default_factory=list)
    """Means over seeds, of a search's objectives; None where a seed has no value."""
    is_on_front: bool = False

    @property
    def score(self) -> tuple[float | None, float | None, float | None]:
        """Mean over seeds, and its interval."""
        return mean_interval(self.values)


def best(
    store: Store, by: str | None = None, depth: int | None = None, top: int = 5, where: str | None = None
) -> Ranking:
    """The `top` cells by the mean of a quantity of `runs` (default: the loss that compares them), in the direction that
    `sparsedepth.quantities` calls better.

    `depth` keeps the runs of that n_layers, `where` those that meet an SQL condition over the columns of `runs`. Equal
    means share a rank, and are in order of cell_id. Raises ValueError for a quantity that is unknown or has no better
    direction, for an SQL condition that is wrong, and where no run is left.
    """
    search = search_of(store.roots)
    by = by or (search.objectives[0] if search else loss_in(store))
    quantity = quantities.rankable(by)
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    conditions = [] if depth is None else [f"n_layers = {int(depth)}"]
    conditions += [] if where is None else [store.condition(where)]
    facts = ("cell_id", "model", "tuning", "tuned_fields", "outcome", "folder", "params_total", "train_flops", by)
    objectives = search.objectives if search else ()
    columns = dict.fromkeys((*facts, *CELL_FIELDS, *objectives))
    conditions.append(IS_CHOSEN)
    rows = store.sql(f"SELECT {', '.join(columns)} FROM runs WHERE {' AND '.join(conditions)}").records()
    if not rows:
        raise ValueError(_none_of(store, conditions[:-1]))
    cells = _cells(rows, by, objectives, _incomplete(store, search))
    sign = -quantities.sign(by)

    def place(cell: _Ranked) -> tuple[bool, bool, float, str]:
        mean = cell.score[0]
        return (
            cell.n_diverged > 0 or cell.is_incomplete,
            mean is None,
            0.0 if mean is None else sign * mean,
            cell.cell_id,
        )

    ranked = sorted(cells, key=place)
    places = [place(cell)[:-1] for cell in ranked]
    ranks = [None if cell.score[0] is None else places.index(at) + 1 for cell, at in zip(ranked, places, strict=True)]
    settings = settings_of(ranked)
    if search:
        mark_front(ranked, objectives)
        shown = [cell for i, cell in enumerate(ranked) if i < top or (cell.is_on_front and i < MAX_FRONT)]
        baseline = None
    else:
        (baseline,) = [cell for cell in ranked if cell is settings.baseline]
        shown = ranked[:top] if baseline in ranked[:top] else [*ranked[:top], baseline]
    table = _table(shown, dict(zip(map(id, ranked), ranks, strict=True)), baseline, settings.varying, by, objectives)
    return Ranking(
        table=table,
        settings=tuple(_setting(cell, settings, search) for cell in shown),
        search=search,
        roots=store.roots,
        knobs=tuple(cell.knobs for cell in shown),
        tuned=settings.tuned,
        by=by,
        unit=unit_for(quantity.unit, (row["corpus"] for row in rows)),
        better=quantity.better,
        n_cells=len(cells),
        n_runs=len(rows),
        n_diverged=sum(cell.n_diverged for cell in cells),
        cost=settings.cost_text(table.columns),
        caution="\n".join(filter(None, (settings.depth_text, _caution(store, by, conditions), settings.data_text))),
    )


def mark_front(cells: list[_Ranked], objectives: Sequence[str]) -> None:
    """Replace those on the front by ones that say so."""
    import numpy as np

    values = np.array([[math.nan if value is None else value for value in cell.objectives] for cell in cells])
    for i, is_on_front in enumerate(on_front(values, objectives)):
        cells[i] = replace(cells[i], is_on_front=bool(is_on_front))


def _caution(store: Store, by: str, conditions: Sequence[str]) -> str:
    met = " AND ".join(conditions)
    imported = store.sql(f"SELECT origin, unknown_fields FROM runs WHERE origin IS NOT NULL AND {met}").rows
    cautions = [import_note_of_rows(imported)] if imported else []
    if by in SCORES:
        cautions.append(degeneracy_note(by, read_scores(store, by, met)))
    cautions.append(version_differences(text for (text,) in store.sql(f"SELECT packages FROM runs WHERE {met}").rows))
    return "; ".join(filter(None, cautions))


def heading(ranking: Ranking) -> str:
    """What a ranking's table shows, and what to know of a score before it is believed."""
    columns = ranking.table.columns
    unit = f" [{ranking.unit}]" if ranking.unit not in ("", "1") else ""
    diverged = f", {ranking.n_diverged} of them diverged" if ranking.n_diverged else ""
    ends = [(row[columns.index("lo")], row[columns.index("hi")]) for row in ranking.table.rows]
    cut = quantities.rankable(ranking.by).cut_at(*ends)
    has_interval = any(lo is not None for lo, _ in ends)
    interval = f"with 95% interval (Student's{cut})" if has_interval else f"(an interval needs {MIN_VALUES} seeds)"
    advice = ""
    if ranking.search:
        folder = shlex.join(map(str, ranking.roots))
        advice = (
            f"\nthese again, with seeds of their own:\n  sparsedepth best {folder} --top {min(3, ranking.n_cells)} "
            f"--again again.yaml && sparsedepth sweep again.yaml -o {folder}-again"
        )
    depths = " of all depths (--depth N: of one)" if "n_layers" in columns and not ranking.search else ""
    n_shown = len(ranking.table.rows)
    part = f", {n_shown} of them below" if n_shown < ranking.n_cells else ""
    lines = (
        ranking.search.text if ranking.search else "",
        f"{ranking.by}{unit}, {ranking.better} is better, mean over seeds {interval}:",
        f"{ranking.n_cells} configurations{depths}{part}, {ranking.n_runs} runs{diverged}",
        ranking.cost,
        ranking.caution,
    )
    return f"{render.wrapped(filter(None, lines)).rstrip()}{advice}"


def answer(ranking: Ranking) -> str:
    """Heading and table, and which commands tell whether a difference is one: ranks do not."""
    page = f"{heading(ranking)}\n{text(ranking)}\n"
    if ranking.search or ranking.n_cells == 1:  # a search's heading has advice of its own
        return page
    folders = shlex.join(map(str, ranking.roots))
    return page + render.wrapped(
        [
            f"whether a difference is more than chance, over the seeds that both have: sparsedepth effects {folders}; "
            f"what to train: sparsedepth recipe {folders}"
        ]
    )


def text(ranking: Ranking, width: int | None = None) -> str:
    """The ranking for a terminal of `width` characters: a line for each configuration, which is named by what it has
    away from the baseline. cell_id stands where there is room."""
    wanted = (
        "rank",
        "cell_id",
        "source",
        "n_layers",
        *ranking.tuned,
        "seeds",
        "diverged",
        ranking.by,
        "lo",
        "hi",
        *(ranking.search.objectives[1:] if ranking.search else ()),
        "params",
        "flops",
        *(("note",) if ranking.search else ()),
    )
    columns = ranking.table.columns
    places = [columns.index(name) for name in wanted if name in columns]
    names = {str(root): root.name for root in ranking.roots}
    if len(set(names.values())) < len(names):
        names = {}

    def shown_value(row: Sequence[Any], at: int) -> Any:
        if columns[at] == "source":
            return ", ".join(names.get(source, source) for source in row[at].split(", "))
        return number_text(row[at]) if columns[at] in ranking.tuned else row[at]

    rows = tuple(
        (*(shown_value(row, at) for at in places), setting)
        for row, setting in zip(ranking.table.rows, ranking.settings, strict=True)
    )
    shown = ["mean" if columns[at] == ranking.by else columns[at] for at in places]
    answer = QueryResult(columns=(*shown, "setting"), rows=rows)
    return render.compact(answer, ("cell_id", "params"), width=width, max_rows=len(rows))


def _setting(cell: _Ranked, settings: Settings, search: Search | None) -> str:
    """A cell in words, with remarks in brackets; of a search, the value of every axis."""
    if search:
        return ", ".join(f"{name}={number_text(cell.knobs[name])}" for name in search.axes if name != "n_layers")
    named = cell.model or settings.label(cell.knobs)
    remarks = []
    if cell.tuning == "edge":
        remarks.append("tuned to the edge")
    if not cell.values:
        remarks.append("no value")
    return f"{named} ({', '.join(remarks)})" if remarks else named


def _incomplete(store: Store, search: Search | None) -> set[str]:
    """The cells of a search that lack seeds, whatever rows are asked for."""
    if search is None:
        return set()
    few = f"SELECT cell_id FROM runs WHERE {IS_TRAINED} GROUP BY 1 HAVING count(*) < {search.n_seeds}"
    return {cell_id for (cell_id,) in store.sql(few).rows}


def _cells(
    rows: Sequence[Mapping[str, Any]], by: str, objectives: Sequence[str], incomplete: set[str]
) -> list[_Ranked]:
    """One entry for each cell or measured model; more where the folders give its runs other roles in tuning."""
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
            objectives=[None if cell_id in incomplete else _mean(runs, name) for name in objectives],
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
    """The values of a column in the runs that finished, where there are any."""
    return [run[column] for run in runs if run["outcome"] == "ok" and run[column] is not None]


def _mean(runs: Sequence[Mapping[str, Any]], column: str) -> float | None:
    """Mean over seeds; None where a seed did not finish, or has no value."""
    values = _finished(runs, column)
    return mean_interval(values)[0] if len(values) == len(runs) else None


def _table(
    shown: list[_Ranked],
    ranks: dict[int, int | None],
    baseline: _Ranked | None,
    varying: Sequence[str],
    by: str,
    objectives: Sequence[str],
) -> QueryResult:
    sources = frozenset[str]().union(*(cell.sources for cell in shown))
    params, flops = (baseline.params, baseline.flops) if baseline else (None, None)
    of_params = {cell.cell_id: cell.params / params for cell in shown if cell.params and params}
    of_flops = {cell.cell_id: cell.flops / flops for cell in shown if cell.flops and flops}
    optional = {
        "source": len(sources) > 1,
        "model": any(cell.model is not None for cell in shown),
        "tuning": any(cell.tuning for cell in shown),
        "diverged": any(cell.n_diverged for cell in shown),
        "params": bool(of_params),
        "flops": bool(of_flops),
    }
    names = ("rank", "cell_id", "source", "model", *varying, "tuning", "seeds", "diverged", "params", "flops")
    others = [name for name in objectives if name != by]
    columns = tuple(name for name in (*names, by, "lo", "hi", *others, "note") if optional.get(name, True))
    clipped = quantities.rankable(by).clipped
    rows = []
    for cell in shown:
        mean, lo, hi = cell.score
        holds = {"baseline": cell is baseline, "front": cell.is_on_front, "incomplete": cell.is_incomplete}
        holds["no value"] = mean is None
        values = {
            **dict(zip(objectives, cell.objectives, strict=True)),
            **cell.knobs,
            "rank": ranks[id(cell)],
            "cell_id": cell.cell_id,
            "source": ", ".join(sorted(cell.sources)),
            "model": cell.model,
            "tuning": cell.tuning,
            "seeds": len(cell.values),
            "diverged": cell.n_diverged,
            "params": of_params.get(cell.cell_id),
            "flops": of_flops.get(cell.cell_id),
            by: mean,
            "lo": clipped(lo),
            "hi": clipped(hi),
            "note": ", ".join(note for note, is_so in holds.items() if is_so) or None,
        }
        rows.append(tuple(values[name] for name in columns))
    return QueryResult(columns=columns, rows=tuple(rows))


def _none_of(store: Store, asked: Sequence[str]) -> str:
    """Why nothing can be ranked: what was asked for, beside what there is."""
    depths = [str(depth) for (depth,) in store.sql("SELECT DISTINCT n_layers FROM runs ORDER BY 1").rows]
    if depths and asked:
        return f"no run has {' and '.join(asked)}; the store has runs of n_layers {', '.join(depths)}"
    return no_runs(store)


def no_runs(store: Store) -> str:
    """What a store without a complete run holds, and which command helps."""
    place = shlex.join(map(str, store.roots))
    if store.sql("SELECT 1 FROM toys LIMIT 1").rows:
        return f"{place} holds toy networks and no runs; sparsedepth plot {place} --figure toy draws them"
    return f"{place} holds no complete run; sparsedepth status {place} says how its sweep stands"
