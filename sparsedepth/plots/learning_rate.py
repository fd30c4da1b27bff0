"""Validation loss against learning rate, one panel per depth and one line per setting, tuned or not.

A point is the mean over the seeds that every lr of its line has, such as the tuning seeds; the chosen lr has further
seeds. A ring marks the lr that tuning chose, or without tuning that of the lowest loss; a cross instead if it is the
lowest or highest tried, so that the best may lie beyond.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import ROOM, Panel, draw_facets, intervals, seeds_text
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import read_runs, setting_names, settings_in_order
from sparsedepth.plots.style import GREY, caption, groups, setting_styles, side_by_side
from sparsedepth.quantities import axis_label
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.tuning_roles import CHOSEN_ROLES, best_value, without_measured_models

OUTLIER = 3.0
"""A loss so many times as far above the lowest as three quarters of the losses leaves the axis."""


def learning_rate(store: Store) -> Drawing:
    """Raises NothingToDraw if no configuration was run at two learning rates."""
    runs = without_measured_models(read_runs(store, of_tuning=True)).reset_index(drop=True)
    runs = runs.assign(setting=runs["cell_id"].map(setting_names(store, "lr")))
    points = curves(runs)
    if points.empty:
        raise NothingToDraw("no configuration has finished runs at two learning rates, so there is no curve to draw")
    return Drawing(data=points, page=partial(page_of_curves, points, loss_of(runs)))


def curves(runs: pd.DataFrame) -> pd.DataFrame:
    """The points, from the rows of `runs` (trained ones, also those that tuning rejected; `setting` without lr): panel
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
        return pd.DataFrame()
    is_chosen = frame.groupby([*line, "lr"])["is_chosen"].transform("any")
    is_shared = frame.groupby([*line, "seed"])["lr"].transform("nunique") == n_rates
    has_shared = is_shared.groupby([frame["n_layers"], frame["setting"]]).transform("any")
    frame = frame.assign(is_chosen=is_chosen)[is_shared | ~has_shared]
    frame = frame.rename(columns={"n_layers": "panel", "lr": "x"})
    by = ["panel", "setting", "x"]
    points = intervals(frame.sort_values(by).assign(value=frame["value"].fillna(0.0)), by)
    of_point = frame.groupby(by)[["is_diverged", "is_chosen"]].any()
    points = points.join(of_point, on=by)
    points.loc[points.pop("is_diverged").astype(bool), ["mean", "lo", "hi"]] = np.nan
    points["role"] = ""
    for _, part in points.groupby(["panel", "setting"]):
        losses = dict(zip(part["x"], part["mean"].fillna(math.inf), strict=True))
        best, role = best_value(losses, part.loc[part["is_chosen"].astype(bool), "x"].tolist())
        points.loc[part.index[part["x"] == best], "role"] = role
    if points.empty:
        return points
    return points.assign(
        is_tuned=points.pop("is_chosen").groupby([points["panel"], points["setting"]]).transform("any")
    )


def page_of_curves(points: pd.DataFrame, loss: str) -> Figure:
    """One panel per depth, each with its own range: what differs is the loss of a depth."""
    settings, depths = settings_in_order(points["setting"]), sorted(set(points["panel"]))
    styles = setting_styles(settings)
    kinds = [
        Panel(
            key=depth, title=counted(depth, "layer"), x="log", x_label="learning rate", y_label=axis_label(loss),
            range=_range(points.loc[points["panel"] == depth, "mean"].dropna()),
        )
        for depth in depths
    ]  # fmt: skip
    n_edge, is_tuned = int((points["role"] == "edge").sum()), points["is_tuned"]
    marked = "chosen by tuning" if is_tuned.all() else "chosen by tuning, else lowest" if is_tuned.any() else "lowest"
    marks = [
        Line2D([], [], linestyle="", marker=mark, markersize=9, markerfacecolor="none", color=GREY, label=label)
        for mark, label in (("o", marked), ("x", "at the end of the grid"))[: 1 + bool(n_edge)]
    ]
    lines = points.assign(
        lo=np.nan, hi=np.nan
    )  # intervals of two or three seeds would hide the lines; the data has them
    page, axes = draw_facets(lines, kinds, styles, size=(2.9, 2.7), extra=marks)
    n_beyond = 0
    for axis, kind in zip(axes, kinds, strict=True):
        n_beyond += _mark_best(axis, points[points["panel"] == kind.key], styles, kind.range)
    n_lines = len(points[["panel", "setting"]].drop_duplicates())
    text = f"{counted(n_lines, 'line')}: mean over the {seeds_text(points)} that all points of a line have."
    text += f" Ring: {marked}."
    text += f" Cross ({n_edge}): at the end of the grid; the best may lie beyond it." if n_edge else ""
    text += f" Triangle ({n_beyond}): above the axis." if n_beyond else ""
    n_diverged = int(points["mean"].isna().sum())
    caption(page, text + (f" Not shown: {counted(n_diverged, 'value')} where a seed diverged." if n_diverged else ""))
    return page


def _range(losses: pd.Series) -> tuple[float, float] | None:
    """A range without the losses that would hide the differences of the others."""
    if losses.empty:
        return None
    low, usual = losses.min(), losses.quantile(0.75)
    high = min(losses.max(), low + OUTLIER * (usual - low)) if usual > low else losses.max()
    room = 2 * ROOM * (high - low) or ROOM * abs(low)
    return float(low - room), float(high + room)


def _mark_best(axis: Any, points: pd.DataFrame, styles: Any, limits: tuple[float, float] | None) -> int:
    """Rings and crosses at the chosen lr, at the place of their line; triangles for points above the axis, whose number
    is returned."""
    present, n_beyond = [name for name in styles if (points["setting"] == name).any()], 0
    rates = sorted(set(points["x"]))
    shifts = side_by_side(present, rates) if len(rates) > 1 else dict.fromkeys(present, 1.0)
    for (setting,), line in groups(points, "setting"):
        colour = styles[setting][0]
        ring: dict[str, Any] = {"marker": "o", "s": 80, "facecolor": "none", "edgecolor": colour}
        for role, mark in (("best", ring), ("edge", {"marker": "x", "s": 60, "color": colour})):
            marked = line[line["role"] == role]
            axis.scatter(marked["x"] * shifts[setting], marked["mean"], linewidth=1.2, zorder=6, **mark)
        beyond = line[line["mean"] > limits[1]] if limits else line[:0]
        n_beyond += len(beyond)
        top: Any = {"transform": axis.get_xaxis_transform(), "clip_on": False}
        axis.scatter(beyond["x"] * shifts[setting], np.ones(len(beyond)), marker="^", s=22, color=colour, **top)
    return n_beyond
