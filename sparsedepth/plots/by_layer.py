"""By layer: residual variance, effect on later layers, and the loss added if an affine map replaces the layer.

One line per depth: the mean over the runs of that depth that changed the fewest knobs (the baseline, if it was run),
at the last step at which each was measured; the band is their range. Layer l of L is drawn at l / L.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparsedepth.effects.knobs import changed, find_knobs
from sparsedepth.plots.runs import at_last_step, mean_and_range
from sparsedepth.plots.style import GREY, LINEAR_BELOW, depth_colours, set_layer_scale
from sparsedepth.quantities import BY_LAYER
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.degeneracy import ABSOLUTE_ROWS, sound_layer_metrics

METRICS = ("residual_variance", "causal_effect", "affine_loss_increase")
READ = (*METRICS, *ABSOLUTE_ROWS.values())
"""With the absolute forms, which are drawn if the loss is too small to divide by."""
LOG = tuple(name for name in READ if BY_LAYER[name].scale == "log")


@dataclass(frozen=True, kw_only=True)
class ByLayer:
    layers: pd.DataFrame
    """Columns: metric, n_layers, layer, position (layer / n_layers), mean, low, high, n_runs, lr
    (NaN if the runs of the depth differ in it)."""
    dropped: int
    """Number of values that are NULL, or not positive on a logarithmic axis."""
    thresholds: tuple[float, ...]
    """usefulness_threshold of these runs."""
    degenerate: str = ""
    """A sentence: which score is relative to too small a loss, and what is drawn instead."""

    @property
    def metrics(self) -> list[str]:
        """Those of READ that are drawn."""
        return [metric for metric in READ if (self.layers["metric"] == metric).any()]

    @property
    def absent(self) -> list[str]:
        """Those of METRICS that no run has."""
        return [name for name in METRICS if not {name, ABSOLUTE_ROWS.get(name)} & {*self.metrics}]

    @property
    def lr_text(self) -> str:
        """'lr 0.003 at 4, 8 layers, 0.006 at 12', or 'lr 0.003' if all have one."""
        depths: dict[float, list[str]] = {}
        for depth, lr in self.layers.drop_duplicates("n_layers")[["n_layers", "lr"]].dropna().itertuples(index=False):
            depths.setdefault(lr, []).append(f"{depth:g}")
        if len(depths) == 1:
            return f"lr {next(iter(depths)):g}"
        return "lr " + "; ".join(f"{lr:g} at {', '.join(at)} layers" for lr, at in depths.items()) if depths else ""


def chosen_runs(runs: pd.DataFrame, is_search: bool = False) -> pd.DataFrame:
    """Per depth, the finished runs that changed the fewest knobs from the baseline; of a search, which has no baseline,
    the run with the lowest loss."""
    finished = runs[runs["outcome"] == "ok"]
    if is_search:
        loss = pd.to_numeric(finished[loss_of(runs)], errors="coerce")
        return finished[loss == loss.groupby(finished["n_layers"]).transform("min")]
    n_changed = changed(finished, find_knobs(runs)).map(len).astype(int)
    return finished[n_changed == n_changed.groupby(finished["n_layers"]).transform("min")]


def by_layer(runs: pd.DataFrame, layers: pd.DataFrame, is_search: bool = False) -> ByLayer:
    """The numbers of the figure, from the rows of `runs` and `layers`."""
    chosen = chosen_runs(runs, is_search)
    rows = layers[layers["metric"].isin(READ) & (layers["layer"] >= 1)]
    rows = rows.merge(chosen[["run_id", "n_layers"]], on="run_id")
    drawn, degenerate = sound_layer_metrics(rows["metric"], chosen)
    rows = rows[rows["metric"].isin(drawn.values())]
    # The last layer has no later one to affect: its NULL is no missing value.
    rows = rows[(rows["metric"] != "causal_effect") | (rows["layer"] < rows["n_layers"])]
    rows = at_last_step(rows)
    drawable = rows["value"].notna() & ((rows["value"] > 0) | ~rows["metric"].isin(LOG))
    lines = mean_and_range(rows[drawable], ["metric", "n_layers", "layer"], sort=True)
    lines.insert(3, "position", lines["layer"] / lines["n_layers"])
    lrs = chosen.groupby("n_layers")["lr"].agg(lambda lr: lr.iloc[0] if lr.nunique() == 1 else math.nan)
    lines = lines.join(lrs.astype(float), on="n_layers")
    thresholds = tuple(sorted(set(map(float, chosen["usefulness_threshold"].dropna()))))
    return ByLayer(layers=lines, dropped=int((~drawable).sum()), thresholds=thresholds, degenerate=degenerate)


def draw_by_layer(by_depth: ByLayer, axes: Sequence[Any], colours: dict[int, str] | None = None) -> None:
    """Draw into as many axes as there are metrics."""
    colours = colours or depth_colours(by_depth.layers["n_layers"])
    for axis, metric in zip(axes, by_depth.metrics, strict=True):
        shown = by_depth.layers[by_depth.layers["metric"] == metric]
        axis.set(xlabel="layer / number of layers", ylabel=BY_LAYER[metric].axis_label, xlim=(0, 1.02))
        for depth, line in shown.groupby("n_layers"):
            x, look = line["position"], {"color": colours[depth]}
            axis.plot(x, line["mean"], marker="o", markersize=3, markeredgewidth=0, linewidth=1.3, **look)
            axis.fill_between(x, line["low"], line["high"], alpha=0.18, linewidth=0, **look)
        thresholds = by_depth.thresholds if metric == "affine_loss_increase" else ()
        set_layer_scale(axis, BY_LAYER[metric].scale, [*shown["low"], *shown["high"]])
        if thresholds and axis.get_yscale() == "linear":  # the thresholds are small
            axis.set_yscale("symlog", linthresh=LINEAR_BELOW)
        for threshold in thresholds:
            axis.axhline(threshold, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        n_runs = sorted(set(shown["n_runs"]))
        counts = " to ".join(str(n) for n in dict.fromkeys((n_runs[0], n_runs[-1])))
        text = f"mean and range of {counts} runs per depth" if n_runs[-1] > 1 else "one run per depth"
        axis.set_title(text, color=GREY, fontsize=7.5)
