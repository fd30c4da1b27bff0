"""Compare two results folders, configuration by configuration.

A configuration is all fields of a run but the seed, recording options, and fields tuned in both folders. The difference
is second minus first, mean over the seeds that finished in both, with Student's 95% interval, from three such pairs on.
With fewer it is the difference of the two means, with Welch's interval (Biometrika 34, 1947), if each side has three
seeds. Where the two sides were tuned to different values, the error of choosing them (`store.tuning_curve`) is added:

    variance = sum_k v_k,    df = variance^2 / sum_k (v_k^2 / df_k), rounded down    (Satterthwaite 1946)

of v_k the variance of the mean pair, or of each mean, and the `tuning_variance` of each side.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparsedepth import quantities
from sparsedepth.config.role import roles
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.store.cell_text import readable
from sparsedepth.store.comparable_loss import COMMON, OWN, loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.same_text import warn_of_other_texts
from sparsedepth.store.setting import Configuration, number_text, settings_of
from sparsedepth.store.small_sample import MIN_VALUES, mean_interval, t_critical
from sparsedepth.store.tuning_roles import IS_RESULT, parse_tuned_fields

_RECORDED = {name for name, role in roles(RunConfig).items() if role.kind == "record"}
BOTH, FIRST, SECOND = "both", "first", "second"
NOTES = ("tuned", "first_diverged", "second_diverged")
"""Columns that are absent where they have nothing to say."""
_Variance = tuple[float, float]
"""And its degrees of freedom."""


@dataclass(kw_only=True)
class _Side:
    """A configuration in one folder."""

    cell: Configuration
    values: dict[str, float] = field(default_factory=dict)
    """By seed, of finished runs."""
    n_diverged: int = 0
    tuning: list[_Variance]
    """From choosing its tuned values; empty where they are not tuned, or by another quantity."""


def compare(first: Store, second: Store, by: str | None = None) -> tuple[str, QueryResult]:
    """The quantity compared, and a row per configuration: found_in (both, first or second), n_layers, varying fields,
    pairs (seeds that finished in both), first and second (means over seeds), difference, lo, hi, setting (relative to
    the first folder's baseline), and NOTES: tuned (values chosen differently, 'lr 0.003 -> 0.006'), first_diverged,
    second_diverged (runs left out).

    Configurations in both come first, the largest difference on top. Raises ValueError for a quantity without a better
    direction, and if a folder has no trained run.
    """
    warn_of_other_texts(first.sql, second.sql)
    by = by or (COMMON if COMMON in (loss_in(first), loss_in(second)) else loss_in(first))
    quantities.rankable(by)
    sides = [_cells(store, by) for store in (first, second)]
    tuned_of_side = [frozenset().union(*(side.cell.tuned for side in cells)) for cells in sides]
    tuned = frozenset.intersection(*tuned_of_side)
    fixed = {name for cells in sides for side in cells for name in tuned - side.cell.tuned}
    key_fields = [name for name in CELL_FIELDS if name not in tuned - fixed | _RECORDED]

    def key_of(cell: Configuration) -> tuple[Any, ...]:
        """Without the values of fields that both folders tune, where this configuration was tuned."""
        return tuple(None if name in tuned & cell.tuned else cell.knobs[name] for name in key_fields)

    by_key = [{key_of(side.cell): side for side in cells} for cells in sides]
    cells = [[side.cell for side in cells] for cells in sides]
    settings = replace(settings_of([*cells[0], *cells[1]]), baseline=settings_of(cells[0]).baseline)
    fields = [name for name in settings.varying if name in key_fields]
    rows: list[tuple[Any, ...]] = []
    for key in dict.fromkeys([*by_key[0], *by_key[1]]):
        one, other = (side.get(key) for side in by_key)
        found_in = BOTH if one and other else FIRST if one else SECOND
        cell = next(side.cell for side in (one, other) if side)
        values = [side.values if side else {} for side in (one, other)]
        pairs = sum(seed in values[1] for seed in values[0])
        retuned = [
            f"{name} {number_text(one.cell.knobs[name])} -> {number_text(other.cell.knobs[name])}"
            for name in sorted(tuned)
            if one and other and one.cell.knobs[name] != other.cell.knobs[name]
        ]
        tuning = one.tuning + other.tuning if one and other and retuned else []
        means = [mean_interval(list(by_seed.values()))[0] for by_seed in values]
        knobs = [cell.knobs[name] for name in fields]
        notes = (", ".join(retuned) or None, *(side.n_diverged if side else None for side in (one, other)))
        compared = (pairs, *means, *difference_of(*values, tuning))
        rows.append((found_in, *knobs, *compared, settings.label(cell.knobs), *notes))
    columns = ("found_in", *fields, "pairs", "first", "second", "difference", "lo", "hi", "setting", *NOTES)
    index = columns.index("difference")
    rows.sort(key=lambda row: ((BOTH, FIRST, SECOND).index(row[0]), row[index] is None, -abs(row[index] or 0)))
    table = QueryResult(columns=columns, rows=tuple(rows))
    empty = [name for name, values in zip(columns, table.values(), strict=True) if name in NOTES and not any(values)]
    return by, table.of_columns([name for name in columns if name not in empty])


def difference_of(
    first: Mapping[Any, float], second: Mapping[Any, float], tuning: Sequence[_Variance] = ()
) -> tuple[float | None, float | None, float | None]:
    """Second minus first, from values by seed, with its interval; `tuning`: variances from choosing tuned values."""
    if not first or not second:
        return None, None, None
    common = [seed for seed in first if seed in second]
    if len(common) >= MIN_VALUES or (common and min(len(first), len(second)) < MIN_VALUES):
        samples = [[second[seed] - first[seed] for seed in common]]
        difference = statistics.fmean(samples[0])
    else:
        samples = [list(first.values()), list(second.values())]
        difference = statistics.fmean(samples[1]) - statistics.fmean(samples[0])
    if min(map(len, samples)) < MIN_VALUES:
        return difference, None, None
    seeds = [(statistics.variance(values) / len(values), len(values) - 1) for values in samples]
    half = max(_half_width(seeds), _half_width([*seeds, *tuning]))
    return difference, difference - half, difference + half


def _half_width(terms: Sequence[_Variance]) -> float:
    total = sum(variance for variance, _ in terms)
    if not total:
        return 0.0
    degrees = total**2 / sum(variance**2 / df for variance, df in terms)
    return t_critical(int(degrees + 1e-9)) * math.sqrt(total)


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


def _cells(store: Store, by: str) -> Sequence[_Side]:
    """Each trained configuration with its values by seed (by folder, if the seed is unknown)."""
    chosen_by = f"tuned_by = '{by}' OR tuned_by IN {(OWN, COMMON)} AND '{by}' IN {(OWN, COMMON)}"
    tuning = f"CASE WHEN {chosen_by} THEN tuning_variance END"
    names = ("cell_id", "tuned_fields", "coalesce(CAST(seed AS VARCHAR), folder)", "outcome", by, tuning, "tuning_df")
    by_cell: dict[str, _Side] = {}
    values: dict[tuple[str, str], list[float]] = {}
    for cell_id, tuned, seed, outcome, value, variance, df, *knobs in store.sql(
        f"SELECT {', '.join([*names, *CELL_FIELDS])} FROM runs WHERE {IS_RESULT} ORDER BY n_layers, cell_id, seed"
    ).rows:
        knobs_by_name = dict(zip(CELL_FIELDS, knobs, strict=True))
        cell = Configuration(cell_id=cell_id, tuned=frozenset(parse_tuned_fields(tuned)), knobs=knobs_by_name)
        side = by_cell.setdefault(cell_id, _Side(cell=cell, tuning=[(variance, df)] if variance else []))
        side.n_diverged += outcome == "diverged"
        if outcome == "ok" and value is not None:
            values.setdefault((cell_id, seed), []).append(value)
    if not by_cell:
        folders = " ".join(map(str, store.roots))
        raise ValueError(f"{folders} holds no run with a training configuration: there is nothing to compare")
    for (cell_id, seed), runs in values.items():
        by_cell[cell_id].values[seed] = statistics.fmean(runs)
    return [*by_cell.values()]
