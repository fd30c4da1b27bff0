"""Which layers other layers need: causal and permutation effects by pair of layers, the baseline beside each setting.

At the deepest depth; a cell is the mean over the runs that moved that knob alone. One colour scale per row, so that
the panels compare. Grey cells are missing pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.effects.sentences import counted
from sparsedepth.plots.by_knob import single_moves
from sparsedepth.plots.layer_profile import MAPS, pairs_that_exist, square
from sparsedepth.plots.layer_profile_page import colour_bar, draw_matrix, norm_of
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import at_last_step, read_metrics, trained_runs
from sparsedepth.plots.style import caption, inert, short
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import sound_layer_metrics

METRICS = ("causal_effect", "permutation_effect")
MOST = 4
"""Settings side by side: more are too small to read."""
FEWEST = 0.25
"""Of the pairs that exist: a matrix with fewer is grey."""


@dataclass(frozen=True, kw_only=True)
class Matrices:
    n_layers: int
    values: pd.DataFrame
    """Columns: metric, setting, layer, other_layer, value (mean over runs), n_runs."""
    settings: tuple[str, ...]
    n_left_out: int
    """Settings beyond MOST."""
    left_out: tuple[str, ...] = ()
    """Metrics of which fewer than FEWEST of the pairs are known."""
    degenerate: str = ""
    """Which are divided by too small a loss: a sentence."""

    def matrix(self, metric: str, setting: str) -> np.ndarray:
        """[L + 1, L + 1], row `other_layer`, column `layer`; NaN where missing."""
        here = (self.values["metric"] == metric) & (self.values["setting"] == setting)
        return square(self.values[here], self.n_layers)


def matrices(store: Store) -> Drawing:
    """Raises NothingToDraw where no finished run has a causal or a permutation effect by pair."""
    means = mean_matrices(trained_runs(store), read_metrics(store, "pairs", METRICS))
    if means.values.empty:
        raise NothingToDraw(f"no finished run of the deepest depth has {' or '.join(METRICS)} by pair; measure it")
    return Drawing(data=means.values, page=partial(page_of_matrices, means))


def mean_matrices(runs: pd.DataFrame, pairs: pd.DataFrame) -> Matrices:
    """The numbers, from the rows of `runs` (trained ones) and `pairs`."""
    moved = single_moves(runs)
    depth = int(moved["n_layers"].max())
    moved = moved[moved["n_layers"] == depth].drop_duplicates(["run_id", "setting"])
    first = moved.groupby("knob", sort=False)["setting"].first()
    moved = moved.assign(setting=moved["setting"].where(~moved["setting"].isin(set(first)), "baseline"))
    moved = moved.drop_duplicates(["run_id", "setting"])
    rows = at_last_step(pairs.loc[pairs["value"].notna()]).merge(moved[["run_id", "setting"]], on="run_id")
    settings = [name for name in dict.fromkeys(("baseline", *moved["setting"])) if name in set(rows["setting"])]
    by = ["metric", "setting", "layer", "other_layer"]
    values = rows.groupby(by)["value"].agg(value="mean", n_runs="count").reset_index()
    sparse = [metric for metric, part in values.groupby("metric") if _share_known(str(metric), part, depth) < FEWEST]
    if len(sparse) < values["metric"].nunique():
        values = values[~values["metric"].isin(sparse)]
    shown = tuple(_furthest(values, settings))
    return Matrices(
        n_layers=depth,
        values=values[values["setting"].isin(shown)].reset_index(drop=True),
        settings=shown,
        n_left_out=len(settings) - len(shown),
        left_out=tuple(str(metric) for metric in sparse if metric not in set(values["metric"])),
        degenerate=sound_layer_metrics(values["metric"], runs[runs["run_id"].isin(moved["run_id"])])[1],
    )


def _share_known(metric: str, values: pd.DataFrame, n_layers: int) -> float:
    """Of the pairs that exist, those that any run measured."""
    pairs = values[["layer", "other_layer"]].drop_duplicates()
    return len(pairs) / max(1, int(pairs_that_exist(metric, n_layers).sum()))


def _furthest(values: pd.DataFrame, settings: Sequence[str]) -> list[str]:
    """The baseline and the settings furthest from it in the first metric, in their order: by the mean absolute
    difference over the pairs."""
    if values.empty:
        return list(settings[:MOST])
    first = values[values["metric"] == values["metric"].iloc[0]]
    table = first.pivot_table(index=["layer", "other_layer"], columns="setting", values="value")
    away = table.sub(table[settings[0]], axis=0).abs().mean() if settings[0] in table else table.mean()
    others = sorted(settings[1:], key=lambda name: -away.get(name, 0.0))[: MOST - 1]
    return [name for name in settings if name == settings[0] or name in others]


def page_of_matrices(means: Matrices) -> Figure:
    """A row for each metric, a matrix of layer pairs for each setting."""
    metrics = [metric for metric in METRICS if (means.values["metric"] == metric).any()]
    width = 2.3 * len(means.settings) + 0.9
    page = Figure(figsize=(max(4.6, width), 2.5 * len(metrics) + 0.9), layout="constrained")
    axes = page.subplots(len(metrics), len(means.settings), squeeze=False)
    for row, metric in zip(axes, metrics, strict=True):
        _draw_row(page, row, metric, means)
    for axis, setting in zip(axes[0], means.settings, strict=True):
        axis.set_title(inert(short(setting)), fontsize=8)
    n_runs = int(means.values["n_runs"].max())
    text = f"{means.n_layers} layers; mean over {counted(n_runs, 'run')} each at most. Grey: missing pairs."
    if means.n_left_out:
        text += f" Not shown: {counted(means.n_left_out, 'further setting')}, nearer to the baseline."
    if means.left_out:
        text += f" Measured at too few pairs to draw: {', '.join(means.left_out)}."
    caption(page, text + means.degenerate)
    return page


def _draw_row(page: Figure, axes: Sequence[Any], metric: str, means: Matrices) -> None:
    kind, exists = MAPS[metric], pairs_that_exist(metric, means.n_layers)
    drawn = [np.where(exists, means.matrix(metric, setting), np.nan) for setting in means.settings]
    norm = norm_of(np.concatenate([values[np.isfinite(values)] for values in drawn]), kind.scale)
    images = [draw_matrix(axis, metric, values, exists, norm) for axis, values in zip(axes, drawn, strict=True)]
    for axis in axes[1:]:
        axis.set_ylabel("")
    colour_bar(page, images[-1], axes).set_label(kind.title, size=8)
