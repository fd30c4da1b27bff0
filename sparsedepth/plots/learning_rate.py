"""Validation loss against learning rate, one panel per depth and one line per setting, tuned or not.

A point is the mean over the seeds that every lr of its line has, such as the tuning seeds; the chosen lr has further
seeds. A ring marks the lr that tuning chose, or without tuning that of the lowest loss; a cross instead if it is the
lowest or highest tried, so that the best may lie beyond.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import ROOM, intervals, lines_drawing, panel_of, side_by_side
from sparsedepth.plots.page import Drawing, NothingToDraw, not_shown
from sparsedepth.plots.runs import read_runs, setting_names, settings_in_order
from sparsedepth.plots.style import GREY, setting_styles
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.tuning_roles import CHOSEN_ROLES, best_value

OUTLIER = 3.0
"""A loss so many times as far above the lowest as three quarters of the losses leaves the axis."""


def learning_rate(store: Store) -> Drawing:
    """Raises NothingToDraw if no configuration was run at two learning rates."""
    runs = read_runs(store, of_tuning=True).reset_index(drop=True)
    return by_rate(runs.assign(setting=runs["cell_id"].map(setting_names(store, "lr"))))


def by_rate(runs: pd.DataFrame) -> Drawing:
    """From the rows of `runs` (trained ones, also those that tuning rejected; `setting` without lr). Its points: panel
    (n_layers), setting, x (lr), mean, lo, hi (over the shared seeds; NaN if one diverged), n_seeds, role ('best' or
    'edge' of the chosen lr, or without tuning of that of the lowest loss; else empty), is_tuned."""
    line = ["n_layers", "setting"]
    frame = runs[[*line, "lr", "seed"]].assign(
        value=pd.to_numeric(runs[loss_of(runs)], errors="coerce"),
        is_chosen=(runs["tuning"] if "tuning" in runs else pd.Series("", runs.index)).isin(CHOSEN_ROLES),
    )
    frame = frame.assign(is_diverged=(runs["outcome"] != "ok") | frame["value"].isna())
    n_rates = frame.groupby(line)["lr"].transform("nunique")
    frame, n_rates = frame[n_rates > 1], n_rates[n_rates > 1]
    if frame.empty:
        raise NothingToDraw("no configuration has finished runs at two learning rates, so there is no curve to draw")
    frame["is_chosen"] = frame.groupby([*line, "lr"])["is_chosen"].transform("any")
    is_shared = frame.groupby([*line, "seed"])["lr"].transform("nunique") == n_rates
    has_shared = is_shared.groupby([frame["n_layers"], frame["setting"]]).transform("any")
    frame = frame[is_shared | ~has_shared].rename(columns={"n_layers": "panel", "lr": "x"})
    by = ["panel", "setting", "x"]
    points = intervals(frame.sort_values(by).assign(value=frame["value"].fillna(0.0)), by)
    points = points.join(frame.groupby(by)[["is_diverged", "is_chosen"]].any(), on=by)
    points.loc[points.pop("is_diverged").astype(bool), ["mean", "lo", "hi"]] = np.nan
    points["role"] = ""
    for _, part in points.groupby(["panel", "setting"]):
        losses = dict(zip(part["x"], part["mean"].fillna(math.inf), strict=True))
        best, role = best_value(losses, part.loc[part["is_chosen"].astype(bool), "x"].tolist())
        points.loc[part.index[part["x"] == best], "role"] = role
    is_tuned = points.pop("is_chosen").groupby([points["panel"], points["setting"]]).transform("any")
    return _drawing(points.assign(is_tuned=is_tuned), loss_of(runs))


def _drawing(points: pd.DataFrame, loss: str) -> Drawing:
    """One panel per depth, each with its own range: what differs is the loss of a depth."""
    ranges = {int(str(depth)): _range(at["mean"].dropna()) for depth, at in points.groupby("panel")}
    kinds = [
        panel_of(
            loss,
            depth,
            title=counted(depth, "layer"),
            x="log",
            x_label="learning rate",
            scale="linear",
            range=ends,
            decorate=partial(_mark_best, points[points["panel"] == depth], points["setting"], ends),
        )
        for depth, ends in ranges.items()
    ]
    n_edge, is_tuned = int((points["role"] == "edge").sum()), points["is_tuned"]
    marked = "chosen by tuning" if is_tuned.all() else "chosen by tuning, else lowest" if is_tuned.any() else "lowest"
    marks = [
        Line2D([], [], linestyle="", marker=mark, markersize=9, markerfacecolor="none", color=GREY, label=label)
        for mark, label in (("o", marked), ("x", "at the end of the grid"))[: 1 + bool(n_edge)]
    ]
    n_beyond = sum(
        int((points.loc[points["panel"] == at, "mean"] > ends[1]).sum()) for at, ends in ranges.items() if ends
    )
    n_lines = len(points[["panel", "setting"]].drop_duplicates())
    text = f" {counted(n_lines, 'line')}, each over the seeds that all its points have. Ring: {marked}."
    text += f" Cross ({n_edge}): at the end of the grid; the best may lie beyond it." if n_edge else ""
    text += f" Triangle ({n_beyond}): above the axis." if n_beyond else ""
    text += not_shown(int(points["mean"].isna().sum()), "value", " where a seed diverged")
    # Intervals of two or three seeds would hide the lines; the data has them.
    drawn = lines_drawing(points.assign(lo=np.nan, hi=np.nan), kinds, text, size=(2.9, 2.7), extra=marks)
    return replace(drawn, data=points)


def _range(losses: pd.Series) -> tuple[float, float] | None:
    """A range without the losses that would hide the differences of the others."""
    if losses.empty:
        return None
    low, usual = losses.min(), losses.quantile(0.75)
    high = min(losses.max(), low + OUTLIER * (usual - low)) if usual > low else losses.max()
    room = 2 * ROOM * (high - low) or ROOM * abs(low)
    return float(low - room), float(high + room)


def _mark_best(points: pd.DataFrame, settings: pd.Series, limits: tuple[float, float] | None, axis: Any) -> None:
    """Rings and crosses at the chosen lr, at the place of their line; triangles for points above the axis."""
    styles = setting_styles(settings_in_order(settings))
    present = [name for name in styles if (points["setting"] == name).any()]
    points = points.assign(x=side_by_side(points, "log", present))
    for name in present:
        line, colour = points[points["setting"] == name], styles[name][0]
        ring: dict[str, Any] = {"marker": "o", "s": 80, "facecolor": "none", "edgecolor": colour}
        for role, mark in (("best", ring), ("edge", {"marker": "x", "s": 60, "color": colour})):
            marked = line[line["role"] == role]
            axis.scatter(marked["x"], marked["mean"], linewidth=1.2, zorder=6, **mark)
        beyond = line[line["mean"] > limits[1]] if limits else line[:0]
        top: Any = {"transform": axis.get_xaxis_transform(), "clip_on": False}
        axis.scatter(beyond["x"], np.ones(len(beyond)), marker="^", s=22, color=colour, **top)
