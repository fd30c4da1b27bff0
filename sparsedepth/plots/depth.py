"""Does depth pay? Loss, needed blocks, solved difficulty of a task and residual variance against the number of layers,
one line per setting, at its tuned values. Configurations with a diverged seed are left out.
"""

from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import Panel, lines_drawing, lr_text, metric_intervals, panel_of
from sparsedepth.plots.page import Drawing, NothingToDraw, not_shown
from sparsedepth.plots.runs import settings_in_order, shown_settings, trained_runs, without_diverged_configurations
from sparsedepth.plots.style import CHANGES_VARIANCE, GREY
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy, degeneracy_caption, score_rows
from sparsedepth.store.setting import read_settings

NEEDED = ("needed_layers", "usefulness_loss_increase")
"""The first that the runs have and that is not degenerate is drawn."""
VARIANCE = "residual_variance_last"


def depth(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths."""
    settings = read_settings(store)
    sizes = settings.depth_text.replace("\n", "; ") if settings else ""
    return by_depth(trained_runs(store), f" {sizes}." if sizes else "")


def by_depth(runs: pd.DataFrame, notes: str = "") -> Drawing:
    """From the result rows of `runs`. Its points: panel (the quantity), setting, x (n_layers), mean, lo, hi, n_seeds,
    lr."""
    complete, n_diverged = without_diverged_configurations(runs)
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
    values = complete.melt(["setting", "x", "seed"], names, "metric").assign(
        value=lambda rows: pd.to_numeric(rows["value"])
    )
    points = metric_intervals(values, ["setting", "x"]).rename(columns={"metric": "panel"})
    most = points["x"].where(points["panel"] == NEEDED[0])  # a count of blocks is at most n_layers
    points = points.assign(lo=points["lo"].clip(upper=most), hi=points["hi"].clip(upper=most))
    points = points.join(complete.groupby(["setting", "x"])["lr"].median(), on=["setting", "x"])
    losses = points[points["panel"] == names[0]].groupby("setting")
    merit = losses["mean"].min() - 1e6 * losses["x"].nunique()
    settings = shown_settings(points["setting"], merit=merit.to_dict())
    notes = _notes(points, len(settings)) + notes
    notes += not_shown(
        points["setting"].nunique() - len(settings), "further setting", ", of fewer depths or of a higher loss"
    )
    notes += not_shown(n_single, "setting", " of one depth")
    notes += not_shown(n_diverged, "configuration", " with a diverged seed") + degeneracy_caption(measured[:1], runs)
    order = {name: i for i, name in enumerate((*settings_in_order(settings), *names))}
    points = points[points["setting"].isin(settings)].sort_values(
        ["setting", "panel", "x"], key=lambda column: column if column.name == "x" else column.map(order)
    )
    return lines_drawing(points.reset_index(drop=True), [_panel(name, points) for name in names], notes)


def _notes(points: pd.DataFrame, n_settings: int) -> str:
    names = set(points["panel"])
    text = f" {counted(n_settings, 'setting')}, at tuned values, if any."
    text += " Points of one depth are drawn side by side." * (n_settings > 1)
    text += " Geometric means on logarithmic axes." if VARIANCE in names else ""
    text += " Dotted: every block is needed." * (NEEDED[0] in names)
    if VARIANCE in names and points["lr"].nunique() > 1:
        text += lr_text(points["lr"], CHANGES_VARIANCE)
        text = f"{text[:-1]}: points of unequal lr do not show the effect of a setting on it."
    return text


def _panel(name: str, points: pd.DataFrame) -> Panel:
    at = points[points["panel"] == name]

    def every_block_is_needed(axis: Any) -> None:
        ends = np.geomspace(at["x"].min(), at["x"].max(), 50)
        axis.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.0)

    is_log = IN_RUNS[name].scale == "log" and bool((at["mean"] > 0).all())
    decorate = every_block_is_needed if name == NEEDED[0] else None
    scale = "log" if is_log else "linear"
    return panel_of(name, x="depth", x_label="n_layers", scale=scale, decorate=decorate)
