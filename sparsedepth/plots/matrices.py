"""Which layers other layers need: causal and permutation effects by pair of layers, the baseline beside each setting.

At the deepest depth; a cell is the mean over the runs that moved that knob alone. One colour scale per row, so that
the panels compare. Grey cells are missing pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sparsedepth.effects.sentences import counted
from sparsedepth.plots.by_knob import single_moves
from sparsedepth.plots.layer_profile import MAPS, pairs_that_exist
from sparsedepth.plots.layer_profile_page import draw_matrix, norm_of
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import trained_runs
from sparsedepth.plots.style import caption, inert

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparsedepth.store.connection import Store

METRICS = ("causal_effect", "permutation_effect")
MOST = 6
"""Settings side by side."""


@dataclass(frozen=True, kw_only=True)
class Matrices:
    n_layers: int
    values: pd.DataFrame
    """Columns: metric, setting, layer, other_layer, value (mean over runs), n_runs."""
    settings: tuple[str, ...]
    n_left_out: int
    """Settings beyond MOST."""

    def matrix(self, metric: str, setting: str) -> np.ndarray:
        """[L + 1, L + 1], row `other_layer`, column `layer`; NaN where missing."""
        here = self.values[(self.values["metric"] == metric) & (self.values["setting"] == setting)]
        found = np.full((self.n_layers + 1,) * 2, np.nan)
        found[here["other_layer"], here["layer"]] = here["value"]
        return found


def matrices(store: "Store", run: str | None = None) -> Drawing:
    """Raises NothingToDraw where no finished run has a causal or a permutation effect by pair."""
    listed = ", ".join(f"'{metric}'" for metric in METRICS)
    pairs = store.frame(f"select run_id, step, layer, other_layer, metric, value from pairs where metric in ({listed})")
    found = mean_matrices(trained_runs(store), pairs)
    if found.values.empty:
        raise NothingToDraw(f"no finished run of the deepest depth has {' or '.join(METRICS)} by pair; measure it")
    return Drawing(data=found.values, page=partial(page_of_matrices, found))


def mean_matrices(runs: pd.DataFrame, pairs: pd.DataFrame) -> Matrices:
    """The numbers, from the rows of `runs` (trained ones) and `pairs`."""
    moved = single_moves(runs)
    depth = int(moved["n_layers"].max())
    moved = moved[moved["n_layers"] == depth].drop_duplicates(["run_id", "setting"])
    first = moved.groupby("knob", sort=False)["setting"].first()
    moved = moved.assign(setting=moved["setting"].where(~moved["setting"].isin(set(first)), "baseline"))
    moved = moved.drop_duplicates(["run_id", "setting"])
    measured = pairs.loc[pairs["value"].notna()]
    measured = measured[measured["step"] == measured.groupby(["run_id", "metric"])["step"].transform("max")]
    rows = measured.merge(moved[["run_id", "setting"]], on="run_id")
    settings = [one for one in dict.fromkeys(("baseline", *moved["setting"])) if one in set(rows["setting"])]
    shown = tuple(settings[:MOST])
    by = ["metric", "setting", "layer", "other_layer"]
    values = rows[rows["setting"].isin(shown)].groupby(by)["value"].agg(value="mean", n_runs="count").reset_index()
    return Matrices(n_layers=depth, values=values, settings=shown, n_left_out=len(settings) - len(shown))


def page_of_matrices(found: Matrices) -> "Figure":
    """A row for each metric, a matrix of layer pairs for each setting."""
    from matplotlib.figure import Figure

    metrics = [metric for metric in METRICS if (found.values["metric"] == metric).any()]
    width = 2.3 * len(found.settings) + 0.9
    page = Figure(figsize=(max(4.6, width), 2.5 * len(metrics) + 0.9), layout="constrained")
    axes = page.subplots(len(metrics), len(found.settings), squeeze=False)
    for row, metric in zip(axes, metrics, strict=True):
        _draw_row(page, row, metric, found)
    for axis, setting in zip(axes[0], found.settings, strict=True):
        axis.set_title(inert(setting), fontsize=8)
    n_runs = int(found.values["n_runs"].max())
    text = f"{found.n_layers} layers; mean over {counted(n_runs, 'run')} each at most. Grey: missing pairs."
    caption(page, text + (f" Not shown: {counted(found.n_left_out, 'further setting')}." if found.n_left_out else ""))
    return page


def _draw_row(page: "Figure", axes: Sequence[Any], metric: str, found: Matrices) -> None:
    kind, exists = MAPS[metric], pairs_that_exist(metric, found.n_layers)
    drawn = [np.where(exists, found.matrix(metric, setting), np.nan) for setting in found.settings]
    norm = norm_of(np.concatenate([values[np.isfinite(values)] for values in drawn]), kind.scale)
    images = [draw_matrix(axis, metric, values, exists, norm) for axis, values in zip(axes, drawn, strict=True)]
    for axis in axes[1:]:
        axis.set_ylabel("")
    bar = page.colorbar(images[-1], ax=list(axes), shrink=0.85, aspect=18, pad=0.02)
    bar.set_label(kind.title, size=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
