"""The report's tables: named columns, and cells that carry the words for people and the value to sort by."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import Contrast, contrasts
from sparsedepth.effects.knobs import chosen_fields, find_knobs, plain
from sparsedepth.plots.forest import LOG_UNIT, OUTCOMES
from sparsedepth.store.comparable_loss import in_terms_of, loss_of
from sparsedepth.store.render import readable
from sparsedepth.store.tuning import trained

RESULTS = (
    "val_loss",
    "val_loss_common",
    "usefulness",
    "usefulness_loss_increase",
    "causal_score",
    "permutation_score",
    "residual_variance_last",
    "weight_sparsity",
    "attention_sparsity_rel",
    "params_total",
    "params_active",
    "train_flops",
    "seconds",
)
"""Columns of the table of runs, where any run has them."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str
    key: float | str
    """What the column is sorted by; empty where the value is missing, which sorts last."""
    is_number: bool


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    is_number: bool
    meaning: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def table_of(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]]) -> Table:
    """From (name, meaning) of each column and plain values; a column of numbers and missing values is numeric."""
    cells = [tuple(cell(value) for value in row) for row in rows]
    numeric = [
        any(row[i].is_number for row in cells) and all(row[i].is_number or row[i].key == "" for row in cells)
        for i in range(len(columns))
    ]
    named = zip(columns, numeric, strict=True)
    return Table(
        columns=tuple(Column(name=name, meaning=meaning, is_number=number) for (name, meaning), number in named),
        rows=tuple(cells),
    )


def cell(value: Any) -> Cell:
    """A plain value as a cell; a Cell stays what it is."""
    if isinstance(value, Cell):
        return value
    value = plain(value)
    if isinstance(value, bool | tuple):
        value = readable(list(value) if isinstance(value, tuple) else value)
    if value is None:
        return Cell(text="–", key="", is_number=False)
    if isinstance(value, str):
        return Cell(text=readable(value), key=value, is_number=False)
    if isinstance(value, int) and 10_000 <= abs(value) < 1e10:
        return Cell(text=f"{value:,}", key=float(value), is_number=True)
    return Cell(text=readable(float(value) if abs(value) >= 1e10 else value), key=float(value), is_number=True)


def table_of_runs(runs: pd.DataFrame) -> Table:
    """One row per run: what was varied, then what came of it; columns in which nothing is known are left out."""
    varied = [name for name in chosen_fields(runs) if name != "seed"] if len(trained(runs)) else []
    first = [name for name in ("model", "tuning") if runs[name].notna().any()]
    same = ["n_layers"] if "n_layers" not in varied and runs["n_layers"].notna().any() else []
    results = [name for name in RESULTS if runs[name].notna().any() and not _repeats(runs, name)]
    names = ["run_id", *first, *same, *varied, "seed", "outcome", *results]
    columns = [(name, meaning_of(name)) for name in names]
    return table_of(columns, (tuple(row) for row in runs[names].itertuples(index=False)))


def _repeats(runs: pd.DataFrame, name: str) -> bool:
    """Whether a column says the same as another one that is shown."""
    other = {"params_active": "params_total", "val_loss_common": "val_loss"}.get(name)
    return other is not None and runs[name].equals(runs[other])


def meaning_of(name: str) -> str:
    """One line on a column of `runs`, with its unit."""
    column = next((column for column in quantities.RUNS if column.name == name), None)
    if column is not None:
        unit = f" [{column.unit}]" if column.unit not in ("", "1") else ""
        return f"{column.meaning}{unit}"
    field = RunConfig.model_fields.get(name)
    return (field.description or "") if field is not None else ""


def all_contrasts(runs: pd.DataFrame) -> list[Contrast]:
    """Every setting of every knob at every depth, on the outcomes of the forest plot; `runs` are trained ones."""
    knobs = find_knobs(runs)
    found = [
        one for name in in_terms_of(loss_of(runs), OUTCOMES) for knob in knobs for one in contrasts(runs, knob, name)
    ]
    return [one for one in found if one.effect.mean is not None]


def table_of_effects(found: Sequence[Contrast]) -> Table:
    """One row per contrast."""
    columns = [
        ("outcome", ""),
        ("setting", ""),
        ("baseline", ""),
        ("n_layers", ""),
        ("effect", "mean paired difference, setting less baseline; with ×: their ratio"),
        ("95% interval", ""),
        ("unit", ""),
        ("verdict", "lower or higher: the interval excludes 0 and the effect exceeds the noise floor"),
        ("noise floor", "the smallest difference (ratio) that seeds do not explain"),
        ("pairs", "pairs of runs that differ in nothing else"),
        ("seeds", ""),
        ("diverged", "pairs left out, since the setting's run diverged"),
    ]

    def row(one: Contrast) -> list[Any]:
        low, high = (_difference(end, one.unit).text for end in (one.effect.lo, one.effect.hi))
        interval = None if one.effect.lo is None else f"{low} to {high}"
        unit = "ratio" if one.unit == LOG_UNIT else one.unit
        head = [one.outcome, one.setting, one.baseline, one.n_layers, _difference(one.effect.mean, one.unit), interval]
        return [*head, unit, one.verdict, _floor(one), one.effect.n, one.n_seeds, one.n_diverged]

    return table_of(columns, map(row, found))


def _difference(value: float | None, unit: str) -> Cell:
    """With its sign, or as a ratio; sorted as it is compared."""
    if value is None:
        return cell(None)
    return Cell(text=f"×{math.exp(value):.3g}" if unit == LOG_UNIT else f"{value:+.3g}", key=value, is_number=True)


def _floor(one: Contrast) -> Cell:
    if one.floor is None:
        return cell(None)
    text = f"×{math.exp(one.floor):.3g}" if one.unit == LOG_UNIT else f"{one.floor:.3g}"
    return Cell(text=text, key=one.floor, is_number=True)
