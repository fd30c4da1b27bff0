"""Does depth pay? Loss, needed blocks, solved difficulty of a task and residual variance against the number of layers,
one line per setting.

A setting is how a configuration differs from the baseline (`store.setting`), at its tuned values. A point is the mean
over seeds with Student's 95% interval (from three seeds on), of the logarithm for quantities compared by ratios.
Configurations with a diverged seed are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import setting_names, settings_in_order, trained_runs, without_diverged_configurations
from sparsedepth.plots.style import (
    CHANGES_VARIANCE,
    GREY,
    SETTINGS,
    caption,
    depth_axis,
    groups,
    set_scale,
    setting_styles,
    settings_legend,
    side_by_side,
)
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption
from sparsedepth.store.setting import read_settings
from sparsedepth.store.small_sample import finished_values, mean_interval

NEEDED = ("needed_layers", "usefulness_loss_increase")
"""The first that the runs have is drawn."""
VARIANCE = "residual_variance_last"
COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class ByDepth:
    points: pd.DataFrame
    """Columns: setting (the baseline first), n_layers, quantity, mean, lo, hi (NaN below three seeds), n_seeds, lr."""
    n_diverged: int
    """Configurations with a diverged seed."""
    n_single: int = 0
    """Settings of one depth."""
    n_left_out: int = 0
    """Settings beyond those that can be told apart."""
    degenerate: str = ""
    """A sentence: which scores are degenerate, and why."""
    sizes: str = ""
    """What else changes with depth: 'train_tokens goes with n_layers: 1347584 at 4, 6389760 at 24'."""


def depth(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths."""
    data, settings = by_depth(trained_runs(store), setting_names(store)), read_settings(store)
    if data.points.empty or settings is None:
        raise NothingToDraw("no setting was run at two depths, so there is no line to draw")
    sizes = settings.depth_text.replace("\n", "; ")
    return Drawing(data=data.points, page=partial(page_of_depths, replace(data, sizes=sizes)))


def by_depth(runs: pd.DataFrame, settings: Mapping[str, str]) -> ByDepth:
    """The numbers, from the result rows of `runs`, and cell_id -> setting."""
    complete, n_diverged = without_diverged_configurations(runs)
    complete["setting"] = complete["cell_id"].map(dict(settings))
    n_depths = complete.groupby("setting")["n_layers"].transform("nunique")
    n_single = complete.loc[n_depths == 1, "setting"].nunique()
    complete = complete[n_depths > 1]
    needed = next((name for name in NEEDED if name in complete and complete[name].notna().any()), None)
    names = [name for name in (loss_of(runs), needed, "solved_difficulty", VARIANCE) if name and name in complete]
    rows = []
    for (setting, n_layers), same in complete.groupby(["setting", "n_layers"]):
        for name in names:
            if values := finished_values(same, name):
                lr = pd.to_numeric(same["lr"]).median()  # one value, unless imported runs vary in it
                rows.append((setting, int(n_layers), name, *_mean_interval(values, name, n_layers), len(values), lr))
    points = pd.DataFrame(rows, columns=["setting", "n_layers", "quantity", "mean", "lo", "hi", "n_seeds", "lr"])
    points = points.astype({"lo": float, "hi": float})
    shown = _shown_settings(points)
    n_left_out = points["setting"].nunique() - len(shown)
    points = points[points["setting"].isin(shown)]
    order = points["setting"].map(shown.index)
    points = points.iloc[order.argsort(kind="stable")].reset_index(drop=True)
    degenerate = degeneracy_caption([needed] if needed else [], runs)
    return ByDepth(
        points=points, n_diverged=n_diverged, n_single=n_single, n_left_out=n_left_out, degenerate=degenerate
    )


def _shown_settings(points: pd.DataFrame) -> list[str]:
    """The settings with a line, in order; of too many the baseline, then those of the most depths, and of the lowest
    loss among these."""
    ordered = settings_in_order(points["setting"])
    if len(ordered) <= 1 + len(SETTINGS):
        return ordered
    losses = points[points["quantity"] == points["quantity"].iloc[0]].groupby("setting")
    depths, lowest = losses["n_layers"].nunique(), losses["mean"].min()
    best = sorted(
        ordered, key=lambda name: (not name.startswith("baseline"), -depths.get(name, 0), lowest.get(name, math.inf))
    )
    return [name for name in ordered if name in best[: 1 + len(SETTINGS)]]


def _mean_interval(values: Sequence[float], name: str, n_layers: float) -> tuple[float | None, ...]:
    """Mean and interval, cut to the range of the quantity; a count of blocks is at most n_layers."""
    if not _is_log(values, name):
        clipped = map(IN_RUNS[name].clipped, mean_interval(values))
        return tuple(min(end, n_layers) if end is not None and name == NEEDED[0] else end for end in clipped)
    return tuple(None if value is None else math.exp(value) for value in mean_interval([*map(math.log, values)]))


def _is_log(values: Sequence[float], name: str) -> bool:
    return IN_RUNS[name].scale == "log" and min(values) > 0


def page_of_depths(data: ByDepth) -> Figure:
    """One panel per quantity."""
    points = data.points
    names, settings = list(dict.fromkeys(points["quantity"])), list(dict.fromkeys(points["setting"]))
    styles = setting_styles(settings)
    n_rows = -(-len(names) // COLUMNS)
    n_columns = -(-len(names) // n_rows)
    page = Figure(figsize=(max(5.2, 3.5 * n_columns), 2.8 * n_rows + 0.8), layout="constrained")
    axes = page.subplots(n_rows, n_columns, squeeze=False).ravel()
    for axis, name in zip(axes, names, strict=True):
        _draw_quantity(axis, points[points["quantity"] == name], styles, name)
    settings_legend(page, styles)
    text = f"{counted(len(settings), 'setting')}, each at its tuned values, if any: mean over seeds "
    is_cut = any(
        IN_RUNS[row["quantity"]].cut_at((row["lo"], row["hi"]))
        or (row["quantity"] == NEEDED[0] and row["lo"] < row["hi"] == row["n_layers"])
        for row in points.to_dict("records")
    )
    text += f"(geometric on a logarithmic axis), 95% interval{', cut at the end of the range' * is_cut}."
    text += " Points of one depth are drawn side by side." * (len(settings) > 1)
    if NEEDED[0] in names:
        text += " Dotted: every block is needed."
    lrs = points["lr"].dropna()
    if VARIANCE in names and lrs.nunique() > 1:
        text += f" lr is {lrs.min():g} to {lrs.max():g}{CHANGES_VARIANCE}: points of unequal lr do not show the effect "
        text += "of a setting on it."
    text += f" {data.sizes}." * bool(data.sizes)
    if data.n_left_out:
        text += f" Not shown: {counted(data.n_left_out, 'further setting')}, of fewer depths or of a higher loss."
    if data.n_single:
        text += f" Not shown: {counted(data.n_single, 'setting')} of one depth."
    if data.n_diverged:
        text += f" Not shown: {counted(data.n_diverged, 'configuration')} with a diverged seed."
    caption(page, text + data.degenerate)
    return page


def _draw_quantity(axis: Any, points: pd.DataFrame, styles: Mapping[str, tuple[str, str, str]], name: str) -> None:
    depths = sorted(set(points["n_layers"]))
    if name == NEEDED[0]:
        diagonal = np.geomspace(depths[0], depths[-1], 50)
        axis.plot(diagonal, diagonal, color=GREY, linestyle=":", linewidth=1.0)
    shifts = side_by_side([*styles], depths)
    for (setting,), line in groups(points, "setting"):
        colour, marker, dashes = styles[setting]
        x, mean = line["n_layers"] * shifts[setting], line["mean"]
        errors = [(mean - line["lo"]).fillna(0.0), (line["hi"] - mean).fillna(0.0)]
        look: Any = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.3}
        axis.errorbar(
            x, mean, yerr=errors, capsize=2, elinewidth=0.8, zorder=4 if setting.startswith("baseline") else 3, **look
        )
    depth_axis(axis, depths)
    if _is_log(points["mean"].tolist(), name):
        ends = points[["lo", "mean", "hi"]].stack()
        set_scale(axis, "y", "log", ends[ends > 0].tolist())  # a lower end can be cut at 0
    axis.set(xlabel="n_layers", ylabel=axis_label(name))
    axis.xaxis.label.set_color(GREY)
