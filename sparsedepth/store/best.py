"""Which configurations are best by a measured quantity: cells ranked by their mean over seeds.

A cell is every field of a run but the seed, or a model that was only measured. Its score is the mean over the seeds
that trained to the end; a diverged seed has no score, so a cell that has one is never ranked by the seeds that
survived: it comes after all cells without. Its 95% interval is Student's over seeds, from three seeds on: at two, the
half-width is 9 standard deviations.

The *baseline* is the ranked cell that differs from RunConfig's defaults in the fewest of the fields that vary and were
not tuned (of equals the one of the shortest context, then the first cell_id). It stands beside the best, at the end
where it is none of them.

Where a sweep tuned fields, a configuration is ranked at its best values alone; those that were only tried do not count.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsedepth import quantities
from sparsedepth.config.role import roles
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.store import render
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import SCORES, advice, columns_for
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.student import MIN_VALUES, mean_interval
from sparsedepth.store.tuning import IS_CHOSEN

_DEFAULTS = {
    name: json.dumps(value) if isinstance(value, list) else value
    for name, value in RunConfig().model_dump(mode="json").items()
}
"""As the columns of `runs` hold them."""
_ROLES = roles(RunConfig)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The first cells of a ranking, as a table, and what stands behind it."""

    table: QueryResult
    """rank (equal means share one; NULL without a mean), cell_id, source (of several results folders), model (where any
    was only measured), the knobs that vary, seeds (with a value), diverged (where any did), flops (of training, over
    the baseline's), mean, lo, hi (95% over seeds), note ('baseline', 'no value')."""
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
    caution: str
    """What to know of the score before it is believed, and what to use instead; empty where all is well."""


@dataclass(frozen=True, kw_only=True)
class _Cell:
    cell_id: str
    model: str | None
    """Of a measured model, whose other knobs are not known."""
    tuning: str | None
    """best or edge, where the sweep tuned fields for this configuration."""
    tuned: frozenset[str]
    """The fields whose values tuning chose."""
    knobs: dict[str, Any]
    values: list[float]
    flops: float | None
    """Of training, mean over seeds."""
    sources: frozenset[str]
    """The results folders that its runs lie in."""
    n_diverged: int

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
    by = by or loss_in(store)
    quantity = quantities.rankable(by)
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    conditions = [] if depth is None else [f"n_layers = {int(depth)}"]
    conditions += [] if where is None else [f"({where}\n)"]  # the line break ends a comment in the condition
    facts = ("cell_id", "model", "tuning", "tuned_fields", "outcome", "folder", "train_flops", by)
    columns = ", ".join((*facts, *CELL_FIELDS))
    conditions.append(IS_CHOSEN)
    text = f"SELECT {columns} FROM runs WHERE {' AND '.join(conditions)}"
    rows = store.sql(text).rows
    if not rows:
        raise ValueError(f"no run has {' and '.join(conditions)}; {_known_depths(store)}")
    cells = _cells(rows)
    sign = -quantities.sign(by)

    def place(cell: _Cell) -> tuple[bool, bool, float, str]:
        mean = cell.score[0]
        return (cell.n_diverged > 0, mean is None, 0.0 if mean is None else sign * mean, cell.cell_id)

    ranked = sorted(cells, key=place)
    places = [place(cell)[:-1] for cell in ranked]
    ranks = [None if cell.score[0] is None else places.index(at) + 1 for cell, at in zip(ranked, places, strict=True)]
    varying = varying_fields(ranked)
    baseline = min(ranked, key=lambda cell: (cell.model is not None, *_away(cell, varying)))
    shown = ranked[:top] if baseline in ranked[:top] else [*ranked[:top], baseline]
    tuned = [name for name in varying if any(name in cell.tuned for cell in ranked)]
    chosen = [name for name in varying if name not in tuned and _is_telling(name, ranked)]
    return Ranking(
        table=_table(shown, dict(zip(map(id, ranked), ranks, strict=True)), baseline, varying, by),
        settings=tuple(_setting(cell, baseline, chosen) for cell in shown),
        tuned=tuple(tuned),
        by=by,
        unit=quantity.unit,
        better=quantity.better,
        n_cells=len(cells),
        n_runs=len(rows),
        n_diverged=sum(cell.n_diverged for cell in cells),
        caution=_caution(store, by, conditions),
    )


def _caution(store: Store, by: str, conditions: Sequence[str]) -> str:
    if by not in SCORES:
        return ""
    found = store.sql(f"SELECT {', '.join(columns_for(by))} FROM runs WHERE {' AND '.join(conditions)}")
    return advice(by, [dict(zip(found.columns, row, strict=True)) for row in found.rows])


def heading(ranking: Ranking) -> str:
    """What a ranking's table shows, in one line; in a second one, what to know of a score before it is believed."""
    columns = ranking.table.columns
    unit = f" [{ranking.unit}]" if ranking.unit not in ("", "1") else ""
    diverged = f", {ranking.n_diverged} of them diverged" if ranking.n_diverged else ""
    has_interval = any(row[columns.index("lo")] is not None for row in ranking.table.rows)
    interval = "with 95% interval (Student's)" if has_interval else f"(an interval needs {MIN_VALUES} seeds)"
    caution = f"\n{ranking.caution}" if ranking.caution else ""
    return (
        f"{ranking.by}{unit}, {ranking.better} is better, mean over seeds {interval}: "
        f"{ranking.n_cells} configurations, {ranking.n_runs} runs{diverged}{caution}"
    )


def text(ranking: Ranking, width: int | None = None) -> str:
    """The ranking for a terminal of `width` characters: a line for each configuration, which is named by what it has
    away from the baseline. cell_id stands where there is room."""
    width = width or render.terminal_width()
    names = ["rank", "cell_id", "source", *ranking.tuned, "seeds", "diverged", ranking.by, "lo", "hi", "flops"]
    columns, rows = ranking.table.columns, ranking.table.rows
    values = {name: [row[columns.index(name)] for row in rows] for name in columns}
    known = [name for name in names if any(value is not None for value in values.get(name, ()))]
    headers = {ranking.by: "mean"} | ({"flops": "flops/baseline"} if width > 100 else {})

    def laid_out(names: Sequence[str], settings: Sequence[str]) -> str:
        columns = [list(map(_digits, values[name])) if name in ranking.tuned else values[name] for name in names]
        shown = (*(headers.get(name, name) for name in names), "setting")
        lines = tuple(zip(*columns, settings, strict=True))
        return render.table(QueryResult(columns=shown, rows=lines), width, max_rows=len(rows))

    room, without = 0, [name for name in known if name != "cell_id"]
    for tried in (known, without):
        taken = laid_out(tried, ["setting"] * len(rows)).splitlines()
        room = width - max(map(len, taken)) + len("setting")
        if max(map(len, ranking.settings)) <= room:
            return laid_out(tried, ranking.settings)
    return laid_out(without, [render.shortened(setting, max(room, len("setting"))) for setting in ranking.settings])


def _digits(value: Any) -> str | None:
    return f"{value:g}" if isinstance(value, int | float) else value


def _setting(cell: _Cell, baseline: _Cell, chosen: Sequence[str]) -> str:
    """'lns, kv 1': the chosen fields away from the baseline's."""
    if cell.model is not None:
        named = cell.model
    else:
        differing = [name for name in chosen if cell.knobs[name] != baseline.knobs[name]]
        named = ", ".join(_word(name, cell.knobs[name]) for name in differing) or (
            "baseline" if cell is baseline else "as the baseline"
        )
    remarks = ["tuned to the edge"] * (cell.tuning == "edge") + ["no value"] * (not cell.values)
    return named + f" ({', '.join(remarks)})" * bool(remarks)


def _is_telling(name: str, cells: Sequence[_Cell]) -> bool:
    """Whether a field that varies belongs to a setting: not how a run was judged, nor what only says 'dense'."""
    of_experts = {cell.knobs[name] for cell in cells if cell.knobs["n_experts"]}
    return _ROLES[name].kind not in ("measure", "record") and (not _ROLES[name].needs_experts or len(of_experts) > 1)


def _word(name: str, value: Any) -> str:
    if isinstance(value, str) and value != "none":
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{name.removeprefix('n_').removesuffix('_heads')} {f'{value:g}' if is_number else value}"


def _cells(rows: tuple[tuple[Any, ...], ...]) -> list[_Cell]:
    by_cell = defaultdict(list)
    for cell_id, model, tuning, tuned, *values in rows:
        by_cell[cell_id, model, tuning, tuned].append(values)
    return [
        _Cell(
            cell_id=cell_id,
            model=model,
            tuning=tuning,
            tuned=frozenset(tuned.split(",") if tuned else ()),
            knobs=dict(zip(CELL_FIELDS, runs[0][4:], strict=True)),
            values=[value for outcome, _, _, value, *_ in runs if outcome == "ok" and value is not None],
            flops=mean_interval([flops for outcome, _, flops, *_ in runs if outcome == "ok" and flops is not None])[0],
            sources=frozenset(str(Path(folder).parent.parent) for _, folder, *_ in runs),
            n_diverged=sum(outcome == "diverged" for outcome, *_ in runs),
        )
        for (cell_id, model, tuning, tuned), runs in by_cell.items()
    ]


def _table(
    shown: list[_Cell], ranks: dict[int, int | None], baseline: _Cell, varying: list[str], by: str
) -> QueryResult:
    sources = frozenset[str]().union(*(cell.sources for cell in shown))
    ratios = {cell.cell_id: cell.flops / baseline.flops for cell in shown if cell.flops and baseline.flops}
    optional = {
        "source": len(sources) > 1,
        "model": any(cell.model is not None for cell in shown),
        "tuning": any(cell.tuning for cell in shown),
        "diverged": any(cell.n_diverged for cell in shown),
        "flops": bool(ratios),
    }
    names = ("rank", "cell_id", "source", "model", *varying, "tuning", "seeds", "diverged", "flops")
    columns = tuple(name for name in (*names, by, "lo", "hi", "note") if optional.get(name, True))
    rows = []
    for cell in shown:
        mean, lo, hi = cell.score
        values = {
            **cell.knobs,
            "rank": ranks[id(cell)],
            "cell_id": cell.cell_id,
            "source": ", ".join(sorted(cell.sources)),
            "model": cell.model,
            "tuning": cell.tuning,
            "seeds": len(cell.values),
            "diverged": cell.n_diverged,
            "flops": ratios.get(cell.cell_id),
            by: mean,
            "lo": lo,
            "hi": hi,
            "note": ", ".join(["baseline"] * (cell is baseline) + ["no value"] * (mean is None)) or None,
        }
        rows.append(tuple(values[name] for name in columns))
    return QueryResult(columns=columns, rows=tuple(rows))


def varying_fields(cells: Sequence[_Cell]) -> list[str]:
    """The fields of which the cells state more than one value."""
    stated = {name: {cell.knobs[name] for cell in cells if _states(cell, name)} for name in CELL_FIELDS}
    return [name for name in CELL_FIELDS if len(stated[name]) > 1]


def _away(cell: _Cell, varying: Sequence[str]) -> tuple[int, int, str]:
    """In how many of the chosen fields a cell differs from the defaults, its context, and its name."""
    chosen = [name for name in varying if name not in cell.tuned]
    return sum(cell.knobs[name] != _DEFAULTS[name] for name in chosen), cell.knobs["seq_len"] or 0, cell.cell_id


def _states(cell: _Cell, knob: str) -> bool:
    """Whether the cell says what the knob was: a NULL of a trained run is a setting, of a measured model not known."""
    return cell.model is None or cell.knobs[knob] is not None


def _known_depths(store: Store) -> str:
    depths = [str(depth) for (depth,) in store.sql("SELECT DISTINCT n_layers FROM runs ORDER BY 1").rows]
    return f"the store has runs of n_layers {', '.join(depths)}"
