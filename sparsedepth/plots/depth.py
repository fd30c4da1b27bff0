"""Figures that compare depths: outcomes against depth (`depth`), loss against training FLOPs (`isoflop`).

`depth` leaves out configurations with a diverged seed. Of `isoflop`, branches of one trunk are points of one line, and
share a seed; `scaling.crossover` says from which budget a depth is worth its cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.effects.depths import budget_of
from sparsedepth.plots.by_setting import depth_styles
from sparsedepth.plots.facets import FLOPS_LABEL, Panel, intervals, lines_drawing, metric_intervals, panel_of, range_of
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import (
    compared_runs,
    of_selection,
    settings_in_order,
    settings_of,
    shown_settings,
    trained_runs,
    without_diverged_cells,
)
from sparsedepth.plots.style import GREY
from sparsedepth.quantities import IN_RUNS
from sparsedepth.scaling.crossover import Crossover, crossovers
from sparsedepth.scaling.points import BUDGET, budget_cells, budget_rows, finished
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy, score_rows, usable_forms
from sparsedepth.store.tuning_roles import IS_RESULT
from sparsedepth.words.captions import depth_caption, escaped, folded, isoflop_caption
from sparsedepth.words.degeneracy import degeneracy_caption
from sparsedepth.words.differences import depth_text
from sparsedepth.words.plain_text import counted

NEEDED = ("needed_layers", "usefulness_loss_increase")
"""The first that the runs have and that is not degenerate is drawn."""
VARIANCE = "residual_variance_last"
NO_CURVE = "no depth was run at two budgets, so there is no curve; --figure depth shows the depths"


def depth(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths."""
    settings = settings_of(store)
    sizes = depth_text(settings).replace("\n", "; ") if settings else ""
    return by_depth(compared_runs(store), f" {sizes}." if sizes else "")


def by_depth(runs: pd.DataFrame, notes: str = "") -> Drawing:
    """From the result rows of `runs`. Its points: panel (the quantity), setting, x (n_layers), mean, lo, hi, n_seeds,
    lr."""
    complete, n_diverged = without_diverged_cells(runs)
    complete = complete.rename(columns={"n_layers": "x"}).sort_values("x")
    n_depths = complete.groupby("setting")["x"].transform("nunique")
    n_single = complete.loc[n_depths == 1, "setting"].nunique()
    complete = complete[n_depths > 1]
    measured = [name for name in NEEDED if _is_measured(complete, name)]
    sound = [name for name in measured if not degeneracy(name, score_rows(runs, name)).is_degenerate]
    names = (loss_of(runs), *sound[:1], "solved_difficulty", VARIANCE)
    names = [name for name in names if _is_measured(complete, name)]
    if not names:
        raise NothingToDraw("no setting was run at two depths, so there is no line to draw")
    values = complete.melt(["setting", "x", "seed"], names, "metric").astype({"value": float})
    points = metric_intervals(values, ["setting", "x"]).rename(columns={"metric": "panel"})
    most = points["x"].where(points["panel"] == NEEDED[0])  # a count of blocks is at most n_layers
    points[["lo", "hi"]] = points[["lo", "hi"]].clip(upper=most, axis=0)
    points = points.join(complete.groupby(["setting", "x"])["lr"].median(), on=["setting", "x"])
    losses = points[points["panel"] == names[0]].groupby("setting")
    merit = losses["mean"].min() - 1e6 * losses["x"].nunique()
    settings = shown_settings(points["setting"], merit=merit.to_dict())
    caption = depth_caption(points, len(settings), n_single, n_diverged)
    caption += degeneracy_caption(usable_forms(measured[:1], runs, may_replace=False).values())
    points = pd.concat([points[points["setting"] == name] for name in settings], ignore_index=True)
    kinds = [_panel(name, points[points["panel"] == name]) for name in names]
    return lines_drawing(points, kinds, caption + notes)


def _is_measured(runs: pd.DataFrame, name: str) -> bool:
    return name in runs and bool(runs[name].notna().any())


def _panel(name: str, points: pd.DataFrame) -> Panel:
    is_log = IN_RUNS[name].scale == "log" and (points["mean"] > 0).all()
    look: dict[str, Any] = {"x": "depth", "x_label": "n_layers", "scale": "log" if is_log else "linear"}
    look |= {"note": " Geometric means on logarithmic axes." if is_log else ""}
    # Far above the points the diagonal would flatten them.
    if name == NEEDED[0] and 3 * points[["mean", "hi"]].stack().max() >= points["x"].max():
        look |= {"decorate": _every_block_is_needed, "range": range_of(points.assign(hi=points["x"]))}
        look |= {"note": " Dotted: every block is needed."}
    return panel_of(name, **look)


def _every_block_is_needed(axis: Any, rows: pd.DataFrame) -> None:
    ends = np.geomspace(rows["x"].min(), rows["x"].max(), 50)
    axis.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.0)


def isoflop(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths, or none of them at two budgets."""
    trained_runs(store)
    budgets = f"count(distinct coalesce({BUDGET}, train_flops))"
    if not store.sql(
        f"select 1 from runs where {IS_RESULT} group by n_layers having {budgets} > 1 limit 1"
    ).rows:  # before the rows of all settings are read
        raise NothingToDraw(NO_CURVE)
    try:
        cells = budget_cells(store)
        return by_budget(of_selection(store, budget_rows(store)), crossovers(cells), cells.outcome)
    except ValueError as error:
        raise NothingToDraw(str(error)) from None


def by_budget(rows: pd.DataFrame, found: Sequence[Crossover], loss: str) -> Drawing:
    """From `budget_rows` and the verdicts on its depths. Its points: panel (the setting), setting ('N layers'),
    n_layers, x (train_flops), train_tokens, mean, lo, hi, n_seeds, is_lowest (on the lower envelope)."""
    order = shown_settings([one.setting for one in found], most=4)
    shown = finished(rows[rows["setting"].isin(order)]).rename(columns={"setting": "panel", "loss": "value"})
    shown["x"] = shown.groupby("panel")["train_flops"].transform(budget_of)  # of all depths: their budgets are one
    shown = shown.sort_values(["panel", "n_layers", "train_flops"])
    at = ["panel", "n_layers", "x"]
    points = intervals(shown, at)
    tokens = points.join(shown.groupby(at)[BUDGET].first(), on=at)[BUDGET]
    points.insert(len(at), BUDGET, tokens.astype(float).astype("Int64"))  # NULL where an import does not state them
    if not points.duplicated(at[:2]).any():
        raise NothingToDraw(NO_CURVE)
    points["setting"] = points["n_layers"].map(lambda depth: counted(depth, "layer"))
    # Whether no point of its setting has as low a loss for fewer FLOPs.
    by_cost = points.sort_values(["x", "mean"])
    points["is_lowest"] = by_cost["mean"] <= by_cost.groupby("panel")["mean"].cummin()
    settings = settings_in_order(points["panel"])
    ends = points["x"].min() / 1.1, points["x"].max() * 1.1  # of all panels, also one of a single budget
    look = {"x": "flops", "x_label": FLOPS_LABEL, "scale": "linear", "range": range_of(points)}
    look["decorate"] = lambda axis, of_panel: _draw_envelope(axis, of_panel, ends)
    kinds = [panel_of(loss, name, title=escaped(folded(name, 44)) * (len(settings) > 1), **look) for name in settings]
    styles = depth_styles(points["n_layers"])
    notes = isoflop_caption(found, settings)
    return lines_drawing(points, kinds, notes, styles=styles, columns=2, size=(3.9, 3.1))


def _draw_envelope(axis: Any, rows: pd.DataFrame, ends: tuple[float, float]) -> None:
    x = np.geomspace(rows["x"].min(), rows["x"].max(), 200)
    curves = [np.interp(np.log(x), np.log(of["x"]), of["mean"], np.nan, np.nan) for _, of in rows.groupby("setting")]
    axis.plot(x, np.nanmin(curves, axis=0), color=GREY, alpha=0.35, linewidth=6, zorder=1)
    axis.set_xlim(*ends)
