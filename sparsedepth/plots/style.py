"""The look of every figure: colours that work for colour-blind readers and in grey, type for a column's width.

Depth is ordered, so it has an ordered colour scale (viridis, readable by lightness alone). Settings are unordered and
few, so they have marker shapes. PAPER is the style of a single column: one panel below another, nothing but the figure.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from sparsedepth.quantities.quantity import Scale
from sparsedepth.words.captions import decade

Style = tuple[str, str, str]
"""Colour, marker and dashes of a line."""
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
PROPOSAL = "proposal"
"""Kind of every run of a search: none is a baseline."""
SEVERAL = "several fields"
"""Kind of a run that changed more than one field, where there are many such combinations."""
FIXED_MARKERS = {"baseline": "o", SEVERAL: "d", PROPOSAL: "o"}
GREY = "#666666"
MISSING = "#c8c8c8"
SERIES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", "-."), ("#444444", "D", ":"))
"""Colour (Okabe and Ito's, for colour-blind readers), marker and dashes (for grey print) of the lines of a panel."""
BASELINE = ("#222222", "o", "-")
SETTINGS = tuple(
    zip(
        ("#0072b2", "#d55e00", "#009e73", "#b8608f", "#b07800", "#2f8fc4", "#882255", "#85852c", "#332288"),
        "s^DvPX<>p",
        cycle(("--", "-.", ":", "-")),
        strict=False,
    )
)
"""Okabe and Ito's colours, then three of Tol's muted ones, the light ones darkened to a contrast of 3 to white: names
have no order, so their colours have none. Each has a marker of its own, for grey print."""
LINEAR_BELOW = 0.01
"""A relative loss increase can be negative and spans decades: logarithmic above this, linear below."""
FAR = 6
STANDS_OUT = 5
"""A value this many times the median would hide the others on a linear axis; most often the first layer's."""

RC: dict[Any, Any] = {
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "axes.formatter.limits": (-8, 7),  # a power of ten next to the axis would overlap its label
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titley": 1.0,  # not moved: to measure whether a title must be takes as long as to draw the panel
    "figure.dpi": 150,
    "font.size": 9,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparsedepth",  # the same numbers give the same file
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}

COLUMNS = {1: 3.35, 2: 7.0}
"""Columns of a paper -> inches."""
TALLEST = 9.0
"""Inches of a page of a paper."""
PAPER: dict[Any, Any] = RC | {
    "figure.figsize": (COLUMNS[1], TALLEST),
    "legend.fontsize": 9,
    "pdf.fonttype": 42,
    "savefig.dpi": 600,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


def depth_map() -> ListedColormap:
    """Shallow is light, deep is dark, in even steps of grey; without the part of a contrast to white below 3, which is
    lost on paper."""
    shades = matplotlib.colormaps["viridis_r"].resampled(1024)(np.linspace(0.403, 1.0, 1024))
    grey = shades[::-1, :3] @ (0.299, 0.587, 0.114)
    even = np.interp(np.linspace(grey[-1], grey[0], 256), grey, np.arange(1023, -1, -1))
    return ListedColormap(shades[even.round().astype(int)])


def depth_colours(depths: Iterable[int]) -> dict[int, str]:
    """A shade of `depth_map` for each depth."""
    ordered = sorted(set(depths))
    shades = np.linspace(0, 1, len(ordered)) if len(ordered) > 1 else [0.6]
    return dict(zip(ordered, map(to_hex, depth_map()(shades)), strict=True))


def kind_markers(kinds: Iterable[str]) -> dict[str, str]:
    """One shape per kind of run, in the order of a legend: the baseline first, and last those that changed several
    fields, thin, since they are most of a grid."""
    shapes = cycle(MARKERS)
    order = sorted((not kind.startswith("baseline"), kind == SEVERAL, kind.count(","), kind) for kind in set(kinds))
    return {kind: FIXED_MARKERS.get(kind) or next(shapes) for *_, kind in order}


def setting_styles(settings: Sequence[str]) -> dict[str, Style]:
    """Colour, marker and dashes of each setting, the baseline first; further ones than SETTINGS begin again with other
    markers."""
    further = [(colour, marker, "-") for marker in MARKERS for colour, *_ in SETTINGS]
    return dict(zip(settings, (BASELINE, *SETTINGS, *further), strict=False))


def layer_ticks(axis: Any) -> None:
    axis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 4, 5, 10]))


def axis_of_points(axes: Any, points: Iterable[float]) -> None:
    """A logarithmic x axis labelled at values that exist, such as depths: the last, and those that labels leave room
    for."""
    ordered = sorted(set(points), reverse=True)
    texts = {point: f"{point:g}" if point == int(point) else f"{point:.3g}" for point in ordered}
    shown = ordered[:1]
    for point in ordered[1:]:
        length = (len(texts[point]) + len(texts[shown[0]])) / 2  # half of each label lies between the two points
        if math.log(shown[0] / point) >= 0.034 * length * math.log(ordered[0] / ordered[-1]):
            shown.insert(0, point)
    axes.set_xscale("log")
    axes.set_xticks(shown, [texts[point] for point in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def linear_below(values: Iterable[float]) -> float | None:
    """Where a symlog axis of values by layer becomes linear: the decade of the median size, so that typical values are
    visible next to outliers; or of the 0.9 quantile of the negative ones, if that is higher, since increases of that
    size are noise. None if a linear axis shows all values."""
    shown = np.array([value for value in values if value])
    sizes = np.abs(shown)
    if not len(sizes) or sizes.max() <= STANDS_OUT * np.median(sizes):
        return None
    negative = sizes[shown < 0]
    noise = np.quantile(negative, 0.9) if len(negative) else 0.0
    return float(10.0 ** math.floor(math.log10(max(np.median(sizes), noise, sizes.max() / 1e4))))  # 4 decades at most


def without_outliers(values: pd.Series) -> pd.Series:
    """All but a few (2%, or one) that lie FAR times as far from the median as quartiles from each other, which would
    flatten the others."""
    low, middle, high = values.quantile([0.25, 0.5, 0.75])
    near = values[(values - middle).abs() <= FAR * (high - low)]
    return near if near.nunique() > 1 and len(values) - len(near) <= max(1, len(values) // 50) else values


def set_scale(axes: Any, which: Literal["x", "y"], scale: Scale, values: Sequence[float]) -> None:
    """Set the scale of a quantity's axis; `values` are those shown, without NaN."""
    is_wide = scale == "symlog" and max(map(abs, values), default=0.0) > 10 * max(LINEAR_BELOW, min(values))
    if len(values) and (scale == "log" or (is_wide and min(values) > LINEAR_BELOW)):  # more labels than decades
        log_scale(axes, which, values)
    elif is_wide:
        _symlog_scale(axes, which, LINEAR_BELOW)


def set_layer_scale(axes: Any, scale: Scale, values: Sequence[float]) -> None:
    """Set the y scale of a quantity by layer. The first layer can be a thousand times the others, whose differences
    matter: then logarithmic, or symlog if a value is negative or 0."""
    threshold = None if scale == "log" else linear_below(values)
    if threshold is None:
        set_scale(axes, "y", scale, values)
    elif min(values) > 0:
        log_scale(axes, "y", values)
    else:
        _symlog_scale(axes, "y", threshold)


def _symlog_scale(axes: Any, which: Literal["x", "y"], threshold: float) -> None:
    getattr(axes, f"set_{which}scale")("symlog", linthresh=threshold)
    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda value, _: decade(value, threshold)))


def log_scale(axes: Any, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """A logarithmic axis of positive values with few labels: round numbers for a narrow range; 1, 2 and 5 of each
    decade, then 1 and 3, then whole decades for wider ones. No ticks between them: they take longer than the lines."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    shown = list(values)
    span = max(shown) / min(shown)
    steps = (1, 2, 5) if span < 30 else (1, 3) if span < 300 else (1,)
    axis.set_major_locator(MaxNLocator(3) if span < 5 else LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if span < 300 else decade(value)))
