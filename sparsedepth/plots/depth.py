"""Figures that compare depths: outcomes against depth (`depth`), loss against training FLOPs (`isoflop`).

`depth` leaves out configurations with a diverged seed. Of `isoflop`, branches of one trunk are points of one line, and
share a seed; `scaling.crossover` says from which budget a depth is worth its cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.plots.by_setting import depth_styles
from sparsedepth.plots.facets import Panel, intervals, lines_drawing, lr_text, metric_intervals, panel_of, range_of
from sparsedepth.plots.page import Drawing, NothingToDraw, not_shown
from sparsedepth.plots.runs import compared_runs, settings_of, shown_settings, trained_runs, without_diverged_cells
from sparsedepth.plots.style import CHANGES_VARIANCE, GREY, escaped, wrapped
from sparsedepth.quantities import IN_RUNS
from sparsedepth.scaling.crossover import Crossover, crossovers
from sparsedepth.scaling.points import BUDGET, budget_of, budget_rows, finished
from sparsedepth.store.comparable_loss import loss_in, loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy, degeneracy_caption, score_rows
from sparsedepth.store.tuning_roles import IS_RESULT
from sparsedepth.words.plain_text import counted

NEEDED = ("needed_layers", "usefulness_loss_increase")
"""The first that the runs have and that is not degenerate is drawn."""
VARIANCE = "residual_variance_last"
NO_CURVE = "no depth was run at two budgets, so there is no curve; --figure depth shows the depths"


def depth(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths."""
    settings = settings_of(store)
    sizes = settings.depth_text.replace("\n", "; ") if settings else ""
    return by_depth(compared_runs(store), f" {sizes}." if sizes else "")


def by_depth(runs: pd.DataFrame, notes: str = "") -> Drawing:
    """From the result rows of `runs`. Its points: panel (the quantity), setting, x (n_layers), mean, lo, hi, n_seeds,
    lr."""
    complete, n_diverged = without_diverged_cells(runs)
    complete = complete.rename(columns={"n_layers": "x"})
    n_depths = complete.groupby("setting")["x"].transform("nunique")
    n_single = complete.loc[n_depths == 1, "setting"].nunique()
    complete = complete[n_depths > 1]
    measured = [name for name in NEEDED if name in complete and complete[name].notna().any()]
    sound = [name for name in measured if not degeneracy(name, score_rows(runs, name)).is_degenerate]
    names = [loss_of(runs), *sound[:1], "solved_difficulty", VARIANCE]
    names = [name for name in names if name in complete and complete[name].notna().any()]
    if not names:
        raise NothingToDraw("no setting was run at two depths, so there is no line to draw")
    values = complete.melt(["setting", "x", "seed"], names, "metric").astype({"value": float})
    points = metric_intervals(values, ["setting", "x"]).rename(columns={"metric": "panel"})
    most = points["x"].where(points["panel"] == NEEDED[0])  # a count of blocks is at most n_layers
    points = points.assign(lo=points["lo"].clip(upper=most), hi=points["hi"].clip(upper=most))
    points = points.join(complete.groupby(["setting", "x"])["lr"].median(), on=["setting", "x"])
    losses = points[points["panel"] == names[0]].groupby("setting")
    merit = losses["mean"].min() - 1e6 * losses["x"].nunique()
    settings = shown_settings(points["setting"], merit=merit.to_dict())
    notes = _notes(points, len(settings)) + notes
    n_further = points["setting"].nunique() - len(settings)
    notes += not_shown(n_further, "further setting", ", of fewer depths or of a higher loss")
    notes += not_shown(n_single, "setting", " of one depth")
    notes += not_shown(n_diverged, "configuration", " with a diverged seed") + degeneracy_caption(measured[:1], runs)
    order = [*settings, *names]
    points = points[points["setting"].isin(settings)].sort_values(
        ["setting", "panel", "x"], key=lambda column: column if column.name == "x" else column.map(order.index)
    )
    return lines_drawing(points.reset_index(drop=True), [_panel(name, points) for name in names], notes)


def _notes(points: pd.DataFrame, n_settings: int) -> str:
    names = set(points["panel"])
    text = f" {counted(n_settings, 'setting')}, at tuned values, if any."
    text += " Points of one depth are drawn side by side." * (n_settings > 1)
    text += " Geometric means on logarithmic axes." if VARIANCE in names else ""
    text += " Dotted: every block is needed." * (NEEDED[0] in names)
    changes = f"{CHANGES_VARIANCE}: points of unequal lr do not show the effect of a setting on it"
    return text + lr_text(points["lr"], changes) * (VARIANCE in names)


def _panel(name: str, points: pd.DataFrame) -> Panel:
    is_log = IN_RUNS[name].scale == "log" and (points.loc[points["panel"] == name, "mean"] > 0).all()
    decorate = _every_block_is_needed if name == NEEDED[0] else None
    return panel_of(name, x="depth", x_label="n_layers", scale="log" if is_log else "linear", decorate=decorate)


def _every_block_is_needed(axis: Any, rows: pd.DataFrame) -> None:
    ends = np.geomspace(rows["x"].min(), rows["x"].max(), 50)
    axis.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.0)


def isoflop(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths, or none of them at two budgets."""
    trained_runs(store)
    by_depth = f"select 1 from runs where {IS_RESULT} group by n_layers having count(distinct {BUDGET}) > 1 limit 1"
    if not store.sql(by_depth).rows:  # before the rows of all settings are read
        raise NothingToDraw(NO_CURVE)
    try:
        rows = budget_rows(store)
        return by_budget(rows, crossovers(rows), loss_in(store))
    except ValueError as error:
        raise NothingToDraw(str(error)) from None


def by_budget(rows: pd.DataFrame, found: Sequence[Crossover], loss: str) -> Drawing:
    """From `budget_rows` and the verdicts on its depths. Its points: panel (the setting), setting ('N layers'),
    n_layers, x (train_flops), train_tokens, mean, lo, hi, n_seeds, is_lowest (on the lower envelope)."""
    order = shown_settings([one.setting for one in found], most=4)
    shown = finished(rows[rows["setting"].isin(order)])
    shown = shown.assign(panel=pd.Categorical(shown["setting"], order), value=shown["loss"])
    shown = shown.sort_values(["panel", "train_flops"]).astype({"panel": str})
    shown["x"] = shown.groupby("panel")["train_flops"].transform(budget_of)  # of all depths: their budgets are one
    shown[BUDGET] = (
        shown[BUDGET].groupby([shown["panel"], shown["x"], shown["n_layers"]]).transform("first").astype(int)
    )
    shown = shown.sort_values(["panel", "n_layers", "x"])
    points = intervals(shown, ["panel", "n_layers", "x", BUDGET])
    if not points.duplicated(["panel", "n_layers"]).any():
        raise NothingToDraw(NO_CURVE)
    points["setting"] = points["n_layers"].map(lambda depth: counted(depth, "layer"))
    # Whether no point of its setting has as low a loss for fewer FLOPs.
    by_cost = points.sort_values(["x", "mean"])
    points["is_lowest"] = by_cost["mean"] <= by_cost.groupby("panel")["mean"].cummin()
    look: dict[str, Any] = {"x": "flops", "x_label": "train_flops (FLOP)", "scale": "linear", "range": range_of(points)}
    settings = [name for name in order if (points["panel"] == name).any()]
    titles = {name: escaped(wrapped(name, 44)) if len(settings) > 1 else "" for name in settings}
    ends = points["x"].min() / 1.1, points["x"].max() * 1.1  # of all panels, also one of a single budget
    look["decorate"] = lambda axis, of_panel: _draw_envelope(axis, of_panel, ends)
    kinds = [panel_of(loss, name, title=title, **look) for name, title in titles.items()]
    notes = " Wide grey line: the lower envelope. Verdicts compare depths seed by seed."
    notes += not_shown(len({one.setting for one in found}) - len(settings), "further setting")
    verdicts = [escaped(f"{one.sentence}.") for one in found if one.setting in settings]
    styles = depth_styles(points["n_layers"])
    return lines_drawing(points, kinds, "\n".join([notes, *verdicts]), styles=styles, columns=2, size=(3.9, 3.1))


def _draw_envelope(axis: Any, rows: pd.DataFrame, ends: tuple[float, float]) -> None:
    x = np.geomspace(rows["x"].min(), rows["x"].max(), 200)
    curves = [np.interp(np.log(x), np.log(of["x"]), of["mean"], np.nan, np.nan) for _, of in rows.groupby("setting")]
    axis.plot(x, np.nanmin(curves, axis=0), color=GREY, alpha=0.35, linewidth=6, zorder=1)
    axis.set_xlim(*ends)
