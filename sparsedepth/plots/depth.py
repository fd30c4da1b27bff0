"""Does depth pay? Loss, needed blocks, solved difficulty of a task and residual variance against the number of layers,
one line per setting, at its tuned values. Configurations with a diverged seed are left out.
"""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import Panel, draw_facets, intervals
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import (
    settings_in_order,
    shown_settings,
    trained_runs,
    without_diverged_configurations,
)
from sparsedepth.plots.style import CHANGES_VARIANCE, GREY, caption, setting_styles
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy, degeneracy_caption, score_rows
from sparsedepth.store.setting import read_settings

NEEDED = ("needed_layers", "usefulness_loss_increase")
"""The first that the runs have and that is not degenerate is drawn."""
VARIANCE = "residual_variance_last"


def depth(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths."""
    runs, settings = trained_runs(store), read_settings(store)
    points, notes = by_depth(runs)
    if points.empty:
        raise NothingToDraw("no setting was run at two depths, so there is no line to draw")
    sizes = settings.depth_text.replace("\n", "; ") if settings else ""
    return Drawing(data=points, page=partial(page_of_depths, points, notes + (f" {sizes}." if sizes else "")))


def by_depth(runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The points, from the result rows of `runs`: panel (the quantity), setting, x (n_layers), mean, lo, hi, n_seeds,
    lr; and what is left out."""
    complete, n_diverged = without_diverged_configurations(runs)
    complete = complete[complete["outcome"] == "ok"].rename(columns={"n_layers": "x"})
    n_depths = complete.groupby("setting")["x"].transform("nunique")
    n_single = complete.loc[n_depths == 1, "setting"].nunique()
    complete = complete[n_depths > 1]
    measured = [name for name in NEEDED if name in complete and complete[name].notna().any()]
    sound = [name for name in measured if not degeneracy(name, score_rows(runs, name)).is_degenerate]
    parts = []
    for name in (loss_of(runs), *sound[:1], "solved_difficulty", VARIANCE):
        if name in complete and complete[name].notna().any():
            of_name = pd.to_numeric(complete[name], errors="coerce")
            values = complete[["setting", "x", "seed"]].assign(value=of_name, panel=name)
            is_log = IN_RUNS[name].scale == "log" and bool((values["value"].dropna() > 0).all())
            parts.append(_clipped(intervals(values, ["panel", "setting", "x"], is_log), name))
    if not parts:
        return pd.DataFrame(), ""
    lrs = complete.groupby(["setting", "x"])["lr"].median().rename("lr")
    points = pd.concat(parts, ignore_index=True).join(lrs, on=["setting", "x"])
    losses = points[points["panel"] == points["panel"].iloc[0]].groupby("setting")
    merit = {
        name: low - 1e6 * n
        for name, low, n in zip(losses.groups, losses["mean"].min(), losses["x"].nunique(), strict=True)
    }
    settings = shown_settings(points["setting"], merit)
    left_out = {
        "further setting": (points["setting"].nunique() - len(settings), ", of fewer depths or of a higher loss"),
        "setting": (n_single, " of one depth"),
        "configuration": (n_diverged, " with a diverged seed"),
    }
    notes = "".join(f" Not shown: {counted(n, what)}{why}." for what, (n, why) in left_out.items() if n)
    points = points[points["setting"].isin(settings)].sort_values(["panel", "x"], key=_first_seen, kind="stable")
    points = points.sort_values("setting", key=lambda names: names.map(settings.index), kind="stable")
    return points.reset_index(drop=True), notes + degeneracy_caption(measured[:1], runs)


def _first_seen(column: pd.Series) -> pd.Series:
    return pd.Series(pd.factorize(column)[0], column.index) if column.name == "panel" else column


def _clipped(points: pd.DataFrame, name: str) -> pd.DataFrame:
    """Intervals cut to the range of the quantity; a count of blocks is at most n_layers."""
    least, most = IN_RUNS[name].range
    upper = np.minimum(most, points["x"]) if name == NEEDED[0] else most
    return points.assign(lo=points["lo"].clip(least, upper), hi=points["hi"].clip(least, upper))


def page_of_depths(points: pd.DataFrame, notes: str = "") -> Figure:
    """One panel per quantity."""
    names, settings = list(dict.fromkeys(points["panel"])), settings_in_order(points["setting"])
    kinds = [_panel(name, points[points["panel"] == name]) for name in names]
    page, _ = draw_facets(points, kinds, setting_styles(settings), columns=3)
    text = f"{counted(len(settings), 'setting')}, each at its tuned values, if any: mean over seeds (geometric on a "
    text += "logarithmic axis), 95% interval."
    text += " Points of one depth are drawn side by side." * (len(settings) > 1)
    text += " Dotted: every block is needed." * (NEEDED[0] in names)
    lrs = points["lr"].dropna()
    if VARIANCE in names and lrs.nunique() > 1:
        text += f" lr is {lrs.min():g} to {lrs.max():g}{CHANGES_VARIANCE}: points of unequal lr do not show the effect "
        text += "of a setting on it."
    caption(page, text + notes)
    return page


def _panel(name: str, points: pd.DataFrame) -> Panel:
    def every_block_is_needed(axis: Any) -> None:
        ends = np.geomspace(points["x"].min(), points["x"].max(), 50)
        axis.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.0)

    is_log = IN_RUNS[name].scale == "log" and bool((points["mean"] > 0).all())
    return Panel(
        key=name,
        x="depth",
        x_label="n_layers",
        y_label=axis_label(name),
        scale="log" if is_log else "linear",
        decorate=every_block_is_needed if name == NEEDED[0] else None,
    )
