"""Loss against training FLOPs, a line for each depth, with the lower envelope; and from which budget a depth is worth
its cost (`scaling.crossover`). A panel for each setting: the baseline, then those of the fewest fields.

Branches of one trunk are points of one line, and share a seed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.by_setting import depth_styles
from sparsedepth.plots.facets import intervals, lines_drawing, panel_of, range_of
from sparsedepth.plots.page import Drawing, NothingToDraw, not_shown
from sparsedepth.plots.runs import read_runs, settings_in_order
from sparsedepth.plots.style import GREY, escaped, wrapped
from sparsedepth.scaling.budgets import BUDGET, SAME_BUDGET, budget_rows, finished
from sparsedepth.scaling.crossover import Crossover, crossovers
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store

PANELS = 4
"""Settings drawn at most."""


def isoflop(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths, or none of them at two budgets."""
    read_runs(store)
    try:
        rows = budget_rows(store)
        return by_budget(rows, crossovers(rows), loss_in(store))
    except ValueError as error:
        raise NothingToDraw(str(error)) from None


def by_budget(rows: pd.DataFrame, found: Sequence[Crossover], loss: str) -> Drawing:
    """From `budget_rows` and the verdicts on its depths. Its points: panel (the setting), setting ('N layers'),
    n_layers, x (train_flops), train_tokens, mean, lo, hi, n_seeds, is_lowest (on the lower envelope)."""
    order = settings_in_order({one.setting for one in found})
    shown = finished(rows[rows["setting"].isin(order[:PANELS])]).rename(columns={"setting": "panel", "loss": "value"})
    shown = shown.sort_values(
        ["panel", "n_layers", "train_flops"], key=lambda of: of.map(order.index) if of.name == "panel" else of
    )
    is_next = np.log(shown["train_flops"]).groupby([shown["panel"], shown["n_layers"]]).diff() > SAME_BUDGET
    at = [shown["panel"], shown["n_layers"], is_next.cumsum()]
    shown["x"] = shown["train_flops"].groupby(at).transform("first")
    shown[BUDGET] = shown[BUDGET].groupby(at).transform("first").astype(int)
    points = intervals(shown, ["panel", "n_layers", "x", BUDGET])
    if not points.duplicated(["panel", "n_layers"]).any():
        raise NothingToDraw("no depth was run at two budgets, so there is no curve; --figure depth shows the depths")
    points["setting"] = points["n_layers"].map(lambda depth: counted(depth, "layer"))
    # Whether no point of its setting has as low a loss for fewer FLOPs.
    by_cost = points.sort_values(["x", "mean"])
    points["is_lowest"] = by_cost["mean"] <= by_cost.groupby("panel")["mean"].cummin()
    look: dict[str, Any] = {"x": "flops", "x_label": "train_flops (FLOP)", "scale": "linear", "range": range_of(points)}
    settings = [name for name in order[:PANELS] if (points["panel"] == name).any()]
    kinds = [
        panel_of(
            loss,
            name,
            title=escaped(wrapped(name, 44)) if len(settings) > 1 else "",
            decorate=partial(_draw_envelope, points[points["is_lowest"] & (points["panel"] == name)]),
            **look,
        )
        for name in settings
    ]
    notes = " Wide grey line: the lower envelope. Verdicts compare depths seed by seed."
    notes += not_shown(len(order) - len(settings), "further setting")
    verdicts = [escaped(f"{one.sentence}.") for one in found if one.setting in settings]
    styles = depth_styles(points["n_layers"])
    return lines_drawing(points, kinds, "\n".join([notes, *verdicts]), styles=styles, columns=2, size=(3.9, 3.1))


def _draw_envelope(lowest: pd.DataFrame, axis: Any) -> None:
    lowest = lowest.sort_values("x")
    axis.plot(lowest["x"], lowest["mean"], color=GREY, alpha=0.35, linewidth=6, zorder=1)
