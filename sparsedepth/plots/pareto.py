"""Pareto front of loss, usefulness and cost; of a search with several objectives, the front of these. One point per
configuration, the mean over its seeds.

A configuration is on the front if no other is at least as good in all quantities and better in one. The line in a panel
is the front of its two quantities alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import intervals
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import changed_fields, trained_runs
from sparsedepth.plots.style import GREY, PROPOSAL, RunPoints, caption, log_scale, panels
from sparsedepth.quantities import IN_RUNS, axis_label, sign
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption, sound_forms
from sparsedepth.store.questions import QUESTIONS
from sparsedepth.store.search import search_of

(USEFULNESS,) = QUESTIONS["pareto"].scores
"""So that figure and question (`query --ask pareto`) have one front."""
PANELS = (("train_flops", "val_loss"), ("train_flops", USEFULNESS), (USEFULNESS, "val_loss"))
"""val_loss is replaced by the comparable loss, a degenerate score by its sound form."""


@dataclass(frozen=True, kw_only=True)
class Front:
    panels: list[tuple[str, str]]
    """The pairs of quantities that are drawn: those of PANELS, or of the objectives of a search, that were measured."""
    cells: pd.DataFrame
    """Columns: cell_id, n_layers, kind (`changed_fields`), n_seeds, each quantity and its 95% interval (NAME_lo and
    NAME_hi, NaN below three seeds), on_front."""
    n_diverged: int
    """Configurations with a diverged seed, which are not shown."""
    notes: str = ""

    @property
    def quantities(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.panels for name in pair))


def pareto(store: Store) -> Drawing:
    """Raises NothingToDraw with fewer than two configurations to compare."""
    search, runs = search_of(store.roots), trained_runs(store)
    if search is not None:  # of a proposal with pruned seeds only the good ones are left
        runs = runs[runs.groupby("cell_id")["cell_id"].transform("size") >= search.n_seeds]
    best = front(runs, None if search is None else search.objectives)
    if len(best.cells) < 2 or len(best.quantities) < 2:
        names = " and ".join(search.objectives) if search and len(search.objectives) > 1 else "a val_loss and a cost"
        raise NothingToDraw(f"fewer than two configurations finished with {names}, so there is no front")
    return Drawing(data=best.cells, page=partial(page_of_front, best))


def front(runs: pd.DataFrame, objectives: Sequence[str] | None = None) -> Front:
    """The numbers, from the rows of `runs` (trained ones). `objectives`: those of the search that proposed them, of
    which several are drawn in place of PANELS; None without a search."""
    diverged = set(runs.loc[runs["outcome"] == "diverged", "cell_id"])
    complete = runs[~runs["cell_id"].isin(diverged)].copy()
    complete["kind"] = changed_fields(complete, objectives is not None)
    if objectives is not None and len(objectives) > 1:
        requested = [*combinations(objectives[::-1], 2)]  # the last, most often a cost, on the horizontal axis
        forms = {name: name for name in objectives}  # degenerate or not, they are what was searched for
    else:
        requested = [with_loss(loss_of(runs), pair) for pair in PANELS]
        forms = sound_forms((name for pair in requested for name in pair), runs)
    names = list(forms.values())
    complete = complete.astype(dict.fromkeys(names, float))
    by_cell = complete.groupby("cell_id", sort=True)
    cells = by_cell[["n_layers", "kind"]].first().assign(n_seeds=by_cell.size())
    for name in names:
        found = intervals(complete[["cell_id", "seed"]].assign(value=complete[name]), ["cell_id"]).set_index("cell_id")
        cells[name], cells[f"{name}_lo"], cells[f"{name}_hi"] = found["mean"], found["lo"], found["hi"]
    measured = [name for name in names if cells[name].notna().any()]
    cells = cells.dropna(subset=measured)
    cells["on_front"] = undominated(cells[measured].to_numpy() * [-sign(name) for name in measured])
    return Front(
        panels=[(forms[x], forms[y]) for x, y in requested if {forms[x], forms[y]} <= {*measured}],
        cells=cells.reset_index(),
        n_diverged=len(diverged),
        notes=degeneracy_caption(forms, runs, forms),
    )


def undominated(costs_NQ: np.ndarray) -> np.ndarray:
    """bool [N]: no other row is as low in every column and lower in one."""
    as_low_NN = (costs_NQ[:, None] <= costs_NQ[None]).all(axis=2)
    lower_NN = (costs_NQ[:, None] < costs_NQ[None]).any(axis=2)
    return np.asarray(~(as_low_NN & lower_NN).any(axis=0))


def page_of_front(best: Front) -> Figure:
    """One panel per pair of loss, usefulness and cost; a line along its front, rings on the joint front."""
    cells = best.cells
    page, axes = panels(len(best.panels), 3, 3.4, 3.3)
    points = RunPoints(cells, "kind")
    on_fronts = [_draw_front(axis, cells, x, y, points) for axis, (x, y) in zip(axes, best.panels, strict=True)]
    points.legend(page)
    noun = "proposal" if (cells["kind"] == PROPOSAL).all() else "configuration"
    spread = "mean and 95% interval over seeds" if (cells["n_seeds"] > 1).any() else "one seed each"
    text = (
        f"{counted(len(cells), noun)}, {spread}. Ringed: the {int(cells['on_front'].sum())} on the joint Pareto front "
        f"of {', '.join(best.quantities)}."
    )
    if max(on_fronts) > 1:
        text += " Line: the Pareto front of the panel's two quantities."
    left_out = f" Not shown: {counted(best.n_diverged, noun)} with a diverged run."
    caption(page, text + (left_out if best.n_diverged else "") + best.notes)
    return page


def _draw_front(axis: Any, cells: pd.DataFrame, x: str, y: str, points: RunPoints) -> int:
    """Returns the number of points on the panel's own front."""
    best = cells[undominated(cells[[x, y]].to_numpy() * [-sign(x), -sign(y)])].sort_values(x)
    where = "pre" if sign(x) > 0 else "post"
    axis.step(best[x], best[y], where=where, color=GREY, linewidth=1.0, zorder=1)
    dense = len(cells) > 40
    if not dense:
        look: Any = {"color": "#bbbbbb", "linewidth": 0.8, "zorder": 1}
        axis.hlines(cells[y], cells[f"{x}_lo"], cells[f"{x}_hi"], **look)
        axis.vlines(cells[x], cells[f"{y}_lo"], cells[f"{y}_hi"], **look)
    size = 22 if dense else 34
    points.draw(axis, cells, x, y, s=size, zorder=3, alpha=0.75)
    front = cells[cells["on_front"]]
    axis.scatter(front[x], front[y], s=3.5 * size, zorder=4, facecolors="none", edgecolors="black", linewidth=1.1)
    axis.set(xlabel=axis_label(x), ylabel=axis_label(y))
    if x == "train_flops":
        _cost_axis(axis, cells[x])
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
    for which, name in (("x", x), ("y", y)):
        if IN_RUNS[name].is_ratio and (cells[name] > 0).all():
            log_scale(axis, which, cells[name])
    return len(best)


def _cost_axis(axis: Any, costs: pd.Series) -> None:
    """Few distinct labels (1G, 2G, 5G). Costs that are nearly equal are drawn in the middle."""
    low, high = costs.min(), costs.max()
    if high > 5 * low:
        log_scale(axis, "x", costs)
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
        if high < 1.01 * low:
            axis.set_xlim(0.9 * low, 1.1 * high)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
