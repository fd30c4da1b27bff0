"""Causal and permutation effects by pair of layers, of the baseline and of each setting, at the deepest depth.

A cell is the mean over the runs of a setting. Each row has one colour scale, so that its panels are comparable. Grey
cells are missing pairs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.layer_profile import HEAT_MAPS, as_matrix, colour_bar, draw_matrix, norm_of, pairs_that_exist
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import (
    n_changed,
    settings_in_order,
    shown_settings,
    to_measure,
    trained_runs,
    values_of_metrics,
)
from sparsedepth.plots.style import caption, escaped, is_paper, panels, shortened
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import sound_layer_metrics

METRICS = ("causal_effect", "permutation_effect")
MOST = 4
"""Settings side by side; more would be too small to read."""
FEWEST = 0.25
"""Share of the pairs that exist: a metric with fewer is not drawn."""


def matrices(store: Store) -> Drawing:
    """Raises NothingToDraw if no finished run has causal or permutation effects by pair."""
    runs = trained_runs(store)
    values, notes = mean_matrices(runs, values_of_metrics(store, "pairs", METRICS))
    if values.empty:
        raise NothingToDraw(
            f"no finished run of the deepest depth has {' or '.join(METRICS)} by pair; {to_measure(METRICS)}"
        )
    depth = int(runs.loc[runs["outcome"] == "ok", "n_layers"].max())
    return Drawing(data=values, page=partial(page_of_matrices, values, depth, notes))


def mean_matrices(runs: pd.DataFrame, pairs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The numbers, from the result rows of `runs` and those of `pairs`: metric, setting, layer, other_layer, value
    (mean over runs), n_runs; and what is left out."""
    finished = runs[runs["outcome"] == "ok"]
    depth = int(finished["n_layers"].max())
    chosen = finished.loc[finished["n_layers"] == depth, ["run_id", "setting"]]
    rows = pairs[pairs["value"].notna()].merge(chosen, on="run_id")
    by = ["metric", "setting", "layer", "other_layer"]
    values = rows.groupby(by)["value"].agg(value="mean", n_runs="count").reset_index()
    sparse = [name for name, part in values.groupby("metric") if _share_measured(str(name), part, depth) < FEWEST]
    dense = ~values["metric"].isin(sparse)
    values = values[dense] if dense.any() else values
    settings = set(values["setting"])
    shown = shown_settings(settings, {name: n_changed(name) for name in settings}, MOST)
    notes = sound_layer_metrics(values["metric"], finished[finished["run_id"].isin(chosen["run_id"])])[1]
    if len(settings) > len(shown):
        notes += f" Not shown: {counted(len(settings) - len(shown), 'further setting')}."
    if left_out := [name for name in sparse if name not in set(values["metric"])]:
        notes += f" Too few pairs measured to draw: {', '.join(map(str, left_out))}."
    return values[values["setting"].isin(shown)].reset_index(drop=True), notes


def _share_measured(metric: str, values: pd.DataFrame, n_layers: int) -> float:
    """The share of the existing pairs that any run measured."""
    pairs = values[["layer", "other_layer"]].drop_duplicates()
    return len(pairs) / max(1, int(pairs_that_exist(metric, n_layers).sum()))


def page_of_matrices(values: pd.DataFrame, depth: int, notes: str = "") -> Figure:
    """One row per metric, one matrix of layer pairs per setting; in a paper one below another."""
    metrics = [metric for metric in METRICS if (values["metric"] == metric).any()]
    settings = settings_in_order(values["setting"])
    page, axes = panels(len(metrics) * len(settings), len(settings), 2.3, 2.5, least=4.6)
    for i, metric in enumerate(metrics):
        _draw_row(page, axes[i * len(settings) : (i + 1) * len(settings)], metric, values, settings, depth)
    n_runs = int(values["n_runs"].max())
    caption(page, f"{depth} layers; mean over up to {counted(n_runs, 'run')} each. Grey: missing pairs." + notes)
    return page


def _draw_row(
    page: Figure, axes: Sequence[Any], metric: str, values: pd.DataFrame, settings: Sequence[str], depth: int
) -> None:
    kind, exists = HEAT_MAPS[metric], pairs_that_exist(metric, depth)
    of_metric = values[values["metric"] == metric]
    drawn = [np.where(exists, as_matrix(of_metric[of_metric["setting"] == name], depth), np.nan) for name in settings]
    norm = norm_of(np.concatenate([matrix[np.isfinite(matrix)] for matrix in drawn]), kind.scale)
    images = [draw_matrix(axis, metric, matrix, exists, norm) for axis, matrix in zip(axes, drawn, strict=True)]
    for axis, setting in zip(axes, settings, strict=True):
        axis.set_title(escaped(shortened(setting)), fontsize=8)
        if axis is not axes[0] and not is_paper():
            axis.set_ylabel("")
    colour_bar(page, images[-1], axes).set_label(kind.title, size=8)
