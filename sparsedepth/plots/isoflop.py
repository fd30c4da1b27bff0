"""Loss against training FLOPs, a line for each depth, with the lower envelope; and from which budget a depth is worth
its cost (`scaling.crossover`). A panel for each setting: the baseline, then those of most budgets.

A point is the mean over seeds with Student's 95% interval (from three seeds on). Branches of one trunk are points of
one line, and share a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import read_runs, settings_in_order
from sparsedepth.plots.style import GREY, caption, depth_colours, depth_legend, escaped, groups, log_scale, wrapped
from sparsedepth.quantities import axis_label
from sparsedepth.scaling.budget_text import crossover_text
from sparsedepth.scaling.budgets import BUDGET, SAME_BUDGET, budget_rows, finished, flops_text, losses_by_budget
from sparsedepth.scaling.crossover import Crossover, crossovers
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.small_sample import mean_interval

PANELS = 4
"""Settings drawn at most."""


@dataclass(frozen=True, kw_only=True)
class IsoFlop:
    points: pd.DataFrame
    """setting, n_layers, train_tokens, train_flops, mean, lo, hi (NaN below three seeds), n_seeds, is_lowest: on the
    lower envelope of its setting"""
    crossovers: Sequence[Crossover]
    loss: str
    n_left_out: int


def isoflop(store: Store) -> Drawing:
    """Raises NothingToDraw if no setting was run at two depths, or none of them at two budgets."""
    read_runs(store)
    try:
        rows = budget_rows(store)
        found = crossovers(rows)
    except ValueError as error:
        raise NothingToDraw(str(error)) from None
    data = iso_flop(rows, found, loss_in(store))
    if not data.points.duplicated(["setting", "n_layers"]).any():
        raise NothingToDraw("no depth was run at two budgets, so there is no curve; --figure depth shows the depths")
    return Drawing(data=data.points, page=partial(page_of_budgets, data))


def iso_flop(rows: pd.DataFrame, found: Sequence[Crossover], loss: str) -> IsoFlop:
    """The numbers, from `budget_rows` and the verdicts on its depths."""
    order = settings_in_order({one.setting for one in found})
    points = []
    for (setting, n_layers), runs in groups(finished(rows), "setting", "n_layers"):
        for flops, by_seed in losses_by_budget(runs).items():
            tokens = runs.loc[(runs["train_flops"] / flops - 1).abs() < SAME_BUDGET, BUDGET].iloc[0]
            interval = mean_interval([*by_seed.values()])
            points.append((setting, int(n_layers), int(tokens), flops, *interval, len(by_seed)))
    names = ["setting", "n_layers", BUDGET, "train_flops", "mean", "lo", "hi", "n_seeds"]
    table = pd.DataFrame(points, columns=names).astype({"lo": float, "hi": float})
    table = table[table["setting"].isin(order[:PANELS])]
    table["is_lowest"] = [_is_lowest(row, table) for row in table.to_dict("records")]
    rank = table["setting"].map(order.index)
    table = table.iloc[np.lexsort([table["train_flops"], table["n_layers"], rank])].reset_index(drop=True)
    return IsoFlop(points=table, crossovers=found, loss=loss, n_left_out=max(0, len(order) - PANELS))


def _is_lowest(row: dict[str, Any], table: pd.DataFrame) -> bool:
    """Whether no point of its setting has as low a loss for fewer FLOPs."""
    others = table[(table["setting"] == row["setting"]) & (table["train_flops"] <= row["train_flops"])]
    return bool(row["mean"] <= others["mean"].min())


def page_of_budgets(data: IsoFlop) -> Figure:
    """One panel per setting."""
    points = data.points
    settings = list(dict.fromkeys(points["setting"]))
    n_columns = min(2, len(settings))
    n_rows = -(-len(settings) // n_columns)
    page = Figure(figsize=(max(5.2, 3.9 * n_columns), 3.1 * n_rows + 0.9), layout="constrained")
    axes = page.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axis in axes[len(settings) :]:
        axis.remove()
    colours = depth_colours(points["n_layers"])
    for axis, (_, of_setting) in zip(axes, groups(points, "setting"), strict=False):
        _draw_setting(axis, of_setting, colours)
        if len(settings) > 1:
            axis.set_title(escaped(wrapped(of_setting["setting"].iloc[0], 44)))
    for axis in axes[: len(settings)]:
        log_scale(axis, "x", points["train_flops"])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda flops, _: flops_text(flops)))
        axis.set(xlabel="train_flops (FLOP)", ylabel=axis_label(data.loss))
        axis.label_outer()
    depth_legend(page, colours)
    verdicts = [f"{crossover_text(one)}." for one in data.crossovers if one.setting in settings]
    text = "Mean over seeds, 95% interval; wide grey line: the lower envelope. Verdicts compare depths seed by seed."
    if data.n_left_out:
        text += f" Not shown: {counted(data.n_left_out, 'further setting')}."
    caption(page, text, *map(escaped, verdicts))
    return page


def _draw_setting(axis: Any, points: pd.DataFrame, colours: dict[int, str]) -> None:
    lowest = points[points["is_lowest"]].sort_values("train_flops")
    axis.plot(lowest["train_flops"], lowest["mean"], color=GREY, alpha=0.35, linewidth=6, zorder=1)
    for (n_layers,), line in groups(points, "n_layers"):
        errors = [(line["mean"] - line["lo"]).fillna(0.0), (line["hi"] - line["mean"]).fillna(0.0)]
        look: Any = {"color": colours[n_layers], "marker": "o", "markersize": 4, "linewidth": 1.4}
        axis.errorbar(line["train_flops"], line["mean"], yerr=errors, capsize=2, elinewidth=0.8, zorder=3, **look)
