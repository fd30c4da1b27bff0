"""Figures of points, a run or a configuration each; the colour is the depth, the shape the changed field.

`chain`: sparsity -> residual variance -> effectiveness -> validation loss, one panel per link. The title has Spearman's
rho, pooled and within depth, with its interval (`effects.chain`). A line is the least-squares fit of a depth on the
scales of the axes. A degenerate score has neither.

`pareto`: a configuration is on the front of loss, usefulness and cost, or of the objectives of a search, if no other is
at least as good in all and better in one. The line in a panel is the front of its two quantities alone.

`slices`: of a search, its first objective in order of start and along each axis; `parallel`: a line for each proposal.
Deviates: not Optuna's, which are too wide for a page and have no place for a caption."""

from collections.abc import Collection, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sparsedepth.config.space import Interval
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.chain import link
from sparsedepth.effects.importance import finished, options_of, proposals, value_order
from sparsedepth.plots.facets import intervals, range_of
from sparsedepth.plots.page import (
    Drawing,
    NothingToDraw,
    caption,
    depth_legend,
    legend_above,
    mark_id,
    panels,
    paper_width,
)
from sparsedepth.plots.runs import (
    all_runs,
    changed_fields,
    compared_runs,
    of_selection,
    setting_names,
    trained_runs,
    without_diverged_cells,
)
from sparsedepth.plots.style import (
    GREY,
    SERIES,
    depth_colours,
    depth_map,
    kind_markers,
    layer_ticks,
    log_scale,
    set_layer_scale,
    set_scale,
    without_outliers,
)
from sparsedepth.quantities import IN_RUNS, axis_label, sign
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import UsableForm, degeneracy, score_rows, usable_forms
from sparsedepth.store.saved_queries import QUESTIONS
from sparsedepth.store.search import MATCHED, least_seeds, on_front, search_of
from sparsedepth.store.setting import BUDGET
from sparsedepth.store.subject import is_imported
from sparsedepth.words.captions import (
    chain_caption,
    escaped,
    folded,
    front_caption,
    link_title,
    models_note,
    not_shown,
    parallel_caption,
    run_text,
    same_note,
    shortened,
    slices_caption,
)
from sparsedepth.words.degeneracy import degeneracy_caption
from sparsedepth.words.plain_text import counted
from sparsedepth.words.scaling import flops_text
from sparsedepth.words.values import assignment, plain, readable

WALKS = (
    ("weight_sparsity", "residual_variance_last", "usefulness_loss_increase", "val_loss"),
    ("attention_sparsity_rel", "residual_variance_last", "causal_score", "val_loss"),
)
"""Two rows, read from left to right. Usefulness is drawn in its continuous form, since the count has steps of 1/L and
is 0 for many small models."""
LINKS = tuple(link for walk in WALKS for link in pairwise(walk))
(USEFULNESS,) = QUESTIONS["pareto"].scores
"""So that figure and question (`query --ask pareto`) have one front."""
TRADES = (("train_flops", "val_loss"), ("train_flops", USEFULNESS), (USEFULNESS, "val_loss"))
MANY_RUNS, MANY_CELLS = 1000, 40
"""Points of a panel that are pixels in a picture of lines, which would be large and slow; configurations without bars,
and smaller."""


def sound_panels(
    pairs: Sequence[tuple[str, str]], runs: pd.DataFrame, judged: pd.DataFrame
) -> tuple[list[tuple[str, str]], dict[str, UsableForm]]:
    """The pairs with the comparable loss of `runs` in place of val_loss, and a sound form in place of a score that is
    degenerate in those `judged`; and the forms."""
    requested = [with_loss(loss_of(runs), pair) for pair in pairs]
    forms = usable_forms((name for pair in requested for name in pair), judged)
    return [(forms[x].form, forms[y].form) for x, y in requested], forms


def _draw_points(axis: Any, rows: pd.DataFrame, x: str, y: str, **look: Any) -> None:
    """The runs, or configurations, that have both: the colour is the depth, the shape what they changed."""
    colours, markers = depth_colours(rows["n_layers"]), kind_markers(rows["kind"])
    shown = rows.dropna(subset=[x, y])
    for (kind, depth), own in shown.groupby(["kind", "n_layers"])[[x, y]]:  # ty: ignore[not-iterable]
        gid = mark_id(counted(depth, "layer"), str(kind))
        look |= {"marker": markers[str(kind)], "color": colours[depth], "gid": gid}
        axis.scatter(own[x], own[y], edgecolor="white", linewidth=0.3, **look)
    axis.marks = pd.DataFrame(
        {
            "x": shown[x],
            "y": shown[y],
            "group": [counted(depth, "layer") for depth in shown["n_layers"]],
            "kind": shown["kind"],
            "text": [run_text(row, x, y) for row in shown.to_dict("records")],
            "runs": shown["run_id"],
        }
    )


def chain(store: Store) -> Drawing:
    """Raises NothingToDraw without two runs that have both quantities of a link."""
    n_models = int(all_runs(store)["model"].notna().sum())
    return correlations(compared_runs(store), search_of(store.roots) is not None, models_note(n_models))


def correlations(runs: pd.DataFrame, is_search: bool = False, further: str = "") -> Drawing:
    """From the result rows of `runs`. Its points: run_id, n_layers, lr, setting, kind (`changed_fields`), and each
    quantity of the panels (NaN if not measured or not drawable)."""
    finished = runs[runs["outcome"] == "ok"].reset_index(drop=True)
    links, forms = sound_panels(LINKS, runs, finished)
    names = list(dict.fromkeys(usable.form for usable in forms.values()))
    points = finished[["run_id", "n_layers", "lr", "setting"]].assign(kind=changed_fields(finished, is_search))
    for name in names:
        values = pd.to_numeric(finished[name], errors="coerce").astype(float)
        points[name] = values.where(values > 0) if is_log(name) else values
    even = [name for name in names if points[name].nunique() == 1]
    # One point, or a value that is the same everywhere, shows no relation.
    links = [link for link in links if len(points.dropna(subset=[*link])) > 1 and not {*link} & {*even}]
    if not links:
        of_import = "imported runs have only those that their map names: --figure depth draws the loss over n_layers"
        advice = of_import if is_imported(runs) else "measure them"
        raise NothingToDraw(f"no two finished runs have two quantities of the chain from sparsity to loss; {advice}")
    notes = chain_caption(points, names, (runs["outcome"] == "diverged").sum(), degeneracy_caption(forms.values()))
    notes += same_note(even)
    degenerate = {name for name in names if degeneracy(name, score_rows(finished, name)).is_degenerate}
    return Drawing(data=points, page=partial(page_of_runs, points, links, degenerate, notes + further))


def page_of_runs(
    points: pd.DataFrame, links: Sequence[tuple[str, str]], degenerate: Collection[str], notes: str
) -> Figure:
    """Rows of up to three panels; one legend above and one caption below."""
    page, axes = panels(len(links), 3, 3.3, 3.0)
    depth_legend(page, depth_colours(points["n_layers"]), kind_markers(points["kind"]))
    for axis, pair in zip(axes, links, strict=True):
        _draw_link(axis, points, *pair, is_evidence=not {*pair} & {*degenerate})
    caption(page, notes)
    return page


def _draw_link(axis: Any, points: pd.DataFrame, x: str, y: str, is_evidence: bool) -> None:
    """One panel: the points, a line for each depth, and the correlations as its title."""
    shown = points.dropna(subset=[x, y])
    size = 36 if len(shown) < 80 else 22
    is_bitmap = len(shown) > MANY_RUNS
    _draw_points(axis, points, x, y, s=size, rasterized=is_bitmap, alpha=0.9 if is_evidence else 0.3)
    for depth, colour in depth_colours(points["n_layers"]).items() if is_evidence else ():
        runs = shown[shown["n_layers"] == depth]
        if line := regression(runs[x], runs[y], is_log(x), is_log(y)):
            axis.plot(*line, color=colour, linewidth=1.1, alpha=0.75, zorder=1)
    n_beyond = 0
    for name, which in ((x, "x"), (y, "y")):
        scale = IN_RUNS[name].scale
        set_scale(axis, which, "linear" if scale == "symlog" and min(shown[name]) > 0 else scale, shown[name])
        if getattr(axis, f"get_{which}scale")() == "linear" and len(near := without_outliers(shown[name])) < len(shown):
            axis.set(**{f"{which}lim": range_of(near.to_frame("mean"))})
            n_beyond += len(shown) - len(near)
    axis.set(xlabel=axis_label(x), ylabel=axis_label(y))
    if not is_log(x):
        axis.xaxis.set_major_locator(MaxNLocator(4))
    scopes = ("pooled", "within depth")[: shown["n_layers"].nunique()]
    runs = points.assign(unit=points["setting"], outcome="ok")
    found = [link(runs, x, y, scope) for scope in scopes if is_evidence]
    title = link_title(found, len(shown), len(points), n_beyond)
    axis.set_title(title, color=GREY, fontsize=6.5 if paper_width() else 7.5)


def is_log(name: str) -> bool:
    return IN_RUNS[name].scale == "log"


def regression(x: pd.Series, y: pd.Series, log_x: bool, log_y: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """The end points of the least-squares line, fitted on the scale of each axis and cut at the values of y: x [2],
    y [2]. None with fewer than four distinct x, or of a constant y."""
    if x.nunique() < 4 or y.nunique() < 2:
        return None
    x_N, y_N = (np.log(values) if is_log else values for values, is_log in ((x, log_x), (y, log_y)))
    slope, intercept = np.polyfit(x_N, y_N, 1)
    ends_2 = np.array([x_N.min(), x_N.max()])
    if slope:
        ends_2 = np.clip(ends_2, *sorted((end - intercept) / slope for end in (y_N.min(), y_N.max())))
    fitted_2 = slope * ends_2 + intercept
    return (np.exp(ends_2) if log_x else ends_2, np.exp(fitted_2) if log_y else fitted_2)


def pareto(store: Store) -> Drawing:
    """Raises NothingToDraw with fewer than two configurations to compare."""
    search = search_of(store.roots)
    runs = trained_runs(store)
    if search is None:
        return front(of_selection(store, runs.assign(setting=runs["cell_id"].map(setting_names(store, BUDGET)))))
    runs = runs[runs.groupby("cell_id")["cell_id"].transform("size") >= least_seeds(search)]  # else good seeds alone
    return front(of_selection(store, runs), search.objectives)


def front(runs: pd.DataFrame, objectives: Sequence[str] = ()) -> Drawing:
    """From the rows of `runs` (trained ones). Its points: cell_id, n_layers, kind (`changed_fields`), n_seeds, each
    quantity and its 95% interval (NAME_lo and NAME_hi, NaN below three seeds), on_front. `objectives`: those of the
    search that proposed them, of which several are drawn in place of TRADES."""
    complete, n_diverged = without_diverged_cells(runs)
    complete["kind"] = changed_fields(complete, bool(objectives))
    if len(objectives) > 1:
        pairs = [*combinations(objectives[::-1], 2)]  # the last, most often a cost, on the horizontal axis
        forms = usable_forms(objectives, runs, may_replace=False)  # they are what was searched for
    else:
        pairs, forms = sound_panels(TRADES, runs, runs)
    by_cell = complete.groupby("cell_id")
    cells = by_cell[["n_layers", "kind", "setting"]].first().assign(n_seeds=by_cell.size())
    cells["run_id"] = by_cell["run_id"].agg(" ".join)
    drawn = [usable.form for usable in forms.values()]
    for name in drawn:
        found = intervals(complete[["cell_id", "seed"]].assign(value=complete[name]), ["cell_id"]).set_index("cell_id")
        cells[name] = found["mean"]
        cells[[f"{name}_lo", f"{name}_hi"]] = found[["lo", "hi"]].clip(*IN_RUNS[name].range)
    measured = [name for name in drawn if cells[name].notna().any()]
    pairs = [pair for pair in pairs if {*pair} <= {*measured}]
    n_cells = len(cells)
    cells = cells.dropna(subset=measured)
    if len(cells) < 2 or not pairs:
        names = " and ".join(objectives) if len(objectives) > 1 else "a val_loss and a cost"
        raise NothingToDraw(f"fewer than two configurations finished with {names}, so there is no front")
    cells["on_front"] = on_front(cells[measured].to_numpy(float), measured)
    noun = "proposal" if objectives else "configuration"
    notes = not_shown(n_diverged, noun, " with a diverged run")
    notes += not_shown(n_cells - len(cells), noun, " without all of these quantities")
    notes += degeneracy_caption(forms.values())
    data = cells.drop(columns=["setting", "run_id"]).reset_index()
    return Drawing(data=data, page=partial(page_of_front, cells, pairs, noun, notes))


def page_of_front(cells: pd.DataFrame, pairs: Sequence[tuple[str, str]], noun: str, notes: str) -> Figure:
    """One panel per pair of loss, usefulness and cost; a line along its front, rings on the joint front."""
    names = [*dict.fromkeys(name for pair in pairs for name in pair)]
    even = [name for name in names if np.ptp(cells[name]) <= cells[name].max() * MATCHED * (name == "train_flops")]
    if varied := [pair for pair in pairs if not {*pair} & {*even}]:
        pairs, notes = varied, notes + same_note(even)
    page, axes = panels(len(pairs), 3, 3.4, 3.3)
    depth_legend(page, depth_colours(cells["n_layers"]), kind_markers(cells["kind"]))
    for axis, pair in zip(axes, pairs, strict=True):
        _draw_front(axis, cells, *pair)
    has_bars = len(cells) <= MANY_CELLS and bool((cells["n_seeds"] > 2).any())
    caption(page, front_caption(cells, noun, names, has_bars) + notes)
    return page


def _draw_front(axis: Any, cells: pd.DataFrame, x: str, y: str) -> None:
    """A panel of two quantities: configurations with intervals, the front of the two, rings on the joint one."""
    best = cells[on_front(cells[[x, y]].to_numpy(float), [x, y])].sort_values(x)
    axis.step(best[x], best[y], where="pre" if sign(x) > 0 else "post", color=GREY, linewidth=1.0, zorder=1)
    if len(cells) <= MANY_CELLS:
        look = {"color": "#bbbbbb", "linewidth": 0.8, "zorder": 1}
        axis.hlines(cells[y], cells[f"{x}_lo"], cells[f"{x}_hi"], **look)
        axis.vlines(cells[x], cells[f"{y}_lo"], cells[f"{y}_hi"], **look)
    size = 22 if len(cells) > MANY_CELLS else 34
    _draw_points(axis, cells, x, y, s=size, zorder=3, alpha=0.75)
    front = cells[cells["on_front"]]
    axis.scatter(front[x], front[y], s=3.5 * size, zorder=4, facecolors="none", edgecolors="black", linewidth=1.1)
    axis.set(xlabel=axis_label(x), ylabel=axis_label(y))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    for which, name in (("x", x), ("y", y)):
        low = cells[name].min()
        high = cells[name].max()
        if low > 0 and (IN_RUNS[name].is_ratio or (name == "train_flops" and high > 5 * low)):
            log_scale(axis, which, cells[name])
    if x == "train_flops":  # few distinct labels (1e9, 2e9, 5e9); costs that are nearly equal in the middle
        if cells[x].max() < 1.01 * cells[x].min():
            axis.set_xlim(0.9 * cells[x].min(), 1.1 * cells[x].max())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda flops, _: flops_text(flops, digits=3)))


def slices(store: Store) -> Drawing:
    """The first objective of a search in order of start, with the best so far, and against each axis."""
    search, frame, notes = _searched(store)
    data = frame[["cell_id", *options_of(frame, search), *search.objectives, "proposal", "best_so_far"]]
    return Drawing(data=data, page=partial(page_of_slices, search, frame, notes))


def parallel(store: Store) -> Drawing:
    """Every proposal of a search as a line over its axes and its objectives."""
    search, frame, notes = _searched(store)
    data = frame[["cell_id", *options_of(frame, search), *search.objectives, "on_front"]]
    return Drawing(data=data, page=partial(page_of_parallel, search, frame, notes))


def _searched(store: Store) -> tuple[SweepDefinition, pd.DataFrame, str]:
    """The search of a folder, its finished proposals, and a note on degenerate objectives. Raises NothingToDraw for a
    folder without a search, or with fewer than two finished proposals."""
    search = search_of(store.roots)
    if search is None:
        raise NothingToDraw(f"no sampler of one search filled {', '.join(map(str, store.roots))}")
    runs = of_selection(store, trained_runs(store))
    frame = numbered(proposals(runs, search), search.objectives[0])
    if len(frame) < 2:
        raise NothingToDraw("fewer than two proposals finished")
    return search, frame, degeneracy_caption(usable_forms(search.objectives, runs, may_replace=False).values())


def numbered(frame: pd.DataFrame, objective: str) -> pd.DataFrame:
    """The proposals with a value of the objective, their number in order of start, and the best value so far."""
    rows = finished(frame, objective)
    best = rows[objective].cummax() if sign(objective) > 0 else rows[objective].cummin()
    return rows.assign(proposal=np.arange(len(rows)), best_so_far=best)


def page_of_slices(search: SweepDefinition, frame: pd.DataFrame, notes: str) -> Figure:
    """A panel of all proposals in order, then one per axis; a proposal without its field has no point."""
    objective = search.objectives[0]
    options = options_of(frame, search)
    page, (first, *others) = panels(1 + len(options), 4, 2.5, 2.4)
    _draw_slice(first, objective, frame, frame["proposal"], len(frame))
    first.step(frame["proposal"], frame["best_so_far"], where="post", color=SERIES[1][0], label="best so far")
    first.set_xlabel("proposal, in order of start")
    layer_ticks(first.xaxis)
    for axis, (name, values) in zip(others, options.items(), strict=True):
        known = frame[frame[name].notna()]
        choices = [value for value in values if value is not None]
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
    caption(page, slices_caption(len(frame)) + notes)
    return page


def page_of_parallel(search: SweepDefinition, frame: pd.DataFrame, notes: str) -> Figure:
    """An axis for each varied field and each objective, its values in order and in even steps."""
    names = [*options_of(frame, search), *search.objectives]
    width = paper_width() or 1.3 * len(names)
    letters = int(12 * width / len(names))  # of a line below an axis
    turned = 90 * (letters < 10)
    page, (axis,) = panels(1, 1, width, 5.4 if turned else 3.6)
    axis.grid(False)
    places = {i: _heights(axis, i, frame[name], turned) for i, name in enumerate(names)}
    heights = pd.DataFrame(places, index=frame.index)
    text = [", ".join(assignment(name, row[name]) for name in names) for row in frame.to_dict("records")]
    group = [f"proposal {n}" for n in frame["proposal"]]
    shades = depth_map()(1 - (-sign(search.objectives[0]) * frame[search.objectives[0]]).rank(pct=True))
    for line, name, colour, is_best in zip(heights.to_numpy(), group, shades, frame["on_front"], strict=True):
        axis.plot(line, color=colour, linewidth=2.2 if is_best else 0.9, gid=mark_id(name))
    lines = heights.assign(group=group, text=text, runs=frame["run_id"])
    axis.marks = lines.melt(["group", "text", "runs"], var_name="x", value_name="y")
    room = 0.42 if turned else 0.12  # for the values at the ends
    axis.set(xlim=(-0.3, len(names) - 0.7), ylim=(-room, 1 + room), yticks=[])
    labels = [name if turned else folded(name.replace("_", " "), min(letters, 14)) for name in names]
    axis.set_xticks(range(len(names)), labels, rotation=turned)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    caption(page, parallel_caption(len(frame), search.objectives[0]) + notes)
    return page


def _heights(axis: Any, x: int, column: pd.Series, turned: int) -> list[float]:
    """Of values on their axis at x, in order and in even steps from 0 to 1; writes the first and the last beside it."""
    values = [plain(value) for value in column.tolist()]
    order = sorted({*values}, key=value_order)
    for height, value, side in ((-0.03, order[0], "top"), (1.03, order[-1], "bottom")):
        name = escaped(shortened(readable(value)))
        axis.text(x, height, name, ha="center", va=side, fontsize=8, color=GREY, rotation=turned)
    return [order.index(value) / max(len(order) - 1, 1) for value in values]


def _draw_slice(axis: Any, objective: str, rows: pd.DataFrame, x: pd.Series, n_proposals: int) -> None:
    axis.scatter(
        x,
        rows[objective],
        s=30,
        c=rows["proposal"],
        cmap=depth_map(),
        vmin=0,
        vmax=n_proposals - 1,
        edgecolor="white",
        linewidth=0.3,
        gid=mark_id("proposals"),
    )
    texts = [f"proposal {row['proposal']}: {objective} {row[objective]:.4g}" for row in rows.to_dict("records")]
    axis.marks = pd.DataFrame(
        {"x": x, "y": rows[objective], "group": "proposals", "text": texts, "runs": rows["run_id"]}
    )
    axis.set_ylabel(axis_label(objective))
    if IN_RUNS[objective].is_ratio:  # linear near 0 where one is 0
        set_layer_scale(axis, "log" if (rows[objective] > 0).all() else "linear", rows[objective].tolist())
