"""Which configurations are best by a measured quantity: cells ranked by their mean over seeds.

A cell is a configuration without its seed, or a model that was only measured. Its score is the mean over the seeds that
trained to the end; a diverged seed has no score, so a cell that has one is never ranked by the seeds that survived: it
comes after all cells without. Its 95% interval is Student's over seeds, from three seeds on: at two, the half-width is
9 standard deviations.

The *baseline* is the ranked cell that differs from RunConfig's defaults in the fewest of the fields that vary and were
not tuned (of equals the one of the shortest context, then the first cell_id). It stands beside the best, at the end
where it is none of them.

Where a sweep tuned fields, a configuration is ranked at its best values alone; those that were only tried do not count.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.student import mean_interval
from sparsedepth.store.tuning import IS_CHOSEN

KNOBS = tuple(name for name in RunConfig.model_fields if name not in ("seed", "allow"))
"""The fields that make a cell."""
_DEFAULTS = {
    name: json.dumps(value) if isinstance(value, list) else value
    for name, value in RunConfig().model_dump(mode="json").items()
}
"""As the columns of `runs` hold them."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The first cells of a ranking, as a table, and what stands behind it."""

    table: QueryResult
    """rank, cell_id, model (where any was only measured), the knobs that vary, seeds (with a value), diverged (where
    any did), mean, lo, hi (95% over seeds), note ('baseline')."""
    by: str
    unit: str
    better: str
    """low or high."""
    n_cells: int
    n_runs: int
    n_diverged: int


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
    means are in order of cell_id. Raises ValueError for a quantity that is unknown or has no better direction, for an
    SQL condition that is wrong, and where no run is left.
    """
    by = by or loss_in(store)
    quantity = quantities.rankable(by)
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    conditions = [] if depth is None else [f"n_layers = {int(depth)}"]
    conditions += [] if where is None else [f"({where}\n)"]  # the line break ends a comment in the condition
    columns = ", ".join(("cell_id", "model", "outcome", "tuning", "tuned_fields", by, *KNOBS))
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
    return Ranking(
        table=_table(ranked, by, top),
        by=by,
        unit=quantity.unit,
        better=quantity.better,
        n_cells=len(cells),
        n_runs=len(rows),
        n_diverged=sum(cell.n_diverged for cell in cells),
    )


def heading(ranking: Ranking) -> str:
    """What a ranking's table shows, in one line."""
    unit = f" [{ranking.unit}]" if ranking.unit not in ("", "1") else ""
    diverged = f", {ranking.n_diverged} of them diverged" if ranking.n_diverged else ""
    return (
        f"{ranking.by}{unit}, {ranking.better} is better, mean over seeds with 95% interval (Student's): "
        f"{ranking.n_cells} configurations, {ranking.n_runs} runs{diverged}"
    )


def _cells(rows: tuple[tuple[Any, ...], ...]) -> list[_Cell]:
    by_cell = defaultdict(list)
    for cell_id, model, outcome, tuning, tuned, value, *knobs in rows:
        by_cell[cell_id, model, tuning, tuned].append((outcome, value, knobs))
    return [
        _Cell(
            cell_id=cell_id,
            model=model,
            tuning=tuning,
            tuned=frozenset(tuned.split(",") if tuned else ()),
            knobs=dict(zip(KNOBS, runs[0][2], strict=True)),
            values=[value for outcome, value, _ in runs if outcome == "ok" and value is not None],
            n_diverged=sum(outcome == "diverged" for outcome, _, _ in runs),
        )
        for (cell_id, model, tuning, tuned), runs in by_cell.items()
    ]


def _table(ranked: list[_Cell], by: str, top: int) -> QueryResult:
    varying = varying_fields(ranked)
    baseline = min(ranked, key=lambda cell: (cell.model is not None, *_away(cell, varying)))
    shown = ranked[:top] if baseline in ranked[:top] else [*ranked[:top], baseline]
    optional = {
        "model": any(cell.model is not None for cell in ranked),
        "tuning": any(cell.tuning for cell in ranked),
        "diverged": any(cell.n_diverged for cell in ranked),
    }
    names = ("rank", "cell_id", "model", *varying, "tuning", "seeds", "diverged", by, "lo", "hi", "note")
    columns = tuple(name for name in names if optional.get(name, True))
    rows = []
    for cell in shown:
        mean, lo, hi = cell.score
        values = {
            **cell.knobs,
            "rank": ranked.index(cell) + 1,
            "cell_id": cell.cell_id,
            "model": cell.model,
            "tuning": cell.tuning,
            "seeds": len(cell.values),
            "diverged": cell.n_diverged,
            by: mean,
            "lo": lo,
            "hi": hi,
            "note": "baseline" if cell is baseline else None,
        }
        rows.append(tuple(values[name] for name in columns))
    return QueryResult(columns=columns, rows=tuple(rows))


def varying_fields(cells: Sequence[_Cell]) -> list[str]:
    """The fields of which the cells state more than one value."""
    stated = {name: {cell.knobs[name] for cell in cells if _states(cell, name)} for name in KNOBS}
    return [name for name in KNOBS if len(stated[name]) > 1]


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
