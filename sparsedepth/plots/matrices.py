"""Causal and permutation effects by pair of layers, of the baseline and of each setting, at the deepest depth.

A cell is the mean over the runs that changed that knob alone. Each row has one colour scale, so that its panels are
comparable. Grey cells are missing pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.by_knob import one_knob_runs
from sparsedepth.plots.layer_profile import HEAT_MAPS, as_matrix, colour_bar, draw_matrix, norm_of, pairs_that_exist
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import at_last_step, read_metrics, to_measure, trained_runs
from sparsedepth.plots.style import caption, escaped, shortened
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import sound_layer_metrics

METRICS = ("causal_effect", "permutation_effect")
MOST = 4
"""Settings side by side; more would be too small to read."""
FEWEST = 0.25
"""Share of the pairs that exist: a metric with fewer is not drawn."""


@dataclass(frozen=True, kw_only=True)
class Matrices:
    n_layers: int
    values: pd.DataFrame
    """Columns: metric, setting, layer, other_layer, value (mean over runs), n_runs."""
    settings: tuple[str, ...]
    n_left_out: int
    """Settings beyond MOST."""
    left_out: tuple[str, ...] = ()
    """Metrics measured at less than FEWEST of the pairs."""
    degenerate: str = ""
    """A sentence: which metrics are relative to too small a loss."""

    def matrix(self, metric: str, setting: str) -> np.ndarray:
        """[L + 1, L + 1], row `other_layer`, column `layer`; NaN if missing."""
        is_shown = (self.values["metric"] == metric) & (self.values["setting"] == setting)
        return as_matrix(self.values[is_shown], self.n_layers)


def matrices(store: Store) -> Drawing:
    """Raises NothingToDraw if no finished run has causal or permutation effects by pair."""
    means = mean_matrices(trained_runs(store), read_metrics(store, "pairs", METRICS))
    if means.values.empty:
        raise NothingToDraw(
            f"no finished run of the deepest depth has {' or '.join(METRICS)} by pair; {to_measure(METRICS)}"
        )
    return Drawing(data=means.values, page=partial(page_of_matrices, means))


def mean_matrices(runs: pd.DataFrame, pairs: pd.DataFrame) -> Matrices:
    """The numbers, from the rows of `runs` (trained ones) and `pairs`."""
    selected = one_knob_runs(runs)
    depth = int(selected["n_layers"].max())
    selected = selected[selected["n_layers"] == depth].drop_duplicates(["run_id", "setting"])
    baselines = selected.groupby("knob", sort=False)["setting"].first()
    selected = selected.assign(setting=selected["setting"].where(~selected["setting"].isin(set(baselines)), "baseline"))
    selected = selected.drop_duplicates(["run_id", "setting"])
    rows = at_last_step(pairs.loc[pairs["value"].notna()]).merge(selected[["run_id", "setting"]], on="run_id")
    settings = [name for name in dict.fromkeys(("baseline", *selected["setting"])) if name in set(rows["setting"])]
    by = ["metric", "setting", "layer", "other_layer"]
    values = rows.groupby(by)["value"].agg(value="mean", n_runs="count").reset_index()
    sparse = [metric for metric, part in values.groupby("metric") if _share_measured(str(metric), part, depth) < FEWEST]
    if len(sparse) < values["metric"].nunique():
        values = values[~values["metric"].isin(sparse)]
    shown = tuple(_most_different(values, settings))
    return Matrices(
        n_layers=depth,
        values=values[values["setting"].isin(shown)].reset_index(drop=True),
        settings=shown,
        n_left_out=len(settings) - len(shown),
        left_out=tuple(str(metric) for metric in sparse if metric not in set(values["metric"])),
        degenerate=sound_layer_metrics(values["metric"], runs[runs["run_id"].isin(selected["run_id"])])[1],
    )


def _share_measured(metric: str, values: pd.DataFrame, n_layers: int) -> float:
    """The share of the existing pairs that any run measured."""
    pairs = values[["layer", "other_layer"]].drop_duplicates()
    return len(pairs) / max(1, int(pairs_that_exist(metric, n_layers).sum()))


def _most_different(values: pd.DataFrame, settings: Sequence[str]) -> list[str]:
    """The baseline and the settings that differ most from it, in order: mean absolute difference over the pairs of the
    first metric."""
    if values.empty:
        return list(settings[:MOST])
    first = values[values["metric"] == values["metric"].iloc[0]]
    table = first.pivot_table(index=["layer", "other_layer"], columns="setting", values="value")
    difference = table.sub(table[settings[0]], axis=0).abs().mean() if settings[0] in table else table.mean()
    largest = sorted(settings[1:], key=lambda name: -difference.get(name, 0.0))[: MOST - 1]
    return [name for name in settings if name == settings[0] or name in largest]


def page_of_matrices(means: Matrices) -> Figure:
    """One row per metric, one matrix of layer pairs per setting."""
    metrics = [metric for metric in METRICS if (means.values["metric"] == metric).any()]
    width = 2.3 * len(means.settings) + 0.9
    page = Figure(figsize=(max(4.6, width), 2.5 * len(metrics) + 0.9), layout="constrained")
    axes = page.subplots(len(metrics), len(means.settings), squeeze=False)
    for row, metric in zip(axes, metrics, strict=True):
        _draw_row(page, row, metric, means)
    for axis, setting in zip(axes[0], means.settings, strict=True):
        axis.set_title(escaped(shortened(setting)), fontsize=8)
    n_runs = int(means.values["n_runs"].max())
    text = f"{means.n_layers} layers; mean over up to {counted(n_runs, 'run')} each. Grey: missing pairs."
    if means.n_left_out:
        text += f" Not shown: {counted(means.n_left_out, 'further setting')}, closer to the baseline."
    if means.left_out:
        text += f" Too few pairs measured to draw: {', '.join(means.left_out)}."
    caption(page, text + means.degenerate)
    return page


def _draw_row(page: Figure, axes: Sequence[Any], metric: str, means: Matrices) -> None:
    kind, exists = HEAT_MAPS[metric], pairs_that_exist(metric, means.n_layers)
    drawn = [np.where(exists, means.matrix(metric, setting), np.nan) for setting in means.settings]
    norm = norm_of(np.concatenate([values[np.isfinite(values)] for values in drawn]), kind.scale)
    images = [draw_matrix(axis, metric, values, exists, norm) for axis, values in zip(axes, drawn, strict=True)]
    for axis in axes[1:]:
        axis.set_ylabel("")
    colour_bar(page, images[-1], axes).set_label(kind.title, size=8)
