"""Figures of a search: its proposals in order and along each axis, and how much each axis matters; its front is figure
`pareto`.

Slices are of the first objective; an objective that is compared by ratio has a logarithmic axis. Deviates:
not the figures of Optuna, which have a scale of colours for each panel and no place on a page with a caption.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.config.space import Interval
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.importance import finished, importances, options_of, proposals
from sparsedepth.plots.page import Drawing, NothingToDraw, caption, legend_above, panels
from sparsedepth.plots.runs import trained_runs
from sparsedepth.plots.style import SERIES, escaped, log_scale, set_layer_scale, shortened
from sparsedepth.quantities import IN_RUNS, axis_label, sign
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption
from sparsedepth.store.search import search_of

METHODS = {"PED-ANOVA": "ped_anova", "fANOVA": "fanova"}


def _search_and_proposals(store: Store) -> tuple[SweepDefinition, pd.DataFrame, str]:
    """The search, its proposals with a value of the first objective, numbered, and a note on degenerate objectives.
    Raises NothingToDraw for a folder without a search, or with fewer than two such proposals."""
    search = search_of(store.roots)
    if search is None:
        raise NothingToDraw(f"{', '.join(map(str, store.roots))} was not filled by the sampler of one search")
    runs = trained_runs(store)
    frame = numbered(proposals(runs, search), search.objectives[0])
    if len(frame) < 2:
        raise NothingToDraw("fewer than two proposals finished")
    return search, frame, degeneracy_caption(search.objectives, runs)


def numbered(frame: pd.DataFrame, objective: str) -> pd.DataFrame:
    """The proposals with a value of the objective, their number in order of start, and the best value so far."""
    rows = finished(frame, objective)
    best = rows[objective].cummax() if sign(objective) > 0 else rows[objective].cummin()
    return rows.assign(proposal=np.arange(len(rows)), best_so_far=best)


def slices(store: Store) -> Drawing:
    """The first objective in order of start, with the best so far, and against each axis."""
    search, frame, notes = _search_and_proposals(store)
    data = frame[["cell_id", *options_of(frame, search), *search.objectives, "proposal", "best_so_far"]]
    return Drawing(data=data, page=partial(page_of_slices, search, frame, notes))


def page_of_slices(search: SweepDefinition, frame: pd.DataFrame, notes: str) -> Figure:
    """A panel of all proposals in order, then one per axis; a proposal without its field has no point."""
    objective, options = search.objectives[0], options_of(frame, search)
    page, (first, *others) = panels(1 + len(options), 4, 2.5, 2.4)
    _draw_slice(first, objective, frame, frame["proposal"], len(frame))
    first.step(frame["proposal"], frame["best_so_far"], where="post", color=SERIES[1][0], label="best so far")
    first.set_xlabel("proposal, in order of start")
    for axis, (name, values) in zip(others, options.items(), strict=True):
        known, choices = frame[frame[name].notna()], [value for value in values if value is not None]
        space = search.axes.get(name)
        x = known[name] if isinstance(space, Interval) else known[name].map(choices.index)
        _draw_slice(axis, objective, known, x.astype(float), len(frame))
        if not isinstance(space, Interval):
            axis.set_xticks(range(len(choices)), [escaped(shortened(str(choice))) for choice in choices])
            axis.set_xlim(-0.5, len(choices) - 0.5)
        elif space.log:
            log_scale(axis, "x", x)
        axis.set_xlabel(name)
    legend_above(page, first.get_legend_handles_labels()[0])
    text = f"Each dot: one of {counted(len(frame), 'proposal')}, later ones darker. Selection bias: the best of many is"
    caption(page, f"{text} optimistic. Run it again with new seeds.{notes}")
    return page


def _draw_slice(axis: Any, objective: str, rows: pd.DataFrame, x: pd.Series, n_proposals: int) -> None:
    look: dict[str, Any] = {"c": rows["proposal"], "cmap": "Blues", "vmin": 0, "vmax": n_proposals - 1}
    axis.scatter(x, rows[objective], s=30, edgecolor="grey", linewidth=0.5, **look)
    axis.set_ylabel(axis_label(objective))
    if IN_RUNS[objective].is_ratio:  # linear near 0 where one is 0
        set_layer_scale(axis, "log" if (rows[objective] > 0).all() else "linear", rows[objective].tolist())


def importance(store: Store) -> Drawing:
    """The importance of each axis to each objective, by both methods."""
    search, frame, notes = _search_and_proposals(store)
    parts = {name: pd.DataFrame(importances(frame, search, name)).assign(objective=name) for name in search.objectives}
    data = pd.concat(parts.values(), ignore_index=True)
    if data.empty:
        raise NothingToDraw("no objective has enough finished proposals with different values")
    return Drawing(data=data, page=partial(page_of_importance, search.varied, data, notes))


def page_of_importance(names: Sequence[str], data: pd.DataFrame, notes: str) -> Figure:
    """One panel per objective."""
    shares = data.rename(columns={name: method for method, name in METHODS.items()})
    shown = [method for method in METHODS if shares[method].notna().any()]
    names = [name for name in names if name in set(data["axis"])]
    objectives = list(dict.fromkeys(data["objective"]))
    page, panel_axes = panels(len(objectives), 3, 2.8, 0.32 * len(names) + 0.9, sharey=True, sharex=True)
    for axis, objective in zip(panel_axes, objectives, strict=True):
        rows = shares[shares["objective"] == objective].set_index("axis").reindex(names)[shown].astype(float)
        (100 * rows).plot.barh(ax=axis, color=[colour for colour, *_ in SERIES], legend=False, width=0.7)
        axis.set(title=objective, xlabel="importance (%)", ylabel="", xlim=(0, 105))
    panel_axes[0].invert_yaxis()
    legend_above(page, panel_axes[0].get_legend_handles_labels()[0])
    caption(page, "Shares of each objective; of few proposals an axis that does nothing has a share, too." + notes)
    return page
