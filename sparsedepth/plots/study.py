"""Figures of a search: its history and each axis alone, drawn by Optuna from a study that is made of the runs' rows,
with the first objective; and the importances for all objectives, whose front is figure `pareto`.

An objective that is compared by ratio has a logarithmic axis.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.importance import importances, options_of, proposals, study_of
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import trained_runs
from sparsedepth.plots.style import RC, SERIES, caption, escaped, log_scale, set_layer_scale, shortened
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption
from sparsedepth.store.search import Search, search_of

COLUMNS = 4
"""Panels of a row."""


def _search_and_proposals(store: Store) -> tuple[Search, pd.DataFrame, str]:
    """The search, its proposals, and a note on degenerate objectives. Raises NothingToDraw for a folder without a
    search, or with fewer than two finished proposals."""
    search = search_of(store.roots)
    if search is None:
        folders = ", ".join(map(str, store.roots))
        raise NothingToDraw(f"{folders} was not filled by the sampler of one search")
    runs = trained_runs(store)
    frame = proposals(runs, search)
    if frame[search.objectives[0]].notna().sum() < 2:
        raise NothingToDraw("fewer than two proposals finished")
    return search, frame, degeneracy_caption(search.objectives, runs)


def _data(search: Search, frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The proposals with a value of the first objective, numbered as Optuna numbers them."""
    shown = frame.dropna(subset=[search.objectives[0]]).reset_index(drop=True)
    return shown[["cell_id", *names, *search.objectives]].assign(proposal=np.arange(len(shown)))


def history(store: Store) -> Drawing:
    """The first objective of each proposal in order of start, and the best so far."""
    search, frame, notes = _search_and_proposals(store)
    return Drawing(data=_data(search, frame, ()), page=partial(page_of_history, search, frame, notes))


def page_of_history(search: Search, frame: pd.DataFrame, notes: str) -> Figure:
    from optuna.visualization.matplotlib import plot_optimization_history

    objective = search.objectives[0]
    axes = _drawn(plot_optimization_history, study_of(frame, search, objective), target_name=objective)
    page = _restyled(axes.figure, 6.4, 3.6)
    axes.set(title="", xlabel="proposal, in order of start", ylabel=axis_label(objective))
    axes.lines[0].set_drawstyle("steps-post")
    axes.get_legend().remove()
    page.legend([axes.collections[0], axes.lines[0]], ["proposal", "best so far"], loc="outside upper left", ncols=2)
    _scale(axes, objective, frame)
    caption(page, "Selection bias: the best of many is optimistic. Run it again with new seeds." + notes)
    return page


def slices(store: Store) -> Drawing:
    """The first objective against each axis."""
    search, frame, notes = _search_and_proposals(store)
    if not (options := options_of(frame, search)):
        raise NothingToDraw("no axis varies among the proposals")
    return Drawing(data=_data(search, frame, [*options]), page=partial(page_of_slices, search, frame, notes))


def page_of_slices(search: Search, frame: pd.DataFrame, notes: str) -> Figure:
    """One panel per axis, in rows of COLUMNS."""
    from optuna.visualization.matplotlib import plot_slice

    objective = search.objectives[0]
    study = study_of(frame, search, objective)
    spaces = {name: space for trial in study.trials for name, space in trial.distributions.items()}
    found = _drawn(plot_slice, study, target_name=objective)
    panels = [*np.atleast_1d(found)]
    n_columns = min(COLUMNS, len(panels))
    n_rows = -(-len(panels) // n_columns)
    page = _restyled(panels[0].figure, 2.5 * n_columns + 1.2, 2.5 * n_rows + 0.5)
    for axes in [axes for axes in page.axes if axes not in panels]:
        axes.remove()  # the bar of colours, which took its room from one row
    grid = page.add_gridspec(n_rows, n_columns)
    for i, axes in enumerate(panels):
        axes.set_subplotspec(grid[i // n_columns, i % n_columns])
        name = axes.get_xlabel()
        if choices := getattr(spaces[name], "choices", ()):  # Optuna names them with Python's quotes
            axes.set_xticks(range(len(choices)), [escaped(shortened(str(choice))) for choice in choices])
            axes.set_xlim(-0.5, len(choices) - 0.5)
        elif axes.get_xscale() == "log":
            log_scale(axes, "x", frame[name].dropna())
        axes.set(title="", ylabel=axis_label(objective) if i % n_columns == 0 else "")
        axes.tick_params(labelbottom=True, labelleft=i % n_columns == 0)
        _scale(axes, objective, frame)
        axes.collections[0].set_clim(0, frame[objective].notna().sum() - 1)  # Optuna's differ between panels
    page.suptitle("")
    page.colorbar(panels[0].collections[0], ax=panels, label="proposal, in order of start", aspect=30 * n_rows)
    caption(page, f"Each dot: one of {counted(frame[objective].notna().sum(), 'proposal')}.{notes}")
    return page


def importance(store: Store) -> Drawing:
    """The importance of each axis to each objective, by both methods."""
    search, frame, notes = _search_and_proposals(store)
    parts = [
        pd.DataFrame([vars(each) for each in importances(frame, search, objective)]).assign(objective=objective)
        for objective in search.objectives
    ]
    data = pd.concat(parts, ignore_index=True)
    if data.empty:
        raise NothingToDraw("no objective has enough finished proposals with different values")
    return Drawing(data=data, page=partial(page_of_importance, search, data, notes))


def page_of_importance(search: Search, data: pd.DataFrame, notes: str) -> Figure:
    """One panel per objective. Deviates: Optuna's figure of several objectives names their bars in the order of one."""
    names = [name for name in search.axes if name in set(data["axis"])]
    objectives = [name for name in search.objectives if name in set(data["objective"])]
    page = Figure(figsize=(2.4 * len(objectives) + 1.8, 0.32 * len(names) + 1.6), layout="constrained")
    panels = page.subplots(1, len(objectives), squeeze=False, sharey=True, sharex=True)[0]
    shown = {"PED-ANOVA": "ped_anova", "fANOVA": "fanova"}
    shown = {method: name for method, name in shown.items() if data[name].notna().any()}
    for axes, objective in zip(panels, objectives, strict=True):
        rows = data[data["objective"] == objective].set_index("axis").reindex(names)
        for i, (method, name) in enumerate(shown.items()):
            places = np.arange(len(names)) + 0.35 * (i - (len(shown) - 1) / 2)
            axes.barh(places, 100 * rows[name].astype(float), color=SERIES[i][0], height=0.35, label=method)
        axes.set(
            title=objective,
            xlabel="importance (%)",
            xlim=(0, 105),
        )
        axes.set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    page.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    caption(page, "Shares of each objective; of few proposals an axis that does nothing has a share, too." + notes)
    return page


def _drawn(plot: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The axes that a function of Optuna draws; its figure is not kept open."""
    from matplotlib import pyplot

    with warnings.catch_warnings(action="ignore"), matplotlib.rc_context(RC):
        axes = plot(*given, **options)
    figure = np.atleast_1d(axes)[0].figure
    pyplot.close(figure)
    return axes


def _restyled(page: Figure, width: float, height: float) -> Figure:
    """Optuna's figure in the look of the others; it sets that of ggplot."""
    page.set_layout_engine("constrained")
    page.set_size_inches(width, height)
    page.set_facecolor("white")
    for axes in page.axes:
        axes.set_facecolor("white")
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(size=RC["axes.labelsize"], color="black")
        axes.tick_params(colors="black", labelsize=RC["xtick.labelsize"])
        axes.grid(True, color=RC["grid.color"], linewidth=RC["grid.linewidth"])
    return page


def _scale(axes: Any, objective: str, frame: pd.DataFrame) -> None:
    """A logarithmic axis of an objective that is compared by ratio; linear near 0 where one is 0."""
    values = frame[objective].dropna()
    if IN_RUNS[objective].is_ratio:
        set_layer_scale(axes, "log" if (values > 0).all() else "linear", values.tolist())
