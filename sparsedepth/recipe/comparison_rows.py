"""The recommended configuration, the baseline, and the best measured at the same depth: loss, lr, cost.

All three on the baseline's data. The best measured is the configuration with the best mean over seeds and no diverged
run, at any cost. Selecting the best of several makes its mean optimistic, so it is not a recommendation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.cost import cost
from sparsedepth.config.images import is_text
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.effects.knobs import plain, tuned_fields
from sparsedepth.recipe.card import MeasuredConfiguration, MeasuredPart, Recipe
from sparsedepth.recipe.choose import DATA
from sparsedepth.store.imported_run import round_to_steps
from sparsedepth.store.setting import Configuration, settings_of
from sparsedepth.store.small_sample import finished_values, mean_interval
from sparsedepth.store.tuning_roles import result_rows


def comparison_rows(runs: pd.DataFrame, recipe: Recipe) -> tuple[MeasuredConfiguration, ...]:
    """Recommended, baseline and best measured, in this order, with one row for each distinct configuration; none
    without a baseline. A configuration that was not run at the recipe's depth has only its cost."""
    if recipe.config is None or recipe.baseline is None:
        return ()
    results = result_rows(runs)
    at_depth = _with_data_of(recipe.baseline, results[results["n_layers"] == recipe.depth])
    by_cell = {cell: rows for cell, rows in at_depth.groupby("cell_id", sort=True)}
    cells = [_cell_of(str(name), rows) for name, rows in by_cell.items()]
    tuned = frozenset(tuned_fields(results))
    unknown = [field for field in CELL_FIELDS if len(at_depth) and at_depth[field].isna().all()]
    recommended, baseline = (
        Configuration(
            cell_id="",
            tuned=tuned,
            knobs={**_as_measured(_knobs_of(config.model_dump(mode="json")), cells), **dict.fromkeys(unknown)},
            flops=float(cost(config).train_flops(config.train_tokens)),
        )
        for config in (recipe.config, recipe.baseline)
    )
    settings = replace(settings_of([*cells, recommended, baseline]), baseline=baseline)
    by_label = {settings.label(cell.knobs): cell for cell in cells}
    values = {cell.cell_id: finished_values(by_cell[cell.cell_id], recipe.objective) for cell in cells}
    diverged = {*at_depth.loc[at_depth["outcome"] == "diverged", "cell_id"]}
    finished = [cell for cell in cells if values[cell.cell_id] and cell.cell_id not in diverged]
    sign = quantities.sign(recipe.objective)
    best = max(finished, key=lambda cell: sign * sum(values[cell.cell_id]) / len(values[cell.cell_id]), default=None)
    reference = by_label.get("baseline")
    parts: dict[str, tuple[list[MeasuredPart], Configuration]] = {}
    for part, cell in (("recommended", recommended), ("baseline", baseline), ("best measured", best)):
        if cell is not None and not (part == "recommended" and recipe.abstained):
            label = settings.label(cell.knobs)
            parts.setdefault(label, ([], by_label.get(label, cell)))[0].append(part)
    clipped = quantities.rankable(recipe.objective).clipped
    rows = []
    for label, (names, cell) in parts.items():
        mean, lo, hi = mean_interval(values.get(cell.cell_id, []))
        ratio = cell.flops / reference.flops if cell.flops and reference and reference.flops else None
        trained = by_cell.get(cell.cell_id, at_depth[:0])
        rows.append(
            MeasuredConfiguration(
                parts=tuple(names),
                setting=label,
                lr=cell.knobs["lr"],
                rivals=_rivals(trained),
                n_seeds=len(values.get(cell.cell_id, [])),
                mean=mean,
                accuracy=_accuracy(trained),
                lo=clipped(lo),
                hi=clipped(hi),
                flops=ratio,
                train_flops=cell.flops,
                params=_params(trained, recipe.config if "recommended" in names else recipe.baseline),
                seconds=_training_seconds(trained),
                devices=tuple(sorted(set(trained["device"].dropna()))) if "device" in trained.columns else (),
            )
        )
    return tuple(rows)


def _with_data_of(config: RunConfig, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows on a configuration's data: losses on other data do not compare."""
    data = config.model_dump(mode="json", include=set(DATA))
    varying = [name for name in DATA if rows[name].nunique(dropna=False) > 1]
    if not varying:
        return rows
    same = [[plain(value) == plain(data[name]) for value in rows[name]] for name in varying]
    return rows[[all(row) for row in zip(*same, strict=True)]]


def _cell_of(name: str, rows: pd.DataFrame) -> Configuration:
    return Configuration(
        cell_id=name,
        tuned=frozenset(tuned_fields(rows)),
        knobs=_knobs_of(rows.iloc[0]),
        flops=mean_interval(finished_values(rows, "train_flops"))[0],
    )


def _knobs_of(values: Mapping[str, Any] | pd.Series) -> dict[str, object]:
    return {field: plain(values[field]) for field in CELL_FIELDS}


def _as_measured(knobs: dict[str, object], cells: Sequence[Configuration]) -> dict[str, object]:
    """The knobs with the token counts of the cell that has them after rounding: a configuration from imported runs is
    rounded to whole steps (`round_to_steps`)."""
    for cell in cells:
        counts = {name: cell.knobs[name] for name in ("seq_len", "batch_tokens", "train_tokens")}
        if None not in counts.values() and all(knobs[name] == size for name, size in round_to_steps(counts).items()):
            return {**knobs, **counts}
    return knobs


def _rivals(rows: pd.DataFrame) -> tuple[float, ...]:
    """Values of lr that tuning could not distinguish from the one it chose (`store.tuning_curve`)."""
    if "tuned_rivals" not in rows.columns or set(rows["tuned_fields"].dropna()) != {"lr"}:
        return ()
    return tuple(float(value) for text in rows["tuned_rivals"].dropna().unique()[:1] for value in text.split(","))


def _accuracy(rows: pd.DataFrame) -> float | None:
    """Mean val_accuracy over runs, for tasks and images; None for text."""
    if not len(rows) or any(is_text(str(corpus)) for corpus in rows["corpus"]):
        return None
    return mean_interval(finished_values(rows, "val_accuracy"))[0]


def _training_seconds(rows: pd.DataFrame) -> float | None:
    """Mean over seeds; None where a run did not finish or did not record it."""
    is_complete = len(rows) and "training_seconds" in rows.columns and (rows["outcome"] == "ok").all()
    if not is_complete or rows["training_seconds"].isna().any():
        return None
    return mean_interval(finished_values(rows, "training_seconds"))[0]


def _params(rows: pd.DataFrame, config: RunConfig) -> int:
    """The runs' parameters, or the configuration's if it was not run."""
    values = finished_values(rows, "params_total")
    return int(values[0]) if values else cost(config).params_total
