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

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import draw_points, intervals
from sparsedepth.plots.page import Drawing, NothingToDraw, caption, depth_legend, not_shown, panels
from sparsedepth.plots.runs import changed_fields, trained_runs, without_diverged_configurations
from sparsedepth.plots.style import GREY, PROPOSAL, depth_colours, kind_markers, log_scale
from sparsedepth.quantities import IN_RUNS, axis_label, sign
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption, sound_forms
from sparsedepth.store.questions import QUESTIONS
from sparsedepth.store.search import on_front, search_of

(USEFULNESS,) = QUESTIONS["pareto"].scores
"""So that figure and question (`query --ask pareto`) have one front."""
PANELS = (("train_flops", "val_loss"), ("train_flops", USEFULNESS), (USEFULNESS, "val_loss"))
"""val_loss is replaced by the comparable loss, a degenerate score by its sound form."""
MANY = 40
"""Points without bars, and smaller."""


@dataclass(frozen=True, kw_only=True)
class Front:
    panels: list[tuple[str, str]]
    """The pairs of quantities that are drawn: those of PANELS, or of the objectives of a search, that were measured."""
    cells: pd.DataFrame
    """Columns: cell_id, n_layers, kind (`changed_fields`), n_seeds, each quantity and its 95% interval (NAME_lo and
    NAME_hi, NaN below three seeds), on_front."""
    notes: str
    """On degenerate scores and configurations with a diverged seed, which are not shown."""

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
    complete, n_diverged = without_diverged_configurations(runs)
    complete["kind"] = changed_fields(complete, objectives is not None)
    if objectives is not None and len(objectives) > 1:
        requested = [*combinations(objectives[::-1], 2)]  # the last, most often a cost, on the horizontal axis
        forms = {name: name for name in objectives}  # degenerate or not, they are what was searched for
    else:
        requested = [with_loss(loss_of(runs), pair) for pair in PANELS]
        forms = sound_forms((name for pair in requested for name in pair), runs)
    by_cell = complete.groupby("cell_id", sort=True)
    cells = by_cell[["n_layers", "kind"]].first().assign(n_seeds=by_cell.size())
    for name in forms.values():
        values = complete[["cell_id", "seed"]].assign(value=complete[name].astype(float))
        found = intervals(values, ["cell_id"]).set_index("cell_id")
        cells[name], cells[f"{name}_lo"], cells[f"{name}_hi"] = found["mean"], found["lo"], found["hi"]
    measured = [name for name in forms.values() if cells[name].notna().any()]
    cells = cells.dropna(subset=measured)
    cells["on_front"] = on_front(cells[measured].to_numpy(float), measured)
    noun = "configuration" if objectives is None else "proposal"
    return Front(
        panels=[(forms[x], forms[y]) for x, y in requested if {forms[x], forms[y]} <= {*measured}],
        cells=cells.reset_index(),
        notes=not_shown(n_diverged, noun, " with a diverged run") + degeneracy_caption(forms, runs, forms),
    )


def page_of_front(best: Front) -> Figure:
    """One panel per pair of loss, usefulness and cost; a line along its front, rings on the joint front."""
    cells = best.cells
    page, axes = panels(len(best.panels), 3, 3.4, 3.3)
    depth_legend(page, depth_colours(cells["n_layers"]), kind_markers(cells["kind"]))
    on_fronts = [_draw_front(axis, cells, x, y) for axis, (x, y) in zip(axes, best.panels, strict=True)]
    noun = "proposal" if (cells["kind"] == PROPOSAL).all() else "configuration"
    has_bars = len(cells) <= MANY and bool((cells["n_seeds"] > 2).any())
    spread = "one seed each" if cells["n_seeds"].max() == 1 else "mean over seeds" + ", 95% interval" * has_bars
    text = f"{counted(len(cells), noun)}, {spread}. Ringed: the {int(cells['on_front'].sum())} on the joint Pareto "
    text += f"front of {', '.join(best.quantities)}."
    text += " Line: the Pareto front of the panel's two quantities." if max(on_fronts) > 1 else ""
    caption(page, text + best.notes)
    return page


def _draw_front(axis: Any, cells: pd.DataFrame, x: str, y: str) -> int:
    """Returns the number of points on the panel's own front."""
    best = cells[on_front(cells[[x, y]].to_numpy(float), [x, y])].sort_values(x)
    axis.step(best[x], best[y], where="pre" if sign(x) > 0 else "post", color=GREY, linewidth=1.0, zorder=1)
    if len(cells) <= MANY:
        look: Any = {"color": "#bbbbbb", "linewidth": 0.8, "zorder": 1}
        axis.hlines(cells[y], cells[f"{x}_lo"], cells[f"{x}_hi"], **look)
        axis.vlines(cells[x], cells[f"{y}_lo"], cells[f"{y}_hi"], **look)
    size = 22 if len(cells) > MANY else 34
    draw_points(
        axis, cells, x, y, depth_colours(cells["n_layers"]), kind_markers(cells["kind"]), s=size, zorder=3, alpha=0.75
    )
    front = cells[cells["on_front"]]
    axis.scatter(front[x], front[y], s=3.5 * size, zorder=4, facecolors="none", edgecolors="black", linewidth=1.1)
    axis.set(xlabel=axis_label(x), ylabel=axis_label(y))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    for which, name in (("x", x), ("y", y)):
        values = cells[name]
        is_wide_cost = name == "train_flops" and values.max() > 5 * values.min()
        if (IN_RUNS[name].is_ratio or is_wide_cost) and (values > 0).all():
            log_scale(axis, which, values)
    if x == "train_flops":  # few distinct labels (1G, 2G, 5G); costs that are nearly equal in the middle
        if cells[x].max() < 1.01 * cells[x].min():
            axis.set_xlim(0.9 * cells[x].min(), 1.1 * cells[x].max())
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    return len(best)
