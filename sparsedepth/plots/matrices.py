"""Values by pair of layers, of the baseline and of each setting at the deepest depth: causal and permutation effects,
angles, and where they were measured the Jacobian's map and removal; and how a matrix of layers is drawn.

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
from sparsedepth.plots.runs import compared_runs, settings_in_order, shown_settings, values_of_metrics
from sparsedepth.plots.style import LINEAR_BELOW, MISSING, layer_ticks, linear_below
from sparsedepth.quantities import BY_PAIR
from sparsedepth.quantities.quantity import Scale
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import SMALL_LOSS, sound_layer_metrics
from sparsedepth.words.captions import escaped, not_shown, shortened, title_of_pairs, to_measure
from sparsedepth.words.degeneracy import layer_metrics_caption
from sparsedepth.words.plain_text import counted

METRICS = ("causal_effect", "permutation_effect", "angular_distance", "jacobian_map", "removal_drop")
OF_STATES = ("angular_distance", "angular_distance_last_token", "jacobian_map")
MOST = 4
"""Settings side by side; more would be too small to read."""
AXES = {
    "causal_effect": ("skipped layer", "later layer"),
    "permutation_effect": ("layer", "swapped with layer"),
    "removal_drop": ("first removed", "last removed"),
    "removal_accuracy_lost": ("first removed", "last removed"),
}
"""Labels of `layer` and `other_layer`, if not 'layer' and 'later layer'."""


def matrices(store: Store) -> Drawing:
    """Raises NothingToDraw if no finished run has causal or permutation effects by pair."""
    runs = compared_runs(store)
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
    rows = pairs.dropna(subset="value").merge(chosen, on="run_id")
    by = ["metric", "setting", "layer", "other_layer"]
    values = rows.groupby(by)["value"].agg(value="mean", n_runs="count").reset_index()
    n_pairs = values.drop_duplicates(["metric", "layer", "other_layer"])["metric"].value_counts()
    # A metric with less than a quarter of the pairs that exist is not drawn.
    sparse = [name for name, n in n_pairs.items() if n < 0.25 * pairs_that_exist(str(name), depth).sum()]
    sparse = [] if len(sparse) == len(n_pairs) else sorted(map(str, sparse))
    values = values[~values["metric"].isin(sparse)]
    shown = shown_settings(values["setting"], MOST)
    forms = sound_layer_metrics(values["metric"], finished[finished["run_id"].isin(chosen["run_id"])])
    notes = layer_metrics_caption(forms, SMALL_LOSS)
    notes += not_shown(values["setting"].nunique() - len(shown), "further setting")
    notes += f" Too few pairs measured to draw: {', '.join(sparse)}." if sparse else ""
    return values[values["setting"].isin(shown)].reset_index(drop=True), notes


def page_of_matrices(values: pd.DataFrame, depth: int, notes: str = "") -> Figure:
    """One row per metric, one matrix of layer pairs per setting; in a paper one below another."""
    metrics = [metric for metric in METRICS if (values["metric"] == metric).any()]
    settings = settings_in_order(values["setting"])
    page, axes = panels(len(metrics) * len(settings), len(settings), 2.3, 2.5, least=4.6)
    for i, metric in enumerate(metrics):
        _draw_row(axes[i * len(settings) : (i + 1) * len(settings)], metric, values, settings, depth)
    n_runs = int(values["n_runs"].max())
    caption(
        page,
        f"The deepest, {depth} layers; mean over up to {counted(n_runs, 'run')} each. Grey: missing pairs." + notes,
    )
    return page


def _draw_row(axes: Sequence[Any], metric: str, values: pd.DataFrame, settings: Sequence[str], depth: int) -> None:
    by_setting = dict([*values[values["metric"] == metric].groupby("setting")])
    drawn = [as_matrix(by_setting.get(name, values[:0]), metric, depth) for name in settings]
    norm = norm_of(np.array(drawn), BY_PAIR[metric].scale)
    for axis, setting, matrix in zip(axes, settings, drawn, strict=True):
        image = draw_matrix(axis, metric, matrix, norm)
        axis.set_title(escaped(shortened(setting)), fontsize=8)
        if axis is not axes[0] and not paper_width():
            axis.set_ylabel("")
    colour_bar(axes[-1], image, title_of_pairs(metric))


# A matrix of layers


def pairs_that_exist(metric: str, n_layers: int) -> np.ndarray:
    """Which cells of a matrix are pairs of layers: bool [L + 1, L + 1]. Layer 0, the embedding's output, is a state and
    no block; a removed range of blocks may be a single one."""
    other, layer = np.indices((n_layers + 1, n_layers + 1))
    return (layer >= _first(metric)) & (other - layer >= (BY_PAIR[metric].measure != "removal"))


def _first(metric: str) -> int:
    return int(metric not in OF_STATES)


def as_matrix(pairs: pd.DataFrame, metric: str, n_layers: int) -> np.ndarray:
    """Rows of one metric as a matrix [L + 1, L + 1], row `other_layer`, column `layer`; NaN if missing or no pair."""
    matrix = np.full((n_layers + 1, n_layers + 1), np.nan)
    matrix[pairs["other_layer"], pairs["layer"]] = pairs["value"].astype(float)
    return np.where(pairs_that_exist(metric, n_layers), matrix, np.nan)


def draw_matrix(axis: Any, metric: str, matrix: np.ndarray, norm: Normalize) -> Any:
    """Draw a metric by pair, [L + 1, L + 1], row `other_layer`; pairs that exist but are NaN are grey. Returns the
    image, which the colour bar needs. Cells are pixels in a picture of lines, since thousands of squares are slow."""
    first = _first(metric)
    is_missing = np.isnan(matrix) & pairs_that_exist(metric, len(matrix) - 1)
    edges = np.arange(first, len(matrix) + 1) - 0.5
    look = {"cmap": ListedColormap([MISSING]), "rasterized": True}
    axis.pcolormesh(edges, edges, np.ma.masked_array(is_missing, ~is_missing)[first:, first:], **look)
    look = {"cmap": "viridis_r", "norm": norm, "rasterized": True}
    image = axis.pcolormesh(edges, edges, np.ma.masked_invalid(matrix)[first:, first:], **look)
    axis.set_aspect("equal")
    for which, label in zip((axis.xaxis, axis.yaxis), AXES.get(metric, ("layer", "later layer")), strict=True):
        layer_ticks(which)
        which.set_label_text(label, size=8)
    gap = BY_PAIR[metric].measure != "removal"  # else ticks are a cell away from the map
    axis.set(xlim=(edges[0], edges[-1] - gap), ylim=(edges[0] + gap, edges[-1]))
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
