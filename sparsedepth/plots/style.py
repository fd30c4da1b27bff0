"""How every figure looks: colours for every eye and for a grey printer, type for a column's width.

Depth is ordered, so it has an ordered colour scale (viridis: lightness alone tells it apart). Knobs are unordered and
few, so they have marker shapes.
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
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sparsedepth.quantities.record import Scale

MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
PROPOSAL = "proposal"
"""What a sampler chose: of a search none is a baseline, and none moved one knob alone."""
SEVERAL = "several"
"""Kind of a run that moved more than one field."""
FIXED_MARKERS = {"baseline": "o", SEVERAL: "d", PROPOSAL: "o"}
Fill = Literal["full", "none", "left", "right", "top", "bottom"]
FILLS: tuple[Fill, ...] = ("full", "none", "left", "right", "top", "bottom")
"""How much of a point is filled says which results folder it is from, where there are several."""
GREY = "#666666"
MISSING = "#c8c8c8"
SERIES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", "-."), ("#444444", "D", ":"))
"""Colour (Okabe and Ito's, for every eye), marker and dashes (for a grey printer) of the lines of one panel."""
BASELINE = ("#222222", "o", "-")
"""The setting that others are compared with."""
SETTINGS = (
    *(*SERIES[:3], ("#cc79a7", "D", ":"), ("#e69f00", "v", "--"), ("#56b4e9", "P", "-")),
    *(("#882255", "X", "-."), ("#999933", "<", ":"), ("#332288", ">", "--")),
)
"""Okabe and Ito's colours, then three of Tol's muted ones: names have no order, so their colours have none."""
LINEAR_BELOW = 0.01
"""A relative loss increase may be negative and spans decades: logarithmic above this, linear below."""
STANDS_OUT = 5
"""A value this many times the median one sets a linear axis' scale alone: the first layer's, above all."""
DECADES = 4
"""Of a symlog axis above its linear part, at most."""
NARROW, WIDEST = 358, 640
"""CSS pixels of a figure that a window of 390 shows at once, and that it has there at most (`report/page.css`)."""
MOVES_VARIANCE = ", which moves residual variance as well"
"""Of lr, which tuning may have chosen for each setting: said wherever settings' variances stand side by side."""
LONGEST = 30
"""Characters of a setting's name beside an axis."""

RC: dict[Any, Any] = {
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "axes.formatter.limits": (-8, 7),  # a power of ten beside the axis would lie on its label
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


def depth_map() -> ListedColormap:
    """Shallow is light, deep is dark; the palest yellow, lost on paper, is left out."""
    return ListedColormap(matplotlib.colormaps["viridis_r"](np.linspace(0.12, 0.95, 256)))


def depth_colours(depths: Iterable[int]) -> dict[int, str]:
    """A shade of `depth_map` for each depth."""
    ordered = sorted(set(depths))
    if len(ordered) == 1:
        return {ordered[0]: "#31688e"}
    shades = matplotlib.colormaps["viridis_r"]
    return {depth: to_hex(shades(0.12 + 0.83 * i / (len(ordered) - 1))) for i, depth in enumerate(ordered)}


def knob_markers(names: Sequence[str]) -> dict[str, str]:
    """One shape per knob; the runs that moved several are thin, since they are most of a grid."""
    knobs = [name for name in names if name not in FIXED_MARKERS]
    shapes = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(knobs)}
    return {name: FIXED_MARKERS.get(name) or shapes[name] for name in names}


def kinds_in_order(kinds: Iterable[str]) -> list[str]:
    """As a legend has them: the baseline first, several last."""
    return sorted(set(kinds), key=lambda kind: (kind != "baseline", kind == SEVERAL, kind))


def folder_fills(folders: Iterable[str]) -> dict[str, Fill]:
    """One of FILLS for each folder; of a single one nothing is said."""
    names = sorted(set(folders))
    return {name: FILLS[i % len(FILLS)] for i, name in enumerate(names)} if len(names) > 1 else {}


def point(marker: str, colour: str, fill: Fill = "full") -> dict[str, Any]:
    """How `scatter` draws a point: filled, with a thin white rim, or, being from another folder, hollow or half."""
    if fill == "full":
        return {"marker": marker, "color": colour, "edgecolor": "white", "linewidth": 0.3}
    if fill == "none":
        return {"marker": marker, "facecolors": "none", "edgecolors": colour, "linewidth": 1.0}
    return {"marker": MarkerStyle(marker, fill), "facecolors": colour, "edgecolors": colour, "linewidth": 1.0}


def setting_styles(settings: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and dashes of each setting, the baseline first."""
    from seaborn import color_palette

    if len(settings) <= 1 + len(SETTINGS):
        return dict(zip(settings, (BASELINE, *SETTINGS), strict=False))
    colours = map(to_hex, color_palette("husl", len(settings) - 1))
    rest = zip(colours, cycle(MARKERS), cycle(dashes for _, _, dashes in SERIES), strict=False)
    return dict(zip(settings, (BASELINE, *rest), strict=True))


def line_handle(label: str, style: tuple[str, str, str]) -> Line2D:
    """A line's entry in a legend."""
    colour, marker, dashes = style
    line: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.4}
    return Line2D([], [], label=label, **line)


def depth_legend(
    page: Figure,
    colours: dict[int, str],
    markers: dict[str, str] | None = None,
    n_columns: int = 4,
    fills: dict[str, Fill] | None = None,
) -> None:
    """Above the page: a colour for each depth, a shape for each knob, a fill for each of several folders. On the left,
    where a narrow window shows it."""
    swatches: dict[str, tuple[str, str, Fill]]
    swatches = {f"{depth} layer{'s' * (depth != 1)}": (colour, "o", "full") for depth, colour in colours.items()}
    swatches |= {name: ("#444444", marker, "full") for name, marker in (markers or {}).items()}
    swatches |= {f"in {name}": ("#444444", "o", fill) for name, fill in (fills or {}).items()}
    plain: Any = {"linestyle": "", "markersize": 6, "markerfacecoloralt": "none"}
    handles = [
        Line2D([], [], marker=marker, color=colour, fillstyle=fill, label=inert(label), **plain)
        for label, (colour, marker, fill) in swatches.items()
    ]
    legend_above(page, handles, n_columns, handletextpad=0.1, columnspacing=1.2)


class RunPoints:
    """Runs, or configurations, as points: colour is depth, shape what they moved (a column of `moved_kinds`), and how
    much is filled the results folder, where there are several."""

    def __init__(self, rows: pd.DataFrame, kind: str) -> None:
        self._kind = kind
        self._colours = depth_colours(rows["n_layers"])
        self._markers = knob_markers(kinds_in_order(rows[kind]))
        self._fills = folder_fills(rows.get("source", ()))

    def draw(self, axis: Any, rows: pd.DataFrame, x: str, y: str, **options: Any) -> None:
        """One column against another."""
        source = ["source"] if self._fills else []
        for (depth, kind, *folder), part in groups(rows, "n_layers", self._kind, *source):
            style = point(self._markers[kind], self._colours[depth], *(self._fills[name] for name in folder))
            axis.scatter(part[x], part[y], **options, **style)

    def legend(self, page: Figure) -> None:
        depth_legend(page, self._colours, self._markers, fills=self._fills)


def legend_above(page: Figure, handles: Sequence[Line2D], n_columns: int = 4, **options: Any) -> None:
    """Above the page, on the left, in as many columns as a narrow window shows at once."""
    fitting_legend(page, page, handles, n_columns, loc="outside upper left", **options)


def settings_legend(
    page: Figure, styles: Mapping[str, tuple[str, str, str]], n_columns: int = 4, more: Sequence[Line2D] = ()
) -> None:
    """Above the page: the line of each setting (`setting_styles`), and more."""
    handles = [line_handle(inert(folded_settings(setting)), style) for setting, style in styles.items()]
    legend_above(page, [*handles, *more], n_columns)


def fitting_legend(
    page: Figure, owner: Any, handles: Sequence[Line2D], n_columns: int, indent: float = 0.0, **options: Any
) -> tuple[Legend, int]:
    """A legend of the page, or of one of its axes, and its columns: at most `n_columns`, fewer where it would end
    beyond what a narrow window shows; `indent` is where it begins (inches)."""
    renderer = FigureCanvasAgg(page).get_renderer()
    room = page.dpi * (NARROW / 96 * max(1.0, 96 * float(page.get_size_inches()[0]) / WIDEST) - indent)
    for columns in range(min(n_columns, len(handles)), 0, -1):
        legend = owner.legend(handles=handles, ncols=columns, **options)
        if columns == 1 or legend.get_window_extent(renderer).width <= room:
            return legend, columns
        legend.remove()
    raise AssertionError("a legend has at least one entry")


def groups(frame: pd.DataFrame, *names: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The rows that share the values of several columns, with those values, in order of appearance."""
    yield from frame.groupby(list(names), sort=False)


def inert(text: str) -> str:
    """Text from a store as it stands: between dollar signs, matplotlib would take it for a formula."""
    return text.replace("$", r"\$")


def short(text: str) -> str:
    """A setting's name with as many of its fields as fit, and how many there are beside them."""
    if len(text) <= LONGEST:
        return text
    fields = text.split(", ")
    kept = [i for i in range(1, len(fields)) if len(", ".join(fields[:i])) + 4 <= LONGEST]
    return f"{', '.join(fields[: kept[-1]])}, {len(fields) - kept[-1]} more" if kept else text[: LONGEST - 1] + "…"


def folded(text: str, width: int = LONGEST) -> str:
    """A long name over several lines."""
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))


def folded_settings(text: str) -> str:
    """'n_kv_heads=1, weight_decay=1' over several lines, broken between settings."""
    return folded(re.sub(r"(?<!,) ", "\u00a0", text))


def caption(page: Figure, *paragraphs: str) -> None:
    """What a reader must know, in grey below the page."""
    width = int(17.5 * page.get_size_inches()[0])
    lines = [line for text in paragraphs for line in textwrap.wrap(text, width)]
    page.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color=GREY)


def layer_ticks(axis: Any) -> None:
    """Whole layers, few of them."""
    axis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 4, 5, 10]))


def linear_below(values: Iterable[float]) -> float | None:
    """Where a symlog axis of values by layer turns linear: the decade of the median size, so that what is typical is
    seen beside what stands out; or of nine tenths of the negative ones, if that is higher: an increase of that size is
    noise. None where a linear axis shows all."""
    shown = np.array([value for value in values if value])
    sizes = np.abs(shown)
    if not len(sizes) or sizes.max() <= STANDS_OUT * np.median(sizes):
        return None
    negative = sizes[shown < 0]
    noise = np.quantile(negative, 0.9) if len(negative) else 0.0
    return float(10.0 ** math.floor(math.log10(max(np.median(sizes), noise, sizes.max() / 10**DECADES))))


def set_scale(axes: Any, which: Literal["x", "y"], scale: Scale, values: Sequence[float]) -> None:
    """The scale of a quantity's axis; `values` are those shown, without NaN."""
    if scale == "log" and len(values):
        log_scale(axes, which, values)
    elif scale == "symlog" and max(map(abs, values), default=0.0) > 10 * LINEAR_BELOW:
        (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=LINEAR_BELOW)


def set_layer_scale(axis: Any, scale: Scale, values: Sequence[float]) -> None:
    """The y scale of a quantity by layer: the first layer may be a thousand times the others, whose differences are the
    question. Logarithmic then, where no value is negative or 0."""
    threshold = None if scale == "log" else linear_below(values)
    if threshold is None:
        set_scale(axis, "y", scale, values)
    elif min(values) > 0:
        axis.set_yscale("log")
    else:
        axis.set_yscale("symlog", linthresh=threshold)


def log_scale(axes: Any, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """A logarithmic axis of positive values with few labels: round numbers where the range is narrow, 1, 2 and 5 of
    each decade where it is wider, then 1 and 3, whole decades where it is wide."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    shown = list(values)
    span = max(shown) / min(shown)
    of_decade = (1, 2, 5) if span < 30 else (1, 3) if span < 300 else (1,)
    axis.set_major_locator(MaxNLocator(3) if span < 5 else LogLocator(subs=of_decade))
    axis.set_minor_formatter(NullFormatter())
    if span < 300:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
