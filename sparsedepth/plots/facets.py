"""Lines by setting: the one function behind the figures of loss, depth, layers, budget, learning rate.

`intervals` gives the mean over seeds and Student's 95% interval (from three seeds on), of the logarithm where values
differ by orders of magnitude. `draw_facets` draws a panel for each depth or metric and a line for each setting;
`lines_drawing` is the whole figure: a table of points, its panels, and what the caption says."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter

from sparsedepth.plots.matrices import norm_of
from sparsedepth.plots.page import (
    Drawing,
    NothingToDraw,
    caption,
    colour_bar,
    mark_id,
    panels,
    paper_width,
    settings_legend,
)
from sparsedepth.plots.runs import settings_in_order
from sparsedepth.plots.style import (
    GREY,
    MISSING,
    Style,
    axis_of_points,
    layer_ticks,
    linear_below,
    log_scale,
    set_layer_scale,
    setting_styles,
)
from sparsedepth.quantities import axis_label, quantity
from sparsedepth.quantities.quantity import Named, Scale
from sparsedepth.store.small_sample import MIN_VALUES, t_critical
from sparsedepth.words.captions import escaped, folded, means_text, parts_note, point_text
from sparsedepth.words.scaling import flops_text

FLOPS_LABEL = axis_label("train_flops")
MOST_LINES, MOST_BANDS = 4, 2
"""Lines of settings that may cross in a panel over depths or rates, and with their bands in one over tokens; of more
each has a panel, with the first one and the others in the background."""
MOST_BARS = 8
"""Points of a line whose intervals are bars."""
LOW_LABEL = 22
"""Characters of a line of a vertical axis's label in the low panels of settings apart: longer ones reach the legend."""
MOST_LAYERS = 16
"""Above, lines by layer of which more than two cross are a heat map."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    key: Any
    """Value of the column `panel`."""
    x_label: str
    y_label: str
    title: str = ""
    x: Literal["depth", "whole", "tokens", "log", "flops", "share"] = "whole"
    """The kind of the horizontal axis."""
    scale: Scale = "linear"
    form: Literal["lines", "apart", "map"] = "lines"
    """apart: one setting beside the first, the others pale; map: a heat map, a row for each."""
    range: tuple[float, float] | None = None
    """Of the vertical axis; by default that of all values and intervals."""
    decorate: Callable[[Any, pd.DataFrame], None] | None = None
    """Draws into the axes what is no line of a setting, of the rows where they are drawn; it changes no range."""
    note: str = ""
    """What the caption says where it is drawn."""


def panel_of(name: str, key: Any = None, **options: Any) -> Panel:
    """The panel of a quantity of `runs` or by layer: its label and its scale."""
    of = quantity(name)
    known: Named = {"key": key or name, "y_label": of.axis_label, "scale": of.scale}
    return Panel(**known | options)


def intervals(rows: pd.DataFrame, by: Sequence[str], is_log: bool = False) -> pd.DataFrame:
    """`by`, mean, lo, hi (NaN below three seeds), n_seeds and the seeds' values of column `value` in each group, in
    order of appearance; the runs of one seed are one value, a run without a seed is its own."""
    rows = rows[[*by, "seed", "value"]].astype({"seed": float, "value": float}).dropna(subset="value")
    rows["seed"] = rows["seed"].fillna(pd.Series(-1.0 - np.arange(len(rows)), rows.index))
    rows["value"] = np.log(rows["value"]) if is_log else rows["value"]
    of_seed = rows.groupby([*by, "seed"], sort=False, observed=True)["value"].mean()
    found = of_seed.groupby(level=[*by], sort=False, observed=True).agg(
        mean="mean", sd="std", n_seeds="count", seeds=list
    )
    found = found.reset_index()
    t = found["n_seeds"].map(lambda n: t_critical(n - 1) if n >= MIN_VALUES else np.nan)
    half = t * found["sd"] / np.sqrt(found["n_seeds"])
    found = found.assign(lo=found["mean"] - half, hi=found["mean"] + half)
    ends = ["mean", "lo", "hi"]
    if is_log:
        found[ends], found["seeds"] = np.exp(found[ends]), found["seeds"].map(lambda logs: [*np.exp(logs)])
    return found[[*by, *ends, "n_seeds", "seeds"]]


def metric_intervals(
    rows: pd.DataFrame, by: Sequence[str], quantities: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """`intervals` by `metric` and `by`, geometric where the metric (or its quantity) is drawn on a logarithmic axis
    and positive, cut to the range of the quantity."""
    parts = []
    for name, part in rows.groupby("metric", sort=False):
        of = quantity((quantities or {}).get(str(name), str(name)))
        found = intervals(part, ["metric", *by], of.scale == "log" and bool((part["value"].dropna() > 0).all()))
        parts.append(found.assign(lo=found["lo"].clip(*of.range), hi=found["hi"].clip(*of.range)))
    return pd.concat(parts or [pd.DataFrame()], ignore_index=True)


def lines_drawing(points: pd.DataFrame, kinds: Sequence[Panel], notes: str = "", **options: Any) -> Drawing:
    if (points.groupby("panel")["x"].nunique() > MOST_BARS).any():  # their seeds would hide the lines
        points = points.drop(columns="seeds", errors="ignore")

    def of_panels(names: Collection[str]) -> Drawing:
        chosen = [kind for kind in kinds if str(kind.key) in names]
        if len(chosen) < len({*names}):
            keys = ", ".join(str(kind.key) for kind in kinds)
            raise NothingToDraw(f"panels {', '.join(names)} are not all among those of this figure: {keys}")
        return lines_drawing(points[points["panel"].astype(str).isin(names)], chosen, notes, **options)

    return Drawing(data=points, page=partial(draw_facets, points, kinds, notes, **options), of_panels=of_panels)


def draw_facets(
    rows: pd.DataFrame,
    kinds: Sequence[Panel],
    notes: str = "",
    styles: Mapping[str, Style] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    columns: int = 3,
    size: tuple[float, float] = (3.3, 2.8),
    extra: Sequence[Line2D] = (),
) -> Figure:
    """A panel for each of `kinds`, a legend of the settings above, over how many seeds and notes below. `rows`: panel,
    setting, x, mean, lo, hi, n_seeds. `labels`: what the legend says in place of a setting's name."""
    named = {name: (labels or {}).get(name, name) for name in styles or settings_in_order(rows["setting"])}
    looks = styles or setting_styles([*named])
    by_panel = {kind.key: rows[rows["panel"] == kind.key] for kind in kinds}
    varied = [kind for kind in kinds if by_panel[kind.key][["mean", "lo", "hi"]].stack().nunique() > 1] or kinds
    parts = _parts_of(varied, by_panel, {} if styles else named)
    forms = {str(kind.form) for kind, _ in parts}
    columns, size = (4, (2.7, 2.3)) if "apart" in forms else (columns, size)
    page, axes = panels(len(parts), columns, *size)
    for axis, (kind, own) in zip(axes, parts, strict=True):
        draw = partial(_draw_map, named=named) if kind.form == "map" else partial(draw_panel, styles=looks)
        forms |= draw(axis, kind, by_panel[kind.key], own=own)
    names = {named[setting]: style for setting, style in looks.items()}
    has_names = len(names) + len(extra) > 1 or "=" in "".join(names)  # a lone line that is not the baseline has one
    if has_names and "lines" in forms:
        settings_legend(page, names, 1 + columns, extra)
    said = parts_note(forms, next(iter(names)), kinds, varied)
    caption(page, *f"{means_text(rows)}{notes}{said}".splitlines())
    return page


def _parts_of(
    kinds: Sequence[Panel], by_panel: Mapping[Any, pd.DataFrame], named: Mapping[str, str]
) -> list[tuple[Panel, Sequence[str]]]:
    """The panels of all kinds; where settings stand apart, with the labels that low ones have room for."""
    parts = [part for kind in kinds for part in _parts(kind, by_panel[kind.key], named)]
    if all(kind.form != "apart" for kind, _ in parts):
        return parts
    return [(replace(kind, y_label=folded(kind.y_label, LOW_LABEL)), own) for kind, own in parts]


def _parts(kind: Panel, rows: pd.DataFrame, named: Mapping[str, str]) -> Iterator[tuple[Panel, Sequence[str]]]:
    """The panels of a kind, each with its own settings (none: all), of those `named` that need not be together."""
    first, *others = [name for name in named if (rows["setting"] == name).any()] or [""]
    has_bands = kind.x == "tokens" and rows["x"].nunique() > MOST_BARS
    most = MOST_LINES if kind.x in ("depth", "log") else MOST_BANDS if has_bands else math.inf
    means = rows.pivot(index="x", columns="setting", values="mean").interpolate("index", limit_area="inside")
    n_crossing = (means.dropna().rank(axis=1).nunique() > 1).sum()
    if kind.x == "whole" and n_crossing > MOST_BANDS and rows["x"].max() > MOST_LAYERS:
        yield replace(kind, form="map"), (first, *others)
        return
    if n_crossing <= most or 0 < paper_width() < 5:  # in a column of a paper they would fill pages
        yield kind, ()
        return
    for name in others:
        title = ", ".join(filter(None, (kind.title, named[name])))
        yield replace(kind, title=folded(escaped(title), 26), form="apart"), (first, name)


def _draw_map(axis: Any, kind: Panel, rows: pd.DataFrame, named: Mapping[str, str], own: Sequence[str]) -> set[str]:
    """Means, a row for each setting, by its name, a column for each layer."""
    from seaborn import heatmap  # its import takes half a second: only heat maps wait for it

    means = rows.pivot(index="setting", columns="x", values="mean").loc[[*own]]
    is_wide = kind.scale == "linear" and linear_below(rows["mean"].dropna()) is not None
    norm = norm_of(means.to_numpy(), "log" if is_wide else kind.scale)
    width = 15 if paper_width() else 26  # or in a column the names take half of it, also from panels of lines
    names = [folded(escaped(named[name]).replace(" lr ", " lr\u00a0"), width) for name in own]
    look: Named = {"norm": norm, "cmap": "viridis_r", "rasterized": True}
    heatmap(means, ax=axis, cbar=False, xticklabels=4, yticklabels=names, **look)
    axis.tick_params("y", labelsize=7, labelrotation=0)
    axis.set(xlabel=kind.x_label, ylabel="", title=kind.title)
    axis.xaxis.label.set_color(GREY)
    colour_bar(axis, axis.collections[0], kind.y_label)
    x, y = (rows[name].map([*values].index) + 0.5 for name, values in (("x", means.columns), ("setting", own)))
    axis.marks = _marks(kind, rows, x, y)
    return set()


def _marks(kind: Panel, rows: pd.DataFrame, x: pd.Series, y: pd.Series) -> pd.DataFrame:
    text = [point_text(kind, row) for row in rows.to_dict("records")]
    return pd.DataFrame({"x": x, "y": y, "group": rows["setting"], "text": text})


def draw_panel(
    axis: Any, kind: Panel, rows: pd.DataFrame, styles: Mapping[str, Style], own: Sequence[str] = ()
) -> set[str]:
    """The lines of one panel, those that are not its `own` in the background; then its scales, its range and its
    labels. Returns what the caption tells."""
    present = {*rows["setting"]}
    settings = [name for name in styles if name in present]
    own = own or settings
    # Else intervals are bands, which would fill a panel where they reach 0.
    has_bars = rows["x"].nunique() <= MOST_BARS or len(own) > MOST_LINES or (rows["lo"] <= 0).any()
    shown = rows.assign(x=side_by_side(rows, kind.x, settings)) if has_bars or kind.x != "whole" else rows
    by_name = dict([*shown.groupby("setting")])
    for i, name in enumerate(settings):
        if name in own:
            _draw_line(axis, by_name[name], styles[name], has_bars, 5 - 0.1 * i)
    is_own = rows["setting"].isin(own)
    if not is_own.all():
        others = shown[~is_own].sort_values("setting", kind="stable")
        starts = np.flatnonzero(others["setting"].ne(others["setting"].shift()))[1:]
        lines = np.insert(others[["x", "mean"]].to_numpy(float), starts, np.nan, axis=0)
        axis.plot(*lines.T, color=MISSING, linewidth=0.8, zorder=1)
        axis.update_datalim([*others[["x", "lo"]].to_numpy(float), *others[["x", "hi"]].to_numpy(float)])  # one range
    axis.marks = _marks(kind, rows[is_own], shown.loc[is_own, "x"], rows.loc[is_own, "mean"])
    is_cut = _set_range(axis, kind, rows)
    if kind.decorate:
        kind.decorate(axis, shown[is_own])
    _label(axis, kind, sorted(set(rows["x"])))
    return {
        "cut" if is_cut else "",
        "beside" if (shown["x"] != rows["x"]).any() else "",
        "seeds" if "seeds" in rows and rows["n_seeds"].max() > 1 else "",
    }


def _set_range(axis: Any, kind: Panel, rows: pd.DataFrame) -> bool:
    """The scale and the range of the vertical axis. Whether it cuts intervals: by layer those of few seeds, down to 0,
    would fill an axis of several decades, so that has the range of the means."""
    is_by_layer = kind.x in ("whole", "share") and kind.scale != "log"
    ends = rows[["mean", "lo", "hi"][: 1 if is_by_layer else 3]].stack().dropna()
    set_layer_scale(axis, kind.scale, ends[(ends > 0) | (kind.scale != "log")].tolist())
    if is_by_layer and axis.get_yscale() != "linear":
        axis.dataLim.intervaly = ends.min(), ends.max()
        axis.autoscale_view()
    axis.set_ylim(kind.range)
    return is_by_layer and rows["lo"].min() < axis.get_ylim()[0]


def side_by_side(rows: pd.DataFrame, kind: str, settings: Sequence[str]) -> pd.Series:
    """The horizontal place of each row, next to those of other settings at the same depth, layer or lr, which it would
    hide."""
    points = sorted(set(rows["x"]))
    if len(settings) < 2 or len(points) < 2 or kind not in ("depth", "log", "whole"):
        return rows["x"]
    place = rows["setting"].map({name: i / (len(settings) - 1) - 0.5 for i, name in enumerate(settings)})
    if kind == "whole":
        return rows["x"] + 0.3 * (points[-1] - points[0]) / (len(points) - 1) * place
    return rows["x"] * (points[-1] / points[0]) ** (0.05 * place)  # the first and the last: 5% of the axis apart


def _draw_line(axis: Any, line: pd.DataFrame, style: Style, has_bars: bool, order: float) -> None:
    colour, marker, dashes = style
    x, mean, low, high = (line[name].to_numpy(float) for name in ("x", "mean", "lo", "hi"))
    shown = slice((len(line) - 1) % (step := -(-len(line) // 25)), None, step)  # 25 markers at most, with the last
    axis.plot(
        x,
        mean,
        color=colour,
        marker=marker,
        linestyle=dashes,
        linewidth=1.3,
        markersize=3.5,
        markeredgewidth=0,
        markevery=shown,
        zorder=order,
        gid=(gid := mark_id(line["setting"].iloc[0])),
    )
    if "seeds" in line:
        x_of_seeds = np.repeat(x, line["seeds"].map(len))
        axis.scatter(x_of_seeds, np.concatenate([*line["seeds"]]), 4, colour, alpha=0.4, linewidth=0, zorder=1, gid=gid)
    has_interval = np.isfinite(low).any()
    if has_interval and has_bars:
        look: Named = {"color": colour, "linewidth": 0.9, "alpha": 1.0 if len(line) <= MOST_BARS else 0.5}
        axis.vlines(x[shown], low[shown], high[shown], zorder=order - 1, gid=gid, **look)
    elif has_interval:
        axis.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0, gid=gid)


def _label(axis: Any, kind: Panel, points: Sequence[float]) -> None:
    """Names and ticks of a panel's axes, by the kind of the horizontal one."""
    axis.set(xlabel=kind.x_label, ylabel=kind.y_label)
    axis.set_title(kind.title)
    axis.xaxis.label.set_color(GREY)
    if kind.x in ("depth", "log"):
        axis_of_points(axis, points)
    elif kind.x == "flops":
        log_scale(axis, "x", points)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda flops, _: flops_text(flops)))
    elif kind.x == "tokens":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    elif kind.x == "whole":
        layer_ticks(axis.xaxis)
    else:
        axis.set_xlim(0, 1.02)


def range_of(rows: pd.DataFrame) -> tuple[float, float] | None:
    """A range that the means and intervals of these rows fill; None without any."""
    ends = rows.filter(["mean", "lo", "hi", "with_drift"]).to_numpy(float)
    if np.isnan(ends).all():
        return None
    low = float(np.nanmin(ends))
    high = float(np.nanmax(ends))
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room
