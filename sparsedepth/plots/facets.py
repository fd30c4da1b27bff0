"""Lines by setting: the one function behind the figures of loss, depth, layers, learning rate, difficulty.

`intervals` gives the mean over seeds and Student's 95% interval (from three seeds on), of the logarithm where values
differ by orders of magnitude. `draw_facets` draws a panel for each depth or metric and a line for each setting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.style import (
    GREY,
    Style,
    depth_axis,
    groups,
    layer_ticks,
    log_scale,
    panels,
    set_layer_scale,
    settings_legend,
    side_by_side,
)
from sparsedepth.quantities.record import Scale
from sparsedepth.store.small_sample import MIN_VALUES, t_critical

MOST_MARKERS = 25
"""Per line; with more points, every second or third has a marker, and so on."""
MOST_BANDS = 4
"""Lines of a panel whose intervals are bands; of more, bars at the marked points."""
FEW_POINTS = 8
"""A line of fewer points has bars."""
ROOM = 0.05
"""Share of an axis beyond the values that it shows."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    key: Any
    """Value of the column `panel`."""
    x_label: str
    y_label: str
    title: str = ""
    x: Literal["depth", "whole", "tokens", "log", "share"] = "whole"
    """The kind of the horizontal axis."""
    scale: Scale = "linear"
    range: tuple[float, float] | None = None
    """Of the vertical axis; by default that of all values and intervals."""
    decorate: Callable[[Any], None] | None = None
    """Draws into the axes what is no line of a setting; it changes no range."""


def intervals(rows: pd.DataFrame, by: Sequence[str], is_log: bool = False) -> pd.DataFrame:
    """`by`, mean, lo, hi (NaN below three seeds) and n_seeds of column `value` in each group, in order of appearance;
    the runs of one seed are one value, a run without a seed is its own."""
    if rows.empty:
        return pd.DataFrame(columns=[*by, "mean", "lo", "hi", "n_seeds"])
    seeds = rows["seed"].astype(float)
    own = pd.Series(-1.0 - np.arange(len(rows)), rows.index)
    values = rows["value"].astype(float)
    frame = rows[[*by]].assign(value=np.log(values) if is_log else values, seed=seeds.fillna(own))
    per_seed = frame.dropna(subset="value").groupby([*by, "seed"], sort=False, observed=True)["value"].mean()
    found = per_seed.groupby(level=[*by], sort=False, observed=True).agg(mean="mean", sd="std", n_seeds="count")
    found = found.reset_index()
    n = found["n_seeds"]
    half = n.map(lambda n: t_critical(n - 1) if n >= MIN_VALUES else np.nan) * found.pop("sd") / np.sqrt(n)
    found = found.assign(lo=found["mean"] - half, hi=found["mean"] + half)
    ends = ["mean", "lo", "hi"]
    found[ends] = np.exp(found[ends]) if is_log else found[ends]
    return found[[*by, *ends, "n_seeds"]]


def seeds_text(points: pd.DataFrame) -> str:
    """'3 to 16 seeds', '1 seed': how many the points are means over."""
    few, most = points["n_seeds"].min(), points["n_seeds"].max()
    return counted(most, "seed") if few == most else f"{few} to {most} seeds"


def draw_facets(
    rows: pd.DataFrame,
    kinds: Sequence[Panel],
    styles: Mapping[str, Style],
    *,
    labels: Mapping[str, str] | None = None,
    columns: int = 3,
    size: tuple[float, float] = (3.3, 2.8),
    extra: Sequence[Line2D] = (),
) -> tuple[Figure, list[Any]]:
    """The page, with a legend of the settings above it, and the axes of each panel. `rows`: panel, setting, x, mean,
    lo, hi. `labels`: what the legend says in place of a setting's name."""
    page, axes = panels(len(kinds), columns, *size)
    for axis, kind in zip(axes, kinds, strict=True):
        draw_panel(axis, kind, rows[rows["panel"] == kind.key], styles)
    names = {(labels or {}).get(setting, setting): style for setting, style in styles.items()}
    if len(names) + len(extra) > 1:
        settings_legend(page, names, 1 + columns, extra)
    return page, axes


def draw_panel(axis: Any, kind: Panel, rows: pd.DataFrame, styles: Mapping[str, Style]) -> None:
    """The lines of one panel, then its scales, its range and its labels."""
    settings = [name for name in styles if (rows["setting"] == name).any()]
    points = sorted(set(rows["x"]))
    has_bars = len(points) <= FEW_POINTS or len(settings) > MOST_BANDS
    shift = dict.fromkeys(settings, 0.0)
    if kind.x in ("depth", "log") and len(points) > 1:
        shift = side_by_side(settings, points)
    elif has_bars and len(settings) > 1 and kind.x == "whole" and len(points) > 1:
        step = (points[-1] - points[0]) / (len(points) - 1)
        shift = {name: 0.5 * step * (i / (len(settings) - 1) - 0.5) for i, name in enumerate(settings)}
    for (setting,), line in groups(rows, "setting"):
        x = line["x"] * shift[setting] if kind.x in ("depth", "log") and shift[setting] else line["x"] + shift[setting]
        _draw_line(axis, x, line, styles[setting], has_bars, 5 - 0.1 * settings.index(setting))
    ends = [*rows["mean"].dropna(), *rows["lo"].dropna(), *rows["hi"].dropna()]
    set_layer_scale(axis, kind.scale, [end for end in ends if end > 0] if kind.scale == "log" else ends)
    low, high = kind.range or axis.get_ylim()
    if kind.decorate:
        kind.decorate(axis)
    axis.set_ylim(low, high)
    _label(axis, kind, points)


def _draw_line(axis: Any, x: pd.Series, line: pd.DataFrame, style: Style, has_bars: bool, order: float) -> None:
    colour, marker, dashes = style
    step = -(-len(line) // MOST_MARKERS)
    look: Any = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 3.5, "markeredgewidth": 0}
    axis.plot(x, line["mean"], markevery=step, linewidth=1.3, zorder=order, **look)
    if has_bars:
        axis.vlines(x[::step], line["lo"][::step], line["hi"][::step], color=colour, linewidth=0.9, zorder=order - 1)
    else:
        axis.fill_between(x, line["lo"], line["hi"], color=colour, alpha=0.15, linewidth=0)


def _label(axis: Any, kind: Panel, points: Sequence[float]) -> None:
    axis.set(xlabel=kind.x_label, ylabel=kind.y_label)
    axis.set_title(kind.title)
    axis.xaxis.label.set_color(GREY)
    if kind.x == "depth":
        depth_axis(axis, map(int, points))
    elif kind.x == "log":
        log_scale(axis, "x", points)
    elif kind.x == "tokens":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    elif kind.x == "whole":
        layer_ticks(axis.xaxis)
    else:
        axis.set_xlim(0, 1.02)


def range_of(rows: pd.DataFrame) -> tuple[float, float] | None:
    """A range that the means and intervals of these rows fill; None without any."""
    ends = rows[["mean", "lo", "hi"]].to_numpy(float)
    if not np.isfinite(ends).any():
        return None
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    room = ROOM * (high - low) or abs(high) * ROOM or 1.0
    return low - room, high + room
