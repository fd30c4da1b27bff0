"""Compare two results folders, configuration by configuration.

A configuration is all fields of a run but the seed, recording options, and fields tuned in both folders. The difference
is second minus first, mean over the seeds that finished in both, with Student's 95% interval over these pairs from
three on. Without a common seed it is the difference of the two means, with Welch's interval (Biometrika 34, 1947) from
three seeds on each side.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparsedepth import quantities
from sparsedepth.config.role import roles
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.store.cell_text import readable
from sparsedepth.store.comparable_loss import COMMON, loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.same_text import warn_of_other_texts
from sparsedepth.store.setting import Configuration, settings_of
from sparsedepth.store.small_sample import MIN_VALUES, mean_interval, t_critical
from sparsedepth.store.tuning_roles import IS_RESULT, parse_tuned_fields

_RECORDED = {name for name, role in roles(RunConfig).items() if role.kind == "record"}
BOTH, FIRST, SECOND = "both", "first", "second"


def compare(first: Store, second: Store, by: str | None = None) -> tuple[str, QueryResult]:
    """The quantity compared, and a row per configuration: found_in (both, first or second), n_layers, varying fields,
    pairs (seeds that finished in both), first and second (means over seeds), difference, lo, hi, setting (relative to
    the first folder's baseline).

    Configurations in both come first, the largest difference on top. Raises ValueError for a quantity without a better
    direction, and if a folder has no trained run.
    """
    warn_of_other_texts(first.sql, second.sql)
    by = by or (COMMON if COMMON in (loss_in(first), loss_in(second)) else loss_in(first))
    quantities.rankable(by)
    sides = [_cells(store, by) for store in (first, second)]
    tuned = frozenset.intersection(*(cell.tuned for side in sides for cell, _ in side))
    key_fields = [name for name in CELL_FIELDS if name not in tuned | _RECORDED]
    by_key = [
        {tuple(cell.knobs[name] for name in key_fields): (cell, values) for cell, values in side} for side in sides
    ]
    cells = [[cell for cell, _ in side] for side in sides]
    settings = replace(settings_of([*cells[0], *cells[1]]), baseline=settings_of(cells[0]).baseline)
    fields = [name for name in settings.varying if name in key_fields]
    rows: list[tuple[Any, ...]] = []
    for key in dict.fromkeys([*by_key[0], *by_key[1]]):
        entries = [side.get(key) for side in by_key]
        found_in = BOTH if all(entries) else FIRST if entries[0] else SECOND
        cell = next(entry[0] for entry in entries if entry)
        values = [entry[1] if entry else {} for entry in entries]
        common = [seed for seed in values[0] if seed in values[1]]
        paired = mean_interval([values[1][seed] - values[0][seed] for seed in common])
        difference = paired if common else _unpaired(*(list(side.values()) for side in values))
        means = [mean_interval(list(side.values()))[0] for side in values]
        knobs = [cell.knobs[name] for name in fields]
        rows.append((found_in, *knobs, len(common), *means, *difference, settings.label(cell.knobs)))
    columns = ("found_in", *fields, "pairs", "first", "second", "difference", "lo", "hi", "setting")
    index = columns.index("difference")
    rows.sort(key=lambda row: ((BOTH, FIRST, SECOND).index(row[0]), row[index] is None, -abs(row[index] or 0)))
    return by, QueryResult(columns=columns, rows=tuple(rows))


def _unpaired(first: Sequence[float], second: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """The difference of two means, with Welch's interval (degrees of freedom rounded down)."""
    if not first or not second:
        return None, None, None
    difference = statistics.fmean(second) - statistics.fmean(first)
    if min(len(first), len(second)) < MIN_VALUES:
        return difference, None, None
    errors = [statistics.variance(values) / len(values) for values in (first, second)]
    if not sum(errors):
        return difference, difference, difference
    degrees = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, (first, second), strict=True))
    half = t_critical(int(degrees)) * math.sqrt(sum(errors))
    return difference, difference - half, difference + half


def counts(table: QueryResult) -> tuple[int, int, int, int]:
    """Configurations in both, only in the first, only in the second; and those whose interval excludes 0."""
    found_in = [row[0] for row in table.rows]
    lo, hi = (table.columns.index(name) for name in ("lo", "hi"))
    differ = sum(row[lo] is not None and (row[lo] > 0 or row[hi] < 0) for row in table.rows)
    return found_in.count(BOTH), found_in.count(FIRST), found_in.count(SECOND), differ


def disjoint_fields(table: QueryResult) -> list[str]:
    """Why no configuration is in both: fields without a common value, '  seq_len: 16 in the first, 20 in the second'.
    Empty if any configuration is in both."""
    found_in = [row[0] for row in table.rows]
    if BOTH in found_in:
        return []
    texts = []
    for index in range(1, table.columns.index("pairs")):
        values = [dict.fromkeys(row[index] for row in table.rows if row[0] == side) for side in (FIRST, SECOND)]
        if values[0].keys().isdisjoint(values[1]):
            first, second = (", ".join(map(readable, side)) for side in values)
            texts.append(f"  {table.columns[index]}: {first} in the first, {second} in the second")
    return texts


def _cells(store: Store, by: str) -> Sequence[tuple[Configuration, dict[str, float]]]:
    """Each trained configuration with its values by seed (by folder, if the seed is unknown)."""
    names = ("cell_id", "tuned_fields", "coalesce(CAST(seed AS VARCHAR), folder)", "outcome", by, *CELL_FIELDS)
    by_cell: dict[str, tuple[Configuration, dict[str, list[float]]]] = {}
    for cell_id, tuned, seed, outcome, value, *knobs in store.sql(
        f"SELECT {', '.join(names)} FROM runs WHERE {IS_RESULT} ORDER BY n_layers, cell_id, seed"
    ).rows:
        knobs_by_name = dict(zip(CELL_FIELDS, knobs, strict=True))
        cell = Configuration(cell_id=cell_id, tuned=frozenset(parse_tuned_fields(tuned)), knobs=knobs_by_name)
        _, values = by_cell.setdefault(cell_id, (cell, {}))
        if outcome == "ok" and value is not None:
            values.setdefault(seed, []).append(value)
    if not by_cell:
        folders = " ".join(map(str, store.roots))
        raise ValueError(f"{folders} holds no run with a training configuration: there is nothing to compare")
    return [
        (cell, {seed: statistics.fmean(runs) for seed, runs in values.items()}) for cell, values in by_cell.values()
    ]
