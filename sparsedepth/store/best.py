"""Which configurations are best by a measured quantity: cells ranked by their mean over seeds.

A cell is a configuration without its seed, or a model that was only measured. Its score is the mean over the seeds that
trained to the end; a diverged seed has no score, so a cell that has one is never ranked by the seeds that survived: it
comes after all cells without.
"""

import difflib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sparsedepth import glossary
from sparsedepth.config.run import RunConfig
from sparsedepth.store.answer import Answer
from sparsedepth.store.open import Store

KNOBS = tuple(name for name in RunConfig.model_fields if name not in ("seed", "allow"))
"""The fields that make a cell."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The first cells of a ranking, as a table, and what stands behind it."""

    table: Answer
    """rank, cell_id, model (where any was only measured), the knobs that vary, seeds (with a value), diverged (where
    any did), mean, its standard error."""
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
    knobs: dict[str, Any]
    values: list[float]
    n_diverged: int

    @property
    def mean(self) -> float | None:
        return math.fsum(self.values) / len(self.values) if self.values else None

    @property
    def standard_error(self) -> float | None:
        """Of the mean, from the unbiased variance over seeds; None for a single seed, which shows no spread."""
        n, mean = len(self.values), self.mean
        if mean is None or n < 2:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (n - 1) / n)


def best(
    store: Store, by: str = "val_loss", depth: int | None = None, top: int = 5, where: str | None = None
) -> Ranking:
    """The `top` cells by the mean of a quantity of `runs`, in the direction that the glossary calls better.

    `depth` keeps the runs of that n_layers, `where` those that meet an SQL condition over the columns of `runs`. Equal
    means are in order of cell_id. Raises ValueError for a quantity that is unknown or has no better direction, for an
    SQL condition that is wrong, and where no run is left.
    """
    quantity = _ranked_quantity(by)
    if top < 1:
        raise ValueError(f"top={top} must be at least 1")
    conditions = [] if depth is None else [f"n_layers = {int(depth)}"]
    conditions += [] if where is None else [f"({where}\n)"]  # the line break ends a comment in the condition
    columns = ", ".join(("cell_id", "model", "outcome", by, *KNOBS))
    text = f"SELECT {columns} FROM runs WHERE {' AND '.join(conditions or ['true'])}"
    rows = store.sql(text).rows
    if not rows:
        raise ValueError(f"no run has {' and '.join(conditions)}; {_known_depths(store)}")
    cells = _cells(rows)
    sign = 1 if quantity.better == "low" else -1

    def place(cell: _Cell) -> tuple[bool, bool, float, str]:
        mean = cell.mean
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


def _ranked_quantity(by: str) -> glossary.Quantity:
    quantity = glossary.run_quantity(by)
    rankable = [other.name for other in glossary.RUNS if other.better]
    if quantity is None:
        near = difflib.get_close_matches(by, rankable, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(rankable)}"
        raise ValueError(f"there is no measured quantity {by!r}; {hint}")
    if not quantity.better:
        raise ValueError(
            f"{by!r} has no better direction ({quantity.meaning}); rank by one of {', '.join(rankable)}, "
            f"or sort by it in SQL"
        )
    return quantity


def _cells(rows: tuple[tuple[Any, ...], ...]) -> list[_Cell]:
    by_cell = defaultdict(list)
    for cell_id, model, outcome, value, *knobs in rows:
        by_cell[cell_id, model].append((outcome, value, knobs))
    return [
        _Cell(
            cell_id=cell_id,
            model=model,
            knobs=dict(zip(KNOBS, runs[0][2], strict=True)),
            values=[value for outcome, value, _ in runs if outcome == "ok" and value is not None],
            n_diverged=sum(outcome == "diverged" for outcome, _, _ in runs),
        )
        for (cell_id, model), runs in by_cell.items()
    ]


def _table(ranked: list[_Cell], by: str, top: int) -> Answer:
    stated = {name: {cell.knobs[name] for cell in ranked if _states(cell, name)} for name in KNOBS}
    varying = [name for name in KNOBS if len(stated[name]) > 1]
    any_measured = any(cell.model is not None for cell in ranked)
    any_diverged = any(cell.n_diverged for cell in ranked)
    rows = tuple(
        (
            rank,
            cell.cell_id,
            *([cell.model] if any_measured else []),
            *(cell.knobs[name] for name in varying),
            len(cell.values),
            *([cell.n_diverged] if any_diverged else []),
            cell.mean,
            cell.standard_error,
        )
        for rank, cell in enumerate(ranked[:top], start=1)
    )
    model = ("model",) if any_measured else ()
    diverged = ("diverged",) if any_diverged else ()
    return Answer(columns=("rank", "cell_id", *model, *varying, "seeds", *diverged, by, "stderr"), rows=rows)


def _states(cell: _Cell, knob: str) -> bool:
    """Whether the cell says what the knob was: a NULL of a trained run is a setting, of a measured model not known."""
    return cell.model is None or cell.knobs[knob] is not None


def _known_depths(store: Store) -> str:
    depths = [str(depth) for (depth,) in store.sql("SELECT DISTINCT n_layers FROM runs ORDER BY 1").rows]
    return f"the store has runs of n_layers {', '.join(depths)}"
