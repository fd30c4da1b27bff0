"""Figures of a search: its history, each axis alone, and how much each axis matters; its front is figure `pareto`.

History and slices are of the first objective; an objective that is compared by ratio has a logarithmic axis. Deviates:
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
from sparsedepth.effects.importance import finished, importances, options_of, proposals
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import trained_runs
from sparsedepth.plots.style import SERIES, caption, escaped, log_scale, panels, set_layer_scale, shortened
from sparsedepth.quantities import IN_RUNS, axis_label, sign
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption
from sparsedepth.store.search import Search, search_of

METHODS = {"PED-ANOVA": "ped_anova", "fANOVA": "fanova"}
PROPOSAL = "proposal, in order of start"


def _search_and_proposals(store: Store) -> tuple[Search, pd.DataFrame, str]:
    """The search, its proposals with a value of the first objective, numbered, and a note on degenerate objectives.
    Raises NothingToDraw for a folder without a search, or with fewer than two such proposals."""
    search = search_of(store.roots)
    if search is None:
        folders = ", ".join(map(str, store.roots))
        raise NothingToDraw(f"{folders} was not filled by the sampler of one search")
    runs = trained_runs(store)
    frame = numbered(proposals(runs, search), search.objectives[0])
    if len(frame) < 2:
        raise NothingToDraw("fewer than two proposals finished")
    return search, frame, degeneracy_caption(search.objectives, runs)


def numbered(frame: pd.DataFrame, objective: str) -> pd.DataFrame:
    """The proposals with a value of the objective, and their number in order of start."""
    return finished(frame, objective).assign(proposal=lambda rows: np.arange(len(rows)))


def history(store: Store) -> Drawing:
    """The first objective of each proposal in order of start, and the best so far."""
    search, frame, notes = _search_and_proposals(store)
    data = frame[["cell_id", *search.objectives, "proposal"]]
    return Drawing(data=data, page=partial(page_of_history, search.objectives[0], frame, notes))


def page_of_history(objective: str, frame: pd.DataFrame, notes: str) -> Figure:
    page, (axis,) = panels(1, 1, 6.0, 2.8)
    values = frame[objective]
    axis.scatter(frame["proposal"], values, s=22, color=SERIES[0][0], label="proposal")
    best = values.cummax() if sign(objective) > 0 else values.cummin()
    axis.step(frame["proposal"], best, where="post", color=SERIES[1][0], label="best so far")
    axis.set(xlabel=PROPOSAL, ylabel=axis_label(objective))
    _scale(axis, objective, values)
    page.legend(loc="outside upper left", ncols=2)
    caption(page, "Selection bias: the best of many is optimistic. Run it again with new seeds." + notes)
    return page


def slices(store: Store) -> Drawing:
    """The first objective against each axis."""
    search, frame, notes = _search_and_proposals(store)
    if not (options := options_of(frame, search)):
        raise NothingToDraw("no axis varies among the proposals")
    data = frame[["cell_id", *options, *search.objectives, "proposal"]]
    return Drawing(data=data, page=partial(page_of_slices, search, frame, notes))


def page_of_slices(search: Search, frame: pd.DataFrame, notes: str) -> Figure:
    """One panel per axis; a proposal without its field has no point."""
    objective, options = search.objectives[0], options_of(frame, search)
    page, panel_axes = panels(len(options), 4, 2.5, 2.4)
    for axis, (name, values) in zip(panel_axes, options.items(), strict=True):
        known, choices = frame[frame[name].notna()], [value for value in values if value is not None]
        space = search.definition.axes.get(name)
        x = known[name] if isinstance(space, Interval) else known[name].map(choices.index)
        look: dict[str, Any] = {"c": known["proposal"], "cmap": "Blues", "vmin": 0, "vmax": len(frame) - 1}
        points = axis.scatter(x.astype(float), known[objective], s=30, edgecolor="grey", linewidth=0.5, **look)
        if not isinstance(space, Interval):
            axis.set_xticks(range(len(choices)), [escaped(shortened(str(choice))) for choice in choices])
            axis.set_xlim(-0.5, len(choices) - 0.5)
        elif space.log:
            log_scale(axis, "x", x)
        axis.set(xlabel=name, ylabel=axis_label(objective))
        _scale(axis, objective, frame[objective])
    page.colorbar(points, ax=panel_axes, label=PROPOSAL, aspect=30)
    caption(page, f"Each dot: one of {counted(len(frame), 'proposal')}.{notes}")
    return page


def importance(store: Store) -> Drawing:
    """The importance of each axis to each objective, by both methods."""
    search, frame, notes = _search_and_proposals(store)
    parts = [
        pd.DataFrame(importances(frame, search, objective)).assign(objective=objective)
        for objective in search.objectives
    ]
    data = pd.concat(parts, ignore_index=True)
    if data.empty:
        raise NothingToDraw("no objective has enough finished proposals with different values")
    return Drawing(data=data, page=partial(page_of_importance, search.axes, data, notes))


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
    page.legend(*panel_axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    caption(page, "Shares of each objective; of few proposals an axis that does nothing has a share, too." + notes)
    return page


def _scale(axis: Any, objective: str, values: pd.Series) -> None:
    """A logarithmic axis of an objective that is compared by ratio; linear near 0 where one is 0."""
    if IN_RUNS[objective].is_ratio:
        set_layer_scale(axis, "log" if (values > 0).all() else "linear", values.tolist())
