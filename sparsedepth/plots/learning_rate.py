"""Validation loss against learning rate, one line per configuration.

A configuration here is a cell (all fields but the seed) without lr, tuned or not. A point is the mean over the seeds
that every lr of its line has, such as the tuning seeds; the chosen lr has further seeds. A ring marks the lr that
tuning chose, or without tuning that of the lowest loss; a cross instead if it is the lowest or highest tried, so that
the best may lie beyond.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsedepth.config.plain_text import counted
from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.effects.knobs import keys
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import read_runs, setting_names, settings_in_order
from sparsedepth.plots.style import GREY, caption, groups, log_scale, setting_styles, settings_legend
from sparsedepth.quantities import axis_label
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.tuning_roles import CHOSEN_ROLES, best_value, without_measured_models

COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class Curves:
    points: pd.DataFrame
    """Columns: configuration (number), n_layers, setting, lr, the loss (mean over the shared seeds; NaN if one
    diverged), n_seeds, role (best or edge, of the chosen lr, or without tuning that of the lowest loss; else empty),
    is_tuned."""
    loss: str


def learning_rate(store: Store) -> Drawing:
    """Raises NothingToDraw if no configuration was run at two learning rates."""
    runs = without_measured_models(read_runs(store, of_tuning=True)).reset_index(drop=True)
    by_lr = curves(runs, setting_names(store, "lr"))
    if by_lr.points.empty:
        raise NothingToDraw("no configuration has finished runs at two learning rates, so there is no curve to draw")
    return Drawing(data=by_lr.points, page=partial(page_of_curves, by_lr))


def curves(runs: pd.DataFrame, settings: Mapping[str, str]) -> Curves:
    """The numbers, from the rows of `runs` (trained ones, also those that tuning rejected) and cell_id -> setting
    without lr."""
    fields = [name for name in CELL_FIELDS if name != "lr" and name in runs.columns]
    configuration = pd.Series(pd.factorize(keys(runs, fields))[0], runs.index)
    several = runs.groupby(configuration)["lr"].transform("nunique") > 1
    loss = loss_of(runs)
    tuning = runs["tuning"] if "tuning" in runs.columns else pd.Series(None, runs.index)
    frame = runs[["n_layers", "lr", "seed"]].assign(
        configuration=configuration,
        setting=runs["cell_id"].map(dict(settings)),
        loss=pd.to_numeric(runs[loss], errors="coerce").where(runs["outcome"] == "ok"),
        is_chosen=tuning.isin(CHOSEN_ROLES).groupby([configuration, runs["lr"]]).transform("any"),
    )[several]
    n_rates = frame.groupby("configuration")["lr"].transform("nunique")
    is_shared = frame.groupby(["configuration", "seed"])["lr"].transform("nunique") == n_rates
    frame = frame[is_shared | ~is_shared.groupby(frame["configuration"]).transform("any")]
    by_point = frame.groupby(["configuration", "n_layers", "setting", "lr"])
    points = by_point.agg(
        **{loss: ("loss", lambda losses: losses.mean(skipna=False))},
        n_seeds=("loss", "size"),
        is_chosen=("is_chosen", "any"),
    ).reset_index()
    is_chosen = points.pop("is_chosen")
    points["role"] = ""
    for _, line in points.groupby("configuration"):
        losses = dict(zip(line["lr"], line[loss].fillna(math.inf), strict=True))
        best, role = best_value(losses, line["lr"][is_chosen[line.index]].tolist())
        points.loc[line.index[line["lr"] == best], "role"] = role
    points["is_tuned"] = is_chosen.groupby(points["configuration"]).transform("any")
    return Curves(points=points, loss=loss)


def page_of_curves(by_lr: Curves) -> Figure:
    """One panel per depth."""
    points = by_lr.points
    depths, styles = sorted(set(points["n_layers"])), setting_styles(settings_in_order(points["setting"]))
    n_rows = -(-len(depths) // COLUMNS)
    n_columns = -(-len(depths) // n_rows)
    page = Figure(figsize=(max(5.2, 2.7 * n_columns + 0.6), 2.7 * n_rows + 1.0), layout="constrained")
    axes = page.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axis, depth in zip(axes, depths, strict=False):
        _draw_depth(axis, points[points["n_layers"] == depth], styles, by_lr.loss)
        axis.set_title(f"{depth} layers")
    log_scale(axes[0], "x", points["lr"])
    for axis in axes[len(depths) :]:
        axis.remove()
    n_configurations, n_edge = points["configuration"].nunique(), int((points["role"] == "edge").sum())
    is_tuned, few, most = points["is_tuned"], points["n_seeds"].min(), points["n_seeds"].max()
    marked = "chosen by tuning" if is_tuned.all() else "chosen by tuning, else lowest" if is_tuned.any() else "lowest"
    marks = [
        Line2D([], [], linestyle="", marker=mark, markersize=9, markerfacecolor="none", color=GREY, label=label)
        for mark, label in (("o", marked), ("x", "at the end of the grid"))[: 1 + bool(n_edge)]
    ]
    settings_legend(page, styles, 1 + len(depths), marks)
    n_diverged = int(points[by_lr.loss].isna().sum())
    seeds = counted(most, "seed") if few == most else f"{few} to {most} seeds"
    more = ", perhaps with more seeds" if is_tuned.any() else ""
    text = (
        f"Lines: {counted(n_configurations, 'configuration')}, mean over the {seeds} that all points of a line have. "
    )
    text += f"Ring: {marked}{more}."
    text += f" Cross ({n_edge}): {marked}, but at the end of the grid; the best may lie beyond it." if n_edge else ""
    caption(page, text + (f" Not shown: {counted(n_diverged, 'value')} where a seed diverged." if n_diverged else ""))
    return page


def _draw_depth(axis: Any, points: pd.DataFrame, styles: dict[str, tuple[str, str, str]], loss: str) -> None:
    for (_, kind), line in groups(points, "configuration", "setting"):
        colour, marker, dashes = styles[kind]
        axis.plot(line["lr"], line[loss], color=colour, marker=marker, linestyle=dashes, markersize=3.5, linewidth=1.1)
        ring: dict[str, Any] = {"marker": "o", "s": 90, "facecolor": "none", "edgecolor": colour}
        for role, mark in (("best", ring), ("edge", {"marker": "x", "s": 60, "color": colour})):
            marked = line[line["role"] == role]
            axis.scatter(marked["lr"], marked[loss], linewidth=1.2, zorder=4, **mark)
    axis.set(xlabel="learning rate", ylabel=axis_label(loss))
    axis.xaxis.label.set_color(GREY)
    axis.tick_params(labelleft=True, labelbottom=True)
