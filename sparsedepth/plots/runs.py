"""Rows that figures read from a store: trained runs and their settings, a single run, values by layer or by pair."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import pandas as pd

from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.effects.cells import BASELINE, Cells, cells_of
from sparsedepth.once import once
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.plots.style import MARKERS, PROPOSAL, SETTINGS, SEVERAL
from sparsedepth.quantities.quantity import WATCHED
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.search import search_of
from sparsedepth.store.setting import only_tuning, read_settings
from sparsedepth.store.tuning_roles import IS_TRAINED, result_rows, without_measured_models
from sparsedepth.words.differences import only_tuning_text, setting_label


class Selection(NamedTuple):
    """The depths, settings and panels that figures show; all where none is named."""

    depths: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()


MOST_MODELS = 5
"""Measured models side by side."""
ALL = Selection()
selected: WeakKeyDictionary[Store, Selection] = WeakKeyDictionary()


def select(store: Store, only: Selection) -> None:
    """Let figures of this store show these alone. Raises ValueError for a depth or a setting that is not there."""
    if not any(only):
        return
    known = all_runs(store).dropna(subset="n_layers")[["n_layers", "setting"]]
    if not search_of(store.roots):
        known = pd.concat([known, cells_of_store(store).rows[["n_layers", "setting"]]])
    for name, wanted in zip(("n_layers", "setting"), only, strict=False):
        here = [*dict.fromkeys(known[name])]
        if missing := [value for value in wanted if value not in here]:
            several = "; ".join(map(str, settings_in_order(here) if name == "setting" else sorted(here)))
            raise ValueError(f"{name} {missing[0]!r} is not among those that can be drawn: {several}")
    selected[store] = only


def of_selection(store: Store, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with n_layers and setting, that figures of this store show."""
    for name, wanted in zip(("n_layers", "setting"), selected.get(store, ()), strict=False):
        rows = rows[rows[name].isin(wanted)] if wanted else rows
    return rows.reset_index(drop=True)


@once
def all_runs(store: Store) -> pd.DataFrame:
    """The rows of `runs`, with a column `setting`: how a configuration differs from the baseline (`store.setting`)."""
    runs = store.frame("select * from runs order by run_id")
    settings = runs["cell_id"].map(setting_names(store)).rename("setting")
    return pd.concat([runs, settings], axis=1).copy()  # in one piece


settings_of = once(read_settings)


def read_runs(store: Store) -> pd.DataFrame:
    """The trained rows of `runs`. Raises NothingToDraw if none finished, or only tuning."""
    trained = finished_of(all_runs(store))
    if result_rows(trained).empty and (text := only_tuning_text(only_tuning(store))):
        raise NothingToDraw(f"{text}; --figure learning_rate shows them, this figure shows results")
    return trained


def finished_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Those with a training configuration. Raises NothingToDraw unless one of them finished."""
    if runs.empty:
        raise NothingToDraw("the store holds no runs")
    trained = without_measured_models(runs)
    if not len(trained):
        raise NothingToDraw(
            "no finished run has a training configuration, so there is nothing to compare; draw --figure layer_profile"
        )
    if not (trained["outcome"] == "ok").any():
        raise NothingToDraw(f"none of the {len(trained)} runs finished, so there is nothing to draw")
    return trained


def measured_models(store: Store) -> pd.DataFrame | None:
    """The first MOST_MODELS measured models of a store that has nothing else."""
    runs = all_runs(store)
    if runs.empty or runs["model"].isna().any():
        return None
    runs = of_selection(store, runs)
    names = short_names(runs["model"])
    return runs.assign(name=names, setting=BASELINE)[names.isin(names.unique()[:MOST_MODELS])]


def short_names(models: pd.Series) -> pd.Series:
    """The last part of each path; all of it where two models share that."""
    last = models.str.rstrip("/").str.rpartition("/")[2]
    return last.where(models.groupby(last).transform("nunique") < 2, models)


@once
def trained_runs(store: Store) -> pd.DataFrame:
    """The result rows of `runs` (`store.tuning_roles`). Raises NothingToDraw if none finished."""
    return result_rows(read_runs(store)).astype({"n_layers": int}).reset_index(drop=True)


@once
def cells_of_store(store: Store) -> Cells:
    """The cells of the loss: a report has their effects in tables, figures and sentences."""
    return cells_of(runs := all_runs(store), loss_of(runs))


@once
def compared_runs(store: Store) -> pd.DataFrame:
    """The trained ones that effects compare: of several budgets those at one of each depth, without it in the name."""
    runs = trained_runs(store)
    if search_of(store.roots) or not (cells := cells_of_store(store)).is_one_budget:
        return of_selection(store, runs)
    name = cells.rows.set_index("run_id")["setting"]
    return of_selection(store, runs[runs["run_id"].isin(name.index)].assign(setting=runs["run_id"].map(name)))


def without_diverged_cells(runs: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The finished runs of configurations without a diverged seed, since a mean over the seeds that survived is too
    good; and the number of the other configurations."""
    diverged = set(runs.loc[runs["outcome"] == "diverged", "cell_id"])
    return runs[~runs["cell_id"].isin(diverged) & (runs["outcome"] == "ok")].copy(), len(diverged)


def n_changed(setting: str) -> int:
    return 0 if setting.startswith(BASELINE) else 1 + setting.count(", ")


def settings_in_order(names: Iterable[str]) -> list[str]:
    """In the order of a legend: the baseline first, settings of several fields last; numbers by their size."""

    def place(setting: str) -> tuple[int, list[str | float]]:
        parts = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", setting)
        return n_changed(setting), [float(part) if i % 2 else part for i, part in enumerate(parts)]

    return sorted(set(names), key=place)


def shown_settings(
    names: Iterable[str], most: int = 1 + len(SETTINGS), merit: Mapping[str, float] | None = None
) -> list[str]:
    """The settings with a line, in order: of too many the baseline, then those of the least `merit`, without one of
    the fewest fields."""
    ordered = settings_in_order(names)
    if merit is not None:
        ordered.sort(key=lambda name: (n_changed(name) > 0, merit.get(name, float("inf"))))
    return settings_in_order(ordered[:most])


def changed_fields(runs: pd.DataFrame, is_search: bool) -> pd.Series:
    """What each run changed: its setting, or where there are too many for a shape each, its field alone or SEVERAL; in
    a search always PROPOSAL."""
    if is_search:
        return pd.Series(PROPOSAL, index=runs.index, dtype=object)
    settings = runs["setting"].astype(object)
    if settings.nunique() <= len(MARKERS) + (settings == BASELINE).any():
        return settings
    return settings.map(lambda name: (BASELINE, name.partition("=")[0], SEVERAL)[min(n_changed(name), 2)])


def setting_names(store: Store, *without: str) -> dict[str, str]:
    """cell_id -> how the trained configuration differs from the baseline (`store.setting`), without some fields. Empty
    if none was trained."""
    settings = settings_of(store)
    if settings is None:
        return {}
    fields = [name for name in CELL_FIELDS if name not in without]
    rows = store.sql(f"SELECT DISTINCT cell_id, {', '.join(fields)} FROM runs WHERE {IS_TRAINED}").rows
    return {cell_id: setting_label(settings, dict(zip(fields, values, strict=True))) for cell_id, *values in rows}


def values_of_metrics(store: Store, view: str, metrics: Iterable[str]) -> pd.DataFrame:
    """The values of these metrics in `layers` or `pairs`, at the last step at which each run has each."""
    return at_last_step(store, view, "metric in ({})".format(", ".join(f"'{metric}'" for metric in metrics)))


AFTER_START = f"(step > 0 or run_id not in (select run_id from runs where {IS_TRAINED} and origin is null))"
"""Of rows of `layers` and `pairs`: not at the first step of one of our runs."""


def at_last_step(store: Store, view: str, condition: str) -> pd.DataFrame:
    """The rows of `layers` or `pairs` at the last step at which each run has each metric; of one of ours after its
    first step."""
    return store.frame(
        f"select * exclude (step) from {view} where ({condition}) and {AFTER_START} qualify step = "
        "max(step) over (partition by run_id, metric) order by all"
    )


def choose_run(runs: pd.DataFrame, depths: Mapping[str, int], run: str | None) -> str:
    """`run`, or by default the best one; `depths` is run_id -> number of layers, of the runs with values by layer."""
    if run is None:
        # Not '== ok': a measured model that was not trained has no outcome.
        candidates = runs[(runs["outcome"] != "diverged") & runs["run_id"].isin([*depths])]
        if "origin" in runs:  # of a watched training its last point
            last = candidates.groupby("cluster")["steps"].transform("max")
            candidates = candidates[(candidates["origin"] != WATCHED) | (candidates["steps"] == last)]
        if candidates.empty:
            raise NothingToDraw(
                f"none of the {len(runs)} runs has values by layer without having diverged: no layer profile to draw"
            )
        loss = pd.to_numeric(candidates[loss_of(runs)], errors="coerce")
        ranked = pd.DataFrame({"depth": -candidates["run_id"].map(depths), "loss": loss, "run": candidates["run_id"]})
        return str(ranked.sort_values([*ranked])["run"].iloc[0])  # NaN last
    if run not in (ids := sorted(runs["run_id"])):
        near = difflib.get_close_matches(run, ids, n=3, cutoff=0.0)
        raise ValueError(f"run {run!r} is not in this store; the nearest of its {len(ids)} run ids: {', '.join(near)}")
    if run not in depths:
        raise NothingToDraw(f"run {run!r} has no values by layer: it was not measured, or ended before that")
    return run
