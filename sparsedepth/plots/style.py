"""The look of every figure: colours that work for colour-blind readers and in grey, type for a column's width.

Depth is ordered, so it has an ordered colour scale (viridis, readable by lightness alone). Settings are unordered and
few, so they have marker shapes. PAPER is the style of a single column: one panel below another, nothing but the figure.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sparsedepth.config.plain_text import counted
from sparsedepth.quantities.record import Scale

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
DEGENERATE = "†"
"""After a degenerate score, as in the report."""
SERIES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", "-."), ("#444444", "D", ":"))
"""Colour (Okabe and Ito's, for colour-blind readers), marker and dashes (for grey print) of the lines of a panel."""
BASELINE = ("#222222", "o", "-")
SETTINGS = tuple(
    zip(
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933", "#332288"),
        "s^DvPX<>p",
        cycle(("--", "-.", ":", "-")),
        strict=False,
    )
)
"""Okabe and Ito's colours, then three of Tol's muted ones: names have no order, so their colours have none. Each has a
marker of its own, for grey print."""
LINEAR_BELOW = 0.01
"""A relative loss increase can be negative and spans decades: logarithmic above this, linear below."""
STANDS_OUT = 5
"""A value this many times the median would hide the others on a linear axis; most often the first layer's."""
DECADES = 4
"""Most decades of a symlog axis above its linear part."""
NARROW, WIDEST = 358, 640
"""CSS pixels of a figure in a window of 390: visible at once, and the largest width there (`report/page.css`)."""
CHANGES_VARIANCE = ", which also changes residual variance"
"""Caution about a tuned lr, wherever a figure compares the variances of settings."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LEGEND_ROOM = 0.6
"""Inches for a legend above the panels, in the height of every page."""
LABEL_ROOM = 0.07
"""Share of a panel's width that the label of a depth needs."""
LONGEST = 30
"""Characters of a setting's name next to an axis."""

RC: dict[Any, Any] = {
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "axes.formatter.limits": (-8, 7),  # a power of ten next to the axis would overlap its label
    "axes.grid": True,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "figure.dpi": 150,
    "font.family": "sans-serif",
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

COLUMN = 3.35
"""Inches of a column of a paper."""
PAPER: dict[Any, Any] = RC | {
    "figure.figsize": (COLUMN, 2.5),
    "font.size": 9,
    "legend.fontsize": 9,
    "pdf.fonttype": 42,
    "savefig.dpi": 600,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


def is_paper() -> bool:
    """Whether the page is built in style PAPER, whose default width is a column's."""
    return float(matplotlib.rcParams["figure.figsize"][0]) == COLUMN


def panels(
    n: int, most_columns: int, width: float, height: float, least: float = 5.2, **options: Any
) -> tuple[Figure, list[Any]]:
    """A page of n panels of this size (inches) in as few rows as fit, or one below another in a column of a paper; and
    its axes, row by row."""
    most_columns = 1 if is_paper() else most_columns
    n_rows = -(-n // most_columns)
    n_columns = -(-n // n_rows)
    size = COLUMN if is_paper() else max(least, width * n_columns + 0.4)
    page = Figure(figsize=(size, height * n_rows + (0.3 if is_paper() else 0.8)), layout="constrained")
    axes = list(page.subplots(n_rows, n_columns, squeeze=False, **options).ravel())
    for axis in axes[n:]:
        axis.remove()
    return page, axes[:n]


def depth_map() -> ListedColormap:
    """Shallow is light, deep is dark; without the palest yellow, which is lost on paper."""
    return ListedColormap(matplotlib.colormaps["viridis_r"](np.linspace(0.12, 0.95, 256)))


def depth_colours(depths: Iterable[int]) -> dict[int, str]:
    """A shade of `depth_map` for each depth."""
    ordered = sorted(set(depths))
    shades = np.linspace(0, 1, len(ordered)) if len(ordered) > 1 else [0.6]
    return dict(zip(ordered, map(to_hex, depth_map()(shades)), strict=True))


def kind_markers(kinds: Iterable[str]) -> dict[str, str]:
    """One shape per kind of run, in the order of a legend: the baseline first, and last those that changed several
    fields, thin, since they are most of a grid."""
    shapes = cycle(MARKERS)
    ordered = sorted(
        set(kinds), key=lambda kind: (not kind.startswith("baseline"), kind == SEVERAL, kind.count(","), kind)
    )
    return {kind: FIXED_MARKERS.get(kind) or next(shapes) for kind in ordered}


def setting_styles(settings: Sequence[str]) -> dict[str, Style]:
    """Colour, marker and dashes of each setting, the baseline first; further ones than SETTINGS begin again with other
    markers."""
    further = [(colour, marker, "-") for marker in MARKERS for colour, *_ in SETTINGS]
    return dict(zip(settings, (BASELINE, *SETTINGS, *further), strict=False))


def line_handle(label: str, style: Style) -> Line2D:
    """A line's entry in a legend."""
    colour, marker, dashes = style
    line: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.4}
    return Line2D([], [], label=label, **line)


def depth_legend(
    page: Figure, colours: dict[int, str], markers: dict[str, str] | None = None, n_columns: int = 4
) -> None:
    """Above the page: a colour for each depth, a shape for each kind of run."""
    swatches = {counted(depth, "layer"): (colour, "o") for depth, colour in colours.items()}
    swatches |= {name: ("#444444", marker) for name, marker in (markers or {}).items()}
    handles = [
        Line2D([], [], marker=marker, color=colour, label=wrapped(escaped(label), LONGEST), linestyle="", markersize=6)
        for label, (colour, marker) in swatches.items()
    ]
    legend_above(page, handles, n_columns, handletextpad=0.1, columnspacing=1.2)


class RunPoints:
    """Runs, or configurations, as points: the colour is the depth, the shape what they changed (`changed_fields`)."""

    def __init__(self, rows: pd.DataFrame, kind: str) -> None:
        self._kind = kind
        self._colours = depth_colours(rows["n_layers"])
        self._markers = kind_markers(rows[kind])

    def draw(self, axis: Any, rows: pd.DataFrame, x: str, y: str, **options: Any) -> None:
        """Draw column `y` against column `x`: filled, with a thin white rim."""
        from seaborn import scatterplot  # its import takes a second: only figures of points wait for it

        look: Any = {"hue": "n_layers", "palette": self._colours, "style": self._kind, "markers": self._markers}
        scatterplot(rows, x=x, y=y, ax=axis, legend=False, edgecolor="white", linewidth=0.3, **look, **options)

    def legend(self, page: Figure) -> None:
        depth_legend(page, self._colours, self._markers)


def settings_legend(
    page: Figure, styles: Mapping[str, Style], n_columns: int = 4, extra: Sequence[Line2D] = ()
) -> None:
    """Above the page: the line of each setting (`setting_styles`), then `extra` entries."""
    names = [wrapped(re.sub(r"(?<!,) ", "\u00a0", setting)) for setting in styles]  # broken between settings
    handles = [line_handle(escaped(name), style) for name, style in zip(names, styles.values(), strict=True)]
    legend_above(page, [*handles, *extra], n_columns)


def legend_above(page: Figure, handles: Sequence[Line2D], n_columns: int = 4, **options: Any) -> None:
    """Above the page, on the left, in at most `n_columns`, fewer if it would not fit into a narrow window, or a column
    of a paper. The page grows with a high one, which would leave the panels no room."""
    renderer = FigureCanvasAgg(page).get_renderer()
    inches = float(page.get_size_inches()[0])
    room = page.dpi * (inches if is_paper() else NARROW / 96 * max(1.0, 96 * inches / WIDEST))
    for columns in range(min(n_columns, len(handles)), 0, -1):
        legend = page.legend(handles=handles, ncols=columns, loc="outside upper left", **options)
        box = legend.get_window_extent(renderer)
        if columns == 1 or box.width <= room:
            page.set_figheight(page.get_figheight() + max(0.0, box.height / page.dpi - LEGEND_ROOM))
            return
        legend.remove()


def groups(frame: pd.DataFrame, *names: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """(values, rows) of each combination of values of these columns, in order of appearance."""
    yield from frame.groupby(list(names), sort=False)


def escaped(text: str) -> str:
    """Text shown literally: matplotlib reads text between dollar signs as a formula."""
    return text.replace("$", r"\$")


def shortened(text: str) -> str:
    """A setting's name with as many fields as fit, and the number of further ones."""
    if len(text) <= LONGEST:
        return text
    fields = text.split(", ")
    fitting = [n for n in range(1, len(fields)) if len(", ".join(fields[:n])) + 4 <= LONGEST]
    if not fitting:
        return text[: LONGEST - 1] + "…"
    return f"{', '.join(fields[: fitting[-1]])}, {len(fields) - fitting[-1]} more"


def wrapped(text: str, width: int = LONGEST) -> str:
    """A long name over several lines."""
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))


def caption(page: Figure, *paragraphs: str) -> None:
    """Notes for the reader, in grey below the page (in a paper `render` takes them out)."""
    width = int(17.5 * page.get_size_inches()[0])
    lines = [line for text in paragraphs for line in textwrap.wrap(text, width)]
    page.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color=GREY)


def not_shown(n: int, noun: str, why: str = "") -> str:
    """' Not shown: 3 further settings.' for a caption; '' of none."""
    return f" Not shown: {counted(n, noun)}{why}." if n else ""


def layer_ticks(axis: Any) -> None:
    """A few ticks at whole layers."""
    axis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 4, 5, 10]))


def depth_axis(axes: Any, depths: Iterable[int]) -> None:
    """A logarithmic x axis labelled at depths that exist: the deepest, and those that labels leave room for."""
    ordered = sorted(set(depths), reverse=True)
    shown = ordered[:1]
    for depth in ordered[1:]:
        if math.log(shown[0] / depth) >= LABEL_ROOM * math.log(ordered[0] / ordered[-1]):
            shown.insert(0, depth)
    axes.set_xscale("log")
    axes.set_xticks(shown, [str(depth) for depth in shown])
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
    return float(10.0 ** math.floor(math.log10(max(np.median(sizes), noise, sizes.max() / 10**DECADES))))


def set_scale(axes: Any, which: Literal["x", "y"], scale: Scale, values: Sequence[float]) -> None:
    """Set the scale of a quantity's axis; `values` are those shown, without NaN."""
    if scale == "log" and len(values):
        log_scale(axes, which, values)
    elif scale == "symlog" and max(map(abs, values), default=0.0) > 10 * max(LINEAR_BELOW, min(values)):
        (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=LINEAR_BELOW)
        axis = axes.xaxis if which == "x" else axes.yaxis
        axis.set_major_formatter(FuncFormatter(lambda value, _: _decade(value)))


def set_layer_scale(axis: Any, scale: Scale, values: Sequence[float]) -> None:
    """Set the y scale of a quantity by layer. The first layer can be a thousand times the others, whose differences
    matter: then logarithmic, or symlog if a value is negative or 0."""
    threshold = None if scale == "log" else linear_below(values)
    if threshold is None:
        set_scale(axis, "y", scale, values)
    elif min(values) > 0:
        log_scale(axis, "y", values)
    else:
        axis.set_yscale("symlog", linthresh=threshold)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _decade(value, threshold)))


def log_scale(axes: Any, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """A logarithmic axis of positive values with few labels: round numbers for a narrow range; 1, 2 and 5 of each
    decade, then 1 and 3, then whole decades for wider ones."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    shown = list(values)
    span = max(shown) / min(shown)
    steps = (1, 2, 5) if span < 30 else (1, 3) if span < 300 else (1,)
    axis.set_major_locator(MaxNLocator(3) if span < 5 else LogLocator(subs=steps))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if span < 300 else _decade(value)))


def _decade(value: float, least: float = 0.0) -> str:
    """'10⁻²': as text, since matplotlib takes longer to set a formula than to draw its axis. Empty inside the linear
    part, where it would lie over the 0."""
    if value == 0 or abs(value) < least:
        return "" if value else "0"
    power = str(round(math.log10(abs(value)))).translate(SUPERSCRIPTS)
    return f"{'−' if value < 0 else ''}10{power}"
