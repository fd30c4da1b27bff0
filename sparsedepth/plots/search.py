"""A search: the best value so far (history), values combined in each proposal (parallel), each axis alone (slices)."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.surrogate import MIN_SKILL, Axis, axes_of, proposals, surrogate
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import trained_runs
from sparsedepth.plots.style import GREY, caption, escaped, legend_above, log_scale, shortened
from sparsedepth.quantities import axis_label, sign
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption
from sparsedepth.store.search import Search, search_of

COLOURS = "viridis_r"
COLUMNS = 3


def _search_and_proposals(store: Store) -> tuple[Search, pd.DataFrame, pd.DataFrame]:
    """The search, its proposals and its runs. Raises NothingToDraw for a folder without a search, or with fewer than
    two finished proposals."""
    search = search_of(store.roots)
    if search is None:
        folders = ", ".join(map(str, store.roots))
        raise NothingToDraw(f"{folders} was not filled by the sampler of one search")
    runs = trained_runs(store)
    frame = proposals(runs, search)
    if frame[search.objectives[0]].notna().sum() < 2:
        raise NothingToDraw("fewer than two proposals finished")
    return search, frame, runs


def history(store: Store) -> Drawing:
    """The objectives of each proposal in order of start, and the best so far."""
    search, frame, runs = _search_and_proposals(store)
    data = frame[["cell_id", *search.objectives, "n_seeds", "on_front"]].assign(proposal=np.arange(1, len(frame) + 1))
    for name in search.objectives:
        best = data[name].cummax() if sign(name) > 0 else data[name].cummin()
        data[f"best_{name}"] = best.ffill()
    degenerate = degeneracy_caption(search.objectives, runs)
    return Drawing(data=data, page=partial(page_of_history, search, data, degenerate))


def page_of_history(search: Search, data: pd.DataFrame, degenerate: str) -> Figure:
    """One panel per objective."""
    page = Figure(figsize=(6.4, 2.4 * len(search.objectives) + 0.6), layout="constrained")
    panels = page.subplots(len(search.objectives), 1, squeeze=False, sharex=True)[:, 0]
    for axes, name in zip(panels, search.objectives, strict=True):
        axes.plot(data["proposal"], data[f"best_{name}"], drawstyle="steps-post", color="black", label="best so far")
        axes.scatter(data["proposal"], data[name], s=16, color=GREY, label="proposal")
        front = data[data["on_front"]]
        if len(search.objectives) > 1:
            axes.scatter(front["proposal"], front[name], s=30, facecolors="none", edgecolors="C3", label="on the front")
        axes.set_ylabel(axis_label(name))
    panels[-1].set_xlabel("proposal, in order of start")
    legend_above(page, panels[0].get_legend_handles_labels()[0])
    caption(page, "Selection bias: the best of many is optimistic. Run it again with new seeds." + degenerate)
    return page


def parallel(store: Store) -> Drawing:
    """One line per proposal through its values, coloured by the first objective."""
    search, frame, runs = _search_and_proposals(store)
    axes = axes_of(frame, search)
    if len(axes) < 2:
        raise NothingToDraw("fewer than two axes vary, so there are no parallel coordinates")
    data = frame[["cell_id", *(axis.name for axis in axes), *search.objectives]].copy()
    for axis in axes:
        data[f"{axis.name}_place"] = _positions(axis, frame[axis.name])
    degenerate = degeneracy_caption(search.objectives[:1], runs)
    return Drawing(data=data, page=partial(page_of_parallel, search, axes, data, degenerate))


def _positions(axis: Axis, values: pd.Series) -> np.ndarray:
    """Positions of values on an axis, 0 to 1."""
    if axis.is_range:
        return axis.columns(values.tolist())[:, 0]
    return _indices(axis, values) / max(1, len(axis.values) - 1)


def _indices(axis: Axis, values: pd.Series) -> np.ndarray:
    """The index of each value among the options of a choice; a missing value is the option None."""
    return np.array([axis.values.index(value if value in axis.values else None) for value in values])


def page_of_parallel(search: Search, axes: list[Axis], data: pd.DataFrame, degenerate: str) -> Figure:
    """One vertical line per axis, values from low to high; better proposals are drawn on top."""
    objective = search.objectives[0]
    page = Figure(figsize=(1.5 * len(axes) + 2.2, 3.6), layout="constrained")
    panel = page.subplots()
    finished = data.dropna(subset=[objective]).sort_values(objective, ascending=sign(objective) > 0)
    colours = ScalarMappable(Normalize(finished[objective].min(), finished[objective].max()), COLOURS)
    for _, row in finished.iterrows():
        positions = [row[f"{axis.name}_place"] for axis in axes]
        panel.plot(range(len(axes)), positions, color=colours.to_rgba(row[objective]), linewidth=1)
    for x, axis in enumerate(axes):
        panel.axvline(x, color=GREY, linewidth=0.6)
        for position, option in zip(np.linspace(0, 1, len(axis.values)), axis.values, strict=True):
            text = f"{option:g}" if isinstance(option, float) else str(option)
            panel.annotate(
                escaped(text), (x, position), xytext=(4, 0), textcoords="offset points", fontsize="small", va="center",
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            )  # fmt: skip
    panel.set_xticks(range(len(axes)), [f"{axis.name}\n(log scale)" if axis.is_log else axis.name for axis in axes])
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    panel.set_xlim(-0.2, len(axes) - 0.5)
    page.colorbar(colours, ax=panel, label=axis_label(objective))
    caption(page, f"{counted(len(finished), 'finished proposal')}, a line each; the best on top.{degenerate}")
    return page


def slices(store: Store) -> Drawing:
    """The first objective against each axis, with the surrogate's partial dependence if its skill suffices."""
    search, frame, runs = _search_and_proposals(store)
    axes, objective = axes_of(frame, search), search.objectives[0]
    if not axes:
        raise NothingToDraw("no axis varies among the proposals")
    fitted = surrogate(frame, search, objective)
    parts = [
        pd.DataFrame({"axis": axis.name, "kind": "proposal", "value": frame[axis.name], "mean": frame[objective]})
        for axis in axes
    ]
    if fitted is not None and fitted.skill >= MIN_SKILL:
        for axis in axes:
            curve = fitted.partial(axis.name)
            values = {"value": [value for value, _ in curve], "mean": [mean for _, mean in curve]}
            parts.append(pd.DataFrame({"axis": axis.name, "kind": "partial dependence", **values}))
    data = pd.concat([part.astype(object) for part in parts], ignore_index=True)
    skill = "no surrogate: too few proposals" if fitted is None else f"skill on left-out proposals {fitted.skill:+.2f}"
    notes = f"{skill}.{degeneracy_caption([objective], runs)}"
    return Drawing(data=data, page=partial(page_of_slices, axes, data, objective, notes))


def page_of_slices(axes: list[Axis], data: pd.DataFrame, objective: str, notes: str) -> Figure:
    """One panel per axis: the objective of each proposal, and the partial dependence."""
    n_rows = -(-len(axes) // COLUMNS)
    page = Figure(figsize=(3.2 * min(COLUMNS, len(axes)), 2.6 * n_rows + 0.5), layout="constrained")
    panels = page.subplots(n_rows, min(COLUMNS, len(axes)), squeeze=False, sharey=True)
    for panel, axis in zip(panels.flat, axes, strict=False):
        of_axis = data[data["axis"] == axis.name]
        for kind, rows in of_axis.groupby("kind"):
            mean = rows["mean"].astype(float)
            x = rows["value"].astype(float) if axis.is_range else _indices(axis, rows["value"])
            if kind == "proposal":
                panel.scatter(x, mean, s=16, color=GREY)
            else:
                panel.plot(
                    x, mean, color="black", marker="" if axis.is_range else "_", linestyle="-" if axis.is_range else ""
                )
        if axis.is_log:
            log_scale(panel, "x", of_axis["value"].astype(float))
        if not axis.is_range:
            panel.set_xticks(range(len(axis.values)), [escaped(shortened(str(option))) for option in axis.values])
            panel.set_xlim(-0.5, len(axis.values) - 0.5)
        panel.set_xlabel(axis.name)
    for panel in panels.flat[len(axes) :]:
        panel.set_visible(False)
    for row in panels:
        row[0].set_ylabel(axis_label(objective))
    has_line = (data["kind"] != "proposal").any()
    text = "Lines (dashes for a choice): partial dependence of a Gaussian process; " if has_line else "No line: "
    caption(page, f"Dots: proposals. {text}{notes}")
    return page
