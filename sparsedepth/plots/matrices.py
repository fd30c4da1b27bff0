"""Values by pair of layers, of the baseline and of each setting at the deepest depth, or of each measured model: causal
and permutation effects, angles, and where they were measured the Jacobian's map and removal; of the causal trace by
layer and position; and how such a matrix is drawn.

A cell is the mean over the runs of a setting. Each row has one colour scale, so that its panels are comparable. Grey
cells are missing pairs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from sparsedepth.plots.page import Drawing, NothingToDraw, caption, colour_bar, panels, paper_width
from sparsedepth.plots.runs import (
    at_last_step,
    compared_runs,
    measured_models,
    settings_in_order,
    shown_settings,
    values_of_metrics,
)
from sparsedepth.plots.style import LINEAR_BELOW, MISSING, layer_ticks, linear_below
from sparsedepth.quantities import BY_PAIR, quantity_of_map
from sparsedepth.quantities.quantity import Scale
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import SMALL_LOSS, sound_layer_metrics
from sparsedepth.words.captions import escaped, folded, matrices_caption, not_shown, title_of_map, to_measure
from sparsedepth.words.degeneracy import layer_metrics_caption

TRACED = "trace_map"
"""The metric by position, not by layer, and layer."""
METRICS = ("causal_effect", "permutation_effect", "angular_distance", "jacobian_map", "removal_drop", TRACED)
OF_STATES = ("angular_distance", "angular_distance_last_token", "jacobian_map")
MOST = 4
"""Settings side by side; more would be too small to read."""
TITLE = 28
"""Characters of a line of a panel's title."""
AXES = {
    "causal_effect": ("skipped layer", "later layer"),
    "permutation_effect": ("layer", "swapped with layer"),
    "removal_drop": ("first removed", "last removed"),
    "removal_accuracy_lost": ("first removed", "last removed"),
    TRACED: ("layer", "position"),
}
"""Labels of `layer` and `other_layer`, if not 'layer' and 'later layer'."""


def matrices(store: Store) -> Drawing:
    """Raises NothingToDraw if no finished run has causal or permutation effects by pair."""
    models = measured_models(store)
    runs = compared_runs(store) if models is None else models.assign(setting=models["name"])
    traced = at_last_step(store, "layers", f"metric like '{TRACED}@%'")
    pairs = with_traces(values_of_metrics(store, "pairs", METRICS), traced)
    values, notes = mean_matrices(runs, pairs, of_one_depth=models is None)
    if values.empty:
        raise NothingToDraw(
            f"no finished run of the deepest depth has {' or '.join(METRICS)} by pair; {to_measure(METRICS)}"
        )
    return Drawing(data=values, page=partial(page_of_matrices, values, notes))


def with_traces(pairs: pd.DataFrame, layers: pd.DataFrame) -> pd.DataFrame:
    """The rows of `pairs`, and those of the causal trace in `layers`, whose `other_layer` is a position."""
    named = layers["metric"].astype(str).str.extract(f"({TRACED})@(.*)").dropna()
    traced = layers.loc[named.index].assign(metric=named[0], other_layer=named[1].astype(int))
    return pairs if named.empty else pd.concat([pairs, traced])


def mean_matrices(runs: pd.DataFrame, pairs: pd.DataFrame, of_one_depth: bool = True) -> tuple[pd.DataFrame, str]:
    """The numbers, from the result rows of `runs`, of the deepest depth or each of its own, and those of `pairs`:
    metric, setting, n_layers, layer, other_layer, value (mean over runs), n_runs; and what is left out."""
    finished = runs[runs["outcome"] == "ok"]
    deepest = finished["n_layers"] == finished["n_layers"].max()
    chosen = finished.loc[deepest | (not of_one_depth), ["run_id", "setting", "n_layers"]].astype({"n_layers": int})
    rows = pairs.dropna(subset="value").merge(chosen, on="run_id")
    by = ["metric", "setting", "n_layers", "layer", "other_layer"]
    values = rows.groupby(by)["value"].agg(value="mean", n_runs="count").reset_index()
    n_pairs = values.drop_duplicates(["metric", *by[2:]]).groupby("metric")["n_layers"].value_counts()
    exist = [pairs_that_exist(name, depth, 1).sum() for name, depth in n_pairs.index]
    # A metric with less than a quarter of the pairs that exist is not drawn.
    most = (n_pairs / exist).groupby("metric").max()
    sparse = [] if (most < 0.25).all() else sorted(most.index[most < 0.25])
    values = values[~values["metric"].isin(sparse)]
    shown = shown_settings(values["setting"], MOST)
    forms = sound_layer_metrics(values["metric"], finished[finished["run_id"].isin(chosen["run_id"])])
    notes = layer_metrics_caption(forms, SMALL_LOSS)
    notes += not_shown(values["setting"].nunique() - len(shown), "further setting")
    notes += f" Too few pairs measured to draw: {', '.join(sparse)}." if sparse else ""
    return values[values["setting"].isin(shown)].reset_index(drop=True), notes


def page_of_matrices(values: pd.DataFrame, notes: str = "") -> Figure:
    """One row per metric, one matrix per setting; in a paper one below another."""
    metrics = [metric for metric in METRICS if (values["metric"] == metric).any()]
    settings = settings_in_order(values["setting"])
    page, axes = panels(len(metrics) * len(settings), len(settings), 2.3, 2.5, least=4.6)
    for i, metric in enumerate(metrics):
        _draw_row(axes[i * len(settings) : (i + 1) * len(settings)], metric, values, settings)
    caption(page, matrices_caption(values, notes))
    return page


def _draw_row(axes: Sequence[Any], metric: str, values: pd.DataFrame, settings: Sequence[str]) -> None:
    by_setting = dict([*values[values["metric"] == metric].groupby("setting")])
    depths = values.groupby("setting")["n_layers"].max()
    drawn = [as_matrix(by_setting.get(name, values[:0]), metric, depths[name]) for name in settings]
    norm = norm_of(np.concatenate([*map(np.ravel, drawn)]), quantity_of_map(metric).scale)
    for axis, setting, matrix in zip(axes, settings, drawn, strict=True):
        image = draw_matrix(axis, metric, matrix, norm)
        axis.set_title(escaped(folded(setting, TITLE)), fontsize=8)
        if axis is not axes[0] and not paper_width():
            axis.set_ylabel("")
        if axis is axes[-1] or paper_width():  # of a paper the others may stand on another page
            colour_bar(axis, image, title_of_map(metric))


# A matrix of layers


def pairs_that_exist(metric: str, n_layers: int, n_positions: int = 0) -> np.ndarray:
    """Which cells of a matrix are pairs of layers: bool [L + 1, L + 1]; or, where TRACED, a position from 1 on and a
    layer. Layer 0, the embedding's output, is a state and no block; a removed range of blocks may be a single one."""
    if metric == TRACED:
        return np.indices((n_positions + 1, n_layers + 1))[0] > 0
    other, layer = np.indices((n_layers + 1, n_layers + 1))
    return (layer >= (metric not in OF_STATES)) & (other - layer >= (BY_PAIR[metric].measure != "removal"))


def as_matrix(pairs: pd.DataFrame, metric: str, n_layers: int) -> np.ndarray:
    """Rows of one metric as a matrix [L + 1, L + 1], row `other_layer`, column `layer`; NaN if missing or no pair."""
    exists = pairs_that_exist(metric, n_layers, max(pairs["other_layer"], default=0))
    matrix = np.full(exists.shape, np.nan)
    matrix[pairs["other_layer"], pairs["layer"]] = pairs["value"].astype(float)
    return np.where(exists, matrix, np.nan)


def draw_matrix(axis: Any, metric: str, matrix: np.ndarray, norm: Normalize) -> Any:
    """Draw a metric by pair, [L + 1, L + 1], row `other_layer`; pairs that exist but are NaN are grey. Returns the
    image, which the colour bar needs. Cells are pixels in a picture of lines, since thousands of squares are slow."""
    n_rows, n_columns = matrix.shape
    exists = pairs_that_exist(metric, n_columns - 1, n_rows - 1)
    is_missing = np.isnan(matrix) & exists
    edges = np.arange(n_columns + 1) - 0.5, np.arange(n_rows + 1) - 0.5
    look = {"cmap": ListedColormap([MISSING]), "rasterized": True}
    axis.pcolormesh(*edges, np.ma.masked_array(is_missing, ~is_missing), **look)
    look = {"cmap": "viridis_r", "norm": norm, "rasterized": True}
    image = axis.pcolormesh(*edges, np.ma.masked_invalid(matrix), **look)
    axis.set_aspect("auto" if metric == TRACED else "equal")
    for which, label in zip((axis.xaxis, axis.yaxis), AXES.get(metric, ("layer", "later layer")), strict=True):
        layer_ticks(which)
        which.set_label_text(label, size=8)
    # Ticks are not a cell away from the map.
    columns, rows = (np.flatnonzero(exists.any(over)) for over in (0, 1))
    if len(columns):
        axis.set(xlim=columns[[0, -1]] + (-0.5, 0.5), ylim=rows[[0, -1]] + (-0.5, 0.5))
    axis.tick_params(length=2, labelsize=8)
    axis.grid(False)
    return image


def norm_of(values: np.ndarray, scale: Scale) -> Normalize:
    """Colour scale from the lowest to the highest value, without NaN; a linear one includes 0."""
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if scale == "log" and low > 0:
        return LogNorm(low, high if high > low else 2 * low)
    low = min(low, 0.0)
    high = high if high > low else low + 1
    if scale == "symlog" and (threshold := linear_below(values) or (high > 10 * LINEAR_BELOW and LINEAR_BELOW)):
        return SymLogNorm(threshold, vmin=low, vmax=high)
    return Normalize(low, high)
