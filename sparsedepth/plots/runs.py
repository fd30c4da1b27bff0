"""Rows that figures read from a store: trained runs, a single run, values by layer or by pair of layers."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.effects.knobs import changed, find_knobs
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.plots.style import PROPOSAL, SEVERAL
from sparsedepth.quantities import BY_LAYER, BY_PAIR
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.setting import read_settings
from sparsedepth.store.tuning_roles import result_rows, without_measured_models
from sparsedepth.store.unfinished import only_tuning_text


def check_finished(runs: pd.DataFrame) -> None:
    """Raises NothingToDraw unless a finished run has a training configuration."""
    if not len(runs):
        raise NothingToDraw("the store holds no runs")
    trained = without_measured_models(runs)
    if not len(trained):
        raise NothingToDraw(
            "no finished run has a training configuration, so there is nothing to compare; draw --figure layer_profile"
        )
    if not (trained["outcome"] == "ok").any():
        raise NothingToDraw(f"none of the {len(trained)} runs finished, so there is nothing to draw")


def read_runs(store: Store, *, of_tuning: bool = False) -> pd.DataFrame:
    """The rows of `runs`. Raises NothingToDraw if none finished, or, unless a figure is `of_tuning`, only tuning."""
    runs = store.frame("select * from runs")
    check_finished(runs)
    if not of_tuning and (text := only_tuning_text(store)):
        raise NothingToDraw(f"{text}; --figure learning_rate shows them, this figure shows results")
    return runs


def sources(runs: pd.DataFrame) -> pd.Series:
    """The results folder of each run, without the path that all share; '' for a single folder."""
    if "folder" not in runs:
        return pd.Series("", index=runs.index)
    folders = runs["folder"].map(lambda folder: str(Path(folder).parent.parent) if folder else "")
    distinct = sorted(set(folders))
    if len(distinct) < 2:
        return pd.Series("", index=runs.index)
    n_shared = len(os.path.commonpath(list(map(os.path.abspath, distinct)))) + 1
    return folders.map({folder: os.path.abspath(folder)[n_shared:] or Path(folder).name for folder in distinct})


def results_folders(store: Store) -> list[str]:
    """The results folders of a store's runs."""
    return sorted(
        {str(Path(folder).parent.parent) for (folder,) in store.sql("select folder from runs").rows if folder}
    )


def trained_runs(store: Store) -> pd.DataFrame:
    """The result rows of `runs` (`store.tuning_roles`). Raises NothingToDraw if none finished."""
    return result_rows(read_runs(store)).astype({"n_layers": int}).reset_index(drop=True)


def without_diverged_configurations(runs: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The runs of configurations without a diverged seed, since a mean over the seeds that survived is too good; and
    the number of the other configurations."""
    diverged = set(runs.loc[runs["outcome"] == "diverged", "cell_id"])
    return runs[~runs["cell_id"].isin(diverged)].copy(), len(diverged)


def changed_knobs(runs: pd.DataFrame, all_runs: pd.DataFrame, is_search: bool) -> pd.Series:
    """What each run changed from the baseline of all runs: 'baseline', a knob's only setting, the knob's name if the
    runs have several of its settings, the settings of several knobs if they are the only such combination, or SEVERAL;
    in a search always PROPOSAL."""
    if is_search:
        return pd.Series(PROPOSAL, index=runs.index, dtype=object)
    knobs = find_knobs(all_runs)
    mixed = {knob.name for knob in knobs if not knob.is_pure}
    only = {knob.name: [*knob.settings][1] for knob in knobs if len(knob.settings) == 2}  # the first is the baseline

    def is_several(settings: Mapping[str, str]) -> bool:
        return len(settings) > 1 or not mixed.isdisjoint(settings)

    changes = changed(runs, knobs) if len(runs) else pd.Series(dtype=object)
    combinations = {", ".join(settings.values()) for settings in changes if is_several(settings)}
    several = min(combinations) if len(combinations) == 1 else SEVERAL

    def kind(settings: Mapping[str, str]) -> str:
        return several if is_several(settings) else next((only.get(name, name) for name in settings), "baseline")

    return changes.map(kind)


def settings_in_order(names: Iterable[str]) -> list[str]:
    """In the order of a legend: the baseline first, settings of several fields last."""
    return sorted(set(names), key=lambda setting: (not setting.startswith("baseline"), setting.count(","), setting))


def setting_names(store: Store, *without: str) -> dict[str, str]:
    """cell_id -> how the trained configuration differs from the baseline (`store.setting`), without some fields. Empty
    if none was trained."""
    settings = read_settings(store)
    if settings is None:
        return {}
    fields = [name for name in CELL_FIELDS if name not in without]
    rows = store.sql(f"SELECT DISTINCT cell_id, {', '.join(fields)} FROM runs WHERE train_tokens IS NOT NULL").rows
    return {cell_id: settings.label(dict(zip(fields, values, strict=True))) for cell_id, *values in rows}


def read_metrics(store: Store, view: str, metrics: Iterable[str]) -> pd.DataFrame:
    """The rows of `layers` or `pairs` that hold these metrics."""
    listed = ", ".join(f"'{metric}'" for metric in metrics)
    return store.frame(f"select * from {view} where metric in ({listed})")


def to_measure(metrics: Iterable[str]) -> str:
    """What gives these metrics by layer or pair: 'add to measures: causal or permutation'."""
    measures = {(BY_LAYER.get(name) or BY_PAIR[name]).measure: None for name in metrics}
    return f"add to measures: {' or '.join(filter(None, measures))}"


def at_last_step(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last step at which each run measured each metric."""
    columns = [name for name in ("run_id", "metric") if name in rows.columns]
    return rows[rows["step"] == rows.groupby(columns)["step"].transform("max")]


def mean_and_range(rows: pd.DataFrame, by: list[str], sort: bool = False) -> pd.DataFrame:
    """mean, low, high and n_runs of `value` in each group, in order of appearance unless sorted."""
    values = rows.groupby(by, sort=sort)["value"]
    return values.agg(mean="mean", low="min", high="max", n_runs="count").reset_index()


def rows_of_run(store: Store, view: str, run_id: str) -> pd.DataFrame:
    """One run's rows of a view."""
    quoted = run_id.replace("'", "''")
    return store.frame(f"select * from {view} where run_id = '{quoted}'")


def choose_run(runs: pd.DataFrame, depths: Mapping[str, int], run: str | None) -> str:
    """`run`, or by default the best one; `depths` is run_id -> number of layers, of the runs with values by layer."""
    ids = sorted(runs["run_id"])
    if run is None:
        # Not '== ok': a measured model that was not trained has no outcome.
        candidates = runs[(runs["outcome"] != "diverged") & runs["run_id"].isin(list(depths))]
        if candidates.empty:
            raise NothingToDraw(
                f"none of the {len(runs)} runs has values by layer without having diverged: no layer profile to draw"
            )
        ranked = candidates.assign(depth=candidates["run_id"].map(depths))
        loss = loss_of(runs)
        ranked[loss] = pd.to_numeric(ranked[loss], errors="coerce")
        order = ranked.sort_values(["depth", loss, "run_id"], ascending=[False, True, True])  # NaN last
        return str(order["run_id"].iloc[0])
    if run not in ids:
        near = difflib.get_close_matches(run, ids, n=3, cutoff=0.0)
        raise ValueError(f"run {run!r} is not in this store; the nearest of its {len(ids)} run ids: {', '.join(near)}")
    if run not in depths:
        raise NothingToDraw(f"run {run!r} has no values by layer: it was not measured, or ended before that")
    return run
