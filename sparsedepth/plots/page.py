"""A figure: its numbers and its page; what every page has (panels, legend, notes); and how it becomes a file."""

import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from sparsedepth.files import check_parent, write_bytes
from sparsedepth.plots.style import COLUMNS, GREY, PAPER, RC, TALLEST, Style, log_scale
from sparsedepth.quantities.quantity import Named
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.captions import escaped, folded
from sparsedepth.words.formats import to_csv
from sparsedepth.words.plain_text import counted

FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Suffix -> metadata to leave out, so that the same numbers give the same file."""
MOST_MARKS = 1500
"""Points of a panel that answer to the pointer."""
PAD = 5.0
"""Pixels around a panel in which a point is still seen."""
LEAST_WIDTH = 3.0
"""Inches of a panel of a paper, whose labels would lie over the next one's."""
NARROW, WIDEST = 358, 640
"""CSS pixels of a figure in a window of 390: visible at once, and the largest width there (`report/page.css`)."""


class NothingToDraw(ValueError):
    """The store lacks the numbers of a figure; the message names in one line what is missing."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    data: pd.DataFrame
    """Every number that is drawn."""
    page: Callable[[], Figure]
    """Builds the page; called by `render`, which sets the style."""
    of_panels: Callable[[Collection[str]], "Drawing"] | None = None
    """The same of these values of the column `panel` alone. Raises NothingToDraw for an unknown one."""


# The page


def paper_width() -> float:
    """Inches of a page that is built in style PAPER; 0 of others."""
    width, height = matplotlib.rcParams["figure.figsize"]
    return float(width) if height == TALLEST else 0.0


def panels(
    n: int, most_columns: int, width: float, height: float, least: float = 5.2, **options: Any
) -> tuple[Figure, list[Any]]:
    """A page of n panels of this size (inches) in as few rows as fit, or one below another in a column of a paper; and
    its axes, row by row."""
    paper = paper_width()
    most_columns = min(most_columns, int(paper / LEAST_WIDTH)) if paper else most_columns
    n_rows = -(-n // most_columns)
    n_columns = -(-n // n_rows)
    size = paper or max(least, width * n_columns + 0.4)
    if paper:  # as wide panels are, but high enough for the label of an axis
        height = max(min(height, 2.5), height * min(1.0, 0.85 * size / n_columns / width))
    page = Figure(figsize=(size, height * n_rows + (0.3 if paper else 0.8)))
    axes = list(page.subplots(n_rows, n_columns, squeeze=False, **options).ravel())
    for axis in axes[n:]:
        axis.remove()
    for axis in axes[:n]:
        axis.locator_params(nbins=5)  # ticks take half of the time of drawing
    return page, axes[:n]


def line_handle(label: str, style: Style, **look: Any) -> Line2D:
    colour, marker, dashes = style
    known: Named = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.4}
    return Line2D([], [], label=label, **known | look)


def depth_legend(page: Figure, colours: Mapping[int, str], markers: Mapping[str, str] | None = None) -> None:
    """Above the page: a colour for each depth, a shape for each kind of run, of several."""
    swatches = {counted(depth, "layer"): (colour, "o", "") for depth, colour in colours.items()}
    if markers and len(markers) > 1:
        swatches |= {name: ("#444444", marker, "") for name, marker in markers.items()}
    handles = [line_handle(folded(escaped(name)), style, markersize=6) for name, style in swatches.items()]
    legend_above(page, handles, handletextpad=0.1, columnspacing=1.2)


def settings_legend(
    page: Figure, styles: Mapping[str, Style], n_columns: int = 4, extra: Sequence[Line2D] = ()
) -> None:
    """Above the page: the line of each setting (`setting_styles`), then `extra` entries."""
    names = [folded(re.sub(r"(?<!,) ", "\u00a0", setting)) for setting in styles]  # broken between settings
    handles = [line_handle(escaped(name), style) for name, style in zip(names, styles.values(), strict=True)]
    legend_above(page, [*handles, *extra], n_columns)


def legend_above(page: Figure, handles: Sequence[Any], n_columns: int = 4, **options: Any) -> None:
    """Above the page, on the left, in at most `n_columns`, fewer if it would not fit into a narrow window, or a column
    of a paper."""
    inches = float(page.get_size_inches()[0])
    room = inches if paper_width() else NARROW / 96 * max(1.0, 96 * inches / WIDEST)
    longest = max(len(line) for handle in handles for line in str(handle.get_label()).splitlines())
    spaces = 2.0 + options.get("handletextpad", 0.8) + options.get("columnspacing", 2.0)  # with the handle
    width = 0.125 * spaces + 0.075 * longest  # inches, of a character at most
    n_columns = min(n_columns, len(handles), max(1, int((room + 0.15) / width)))  # no space behind the last
    page.legend(handles=handles, ncols=n_columns, loc="upper left", bbox_to_anchor=(0, 1), **options)


def colour_bar(axis: Any, image: Any, label: str = "") -> None:
    """A small one on the right of a panel."""
    bar = axis.figure.colorbar(image, cax=axis.inset_axes((1.04, 0.08, 0.05, 0.84)), format="{x:g}")
    bar.set_label(label, size=8)
    bar.minorticks_off()
    if bar.ax.get_yscale() == "log":
        log_scale(bar.ax, "y", bar.ax.get_ylim())
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def caption(page: Figure, *paragraphs: str) -> None:
    """Notes for the reader, in grey below the page (of a paper `write` takes them out)."""
    width = int(17.5 * page.get_size_inches()[0])
    lines = [line for text in paragraphs for line in textwrap.wrap(text, width)]
    page.supxlabel("\n".join(lines), x=0.01, y=0.003, ha="left", fontsize=7.5, color=GREY)


def lay_out(page: Figure) -> None:
    """Place the panels between legend and notes, as tightly as their labels allow; the page grows with a high legend,
    which would leave them no room. The text is measured once; with an engine or a `rect` matplotlib does so twice."""
    if page.get_layout_engine() is not None:  # a plugin's own
        return
    renderer = FigureCanvasAgg(page).get_renderer()
    legend = max((legend.get_window_extent(renderer).height / page.dpi for legend in page.legends), default=0.0)
    room = 0.3 if paper_width() else 0.6  # in the height of every page
    page.set_figheight(page.get_figheight() + max(0.0, legend - room))
    page.tight_layout(pad=0.6)
    page.set_layout_engine(None)
    specs = filter(None, (axis.get_subplotspec() for axis in page.axes))
    of = page.subplotpars
    n = max(spec.get_gridspec().nrows for spec in specs)
    gap = of.hspace * (of.top - of.bottom) / (n + of.hspace * (n - 1))
    top = of.top - legend / page.get_figheight()
    page.subplots_adjust(top=top, hspace=n * gap / (top - of.bottom - gap * (n - 1)))


# Files


def check_path(path: Path, table: Path | None = None) -> None:
    """Raises ValueError unless `path` ends in one of FORMATS, in a folder that exists, and as `check_numbers` does."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} must end in one of: {', '.join(FORMATS)}")
    check_parent(path)
    check_numbers(path, table)


def check_numbers(path: Path, table: Path | None = None) -> None:
    """Raises ValueError where the numbers of a picture would replace a file that no earlier picture wrote, or `table`,
    from which it is drawn."""
    numbers = path.with_suffix(".csv")
    if not numbers.exists():
        return
    is_table = table is not None and table.exists() and numbers.samefile(table)
    if is_table or not any(picture.exists() for picture in (path, *map(path.with_suffix, FORMATS))):
        raise ValueError(f"{numbers} would be replaced by the numbers of {path.name}; give the picture another name")


class Rendered(NamedTuple):
    page: Figure
    caption: str
    pictures: list[bytes]


class Marks(NamedTuple):
    """What a page answers to the pointer; its artists with a gid of `mark_id` are switched with their group."""

    groups: list[str]
    kinds: list[str]
    points: list[tuple[float, float, int, int, str, str]]
    """x, y [points of the page, from its upper left corner], number of the group and the kind, text, run ids"""
    n_left_out: int
    """Beyond MOST_MARKS of a panel, or its axes."""


def mark_id(group: str, kind: str = "") -> str:
    """The gid of an artist: its group, such as a setting or a depth, and within a group its kind; names have colons."""
    return f"mark:{group}\u241f{kind}"


def marks_of(page: Figure) -> Marks:
    """Of the panels with an attribute `marks`, a frame: x, y, group, text, and kind and runs where there are any."""
    found = [pd.DataFrame(columns=["x", "y", "group", "kind", "text", "runs"])]
    n_left_out = 0
    for axis in page.axes:
        if (marks := getattr(axis, "marks", None)) is None:
            continue
        rows = marks.dropna(subset=["x", "y"])
        shown = rows.iloc[:: -(-len(rows) // MOST_MARKS) or 1]
        at = axis.transData.transform(shown[["x", "y"]].to_numpy(float))
        low, high = axis.bbox.padded(PAD).get_points()  # beyond it another panel's points would seem to be
        inside = (at >= low).all(1) & (at <= high).all(1)
        n_left_out += len(rows) - int(inside.sum())
        at = (at * 72 / page.dpi).round(1)
        found.append(shown.assign(x=at[:, 0], y=(72 * page.get_figheight() - at[:, 1]).round(1))[inside])
    rows = pd.concat(found).fillna("")
    groups, kinds = ([*dict.fromkeys(rows[name])] for name in ("group", "kind"))
    rows = rows.assign(group=rows["group"].map(groups.index), kind=rows["kind"].map(kinds.index))
    return Marks(groups, kinds, [*rows[[*found[0].columns]].itertuples(index=False, name=None)], n_left_out)


def render(build: Callable[[], Figure], *suffixes: str, columns: int = 0, has_caption: bool = True) -> Rendered:
    """The page in each of FORMATS that `suffixes` name; for so many columns of a paper without its caption, and in
    pages of TALLEST: all pages in one format, then in the next."""
    with matplotlib.rc_context(PAPER | {"figure.figsize": (COLUMNS[columns], TALLEST)} if columns else RC):
        page = build()
        notes = " ".join(page.get_supxlabel().split())
        if columns or not has_caption:
            page.supxlabel("")
        lay_out(page)
        pictures = []
        for suffix in suffixes:
            for part in _parts(page) if columns else [None]:
                content = io.BytesIO()
                page.savefig(content, format=suffix[1:], metadata=FORMATS[suffix], bbox_inches=part)
                pictures.append(content.getvalue())
    return Rendered(page, notes, pictures)


def _parts(page: Figure) -> Iterator[Bbox]:
    """The parts of a page that fit on one of a paper each, with the legend above: whole rows of panels, of which the
    others are hidden meanwhile."""
    renderer, dpi = FigureCanvasAgg(page).get_renderer(), page.dpi
    width, height = page.get_size_inches()
    legend = max((of.get_window_extent(renderer).height / dpi + 0.05 for of in page.legends), default=0.0)
    rows: dict[int, list[Any]] = {}
    for axis in page.axes:
        axis.set_visible(True)
        if spec := axis.get_subplotspec():
            rows.setdefault(spec.rowspan.start, []).append(axis)
    boxes = {n: Bbox.union([axis.get_tightbbox(renderer) for axis in axes]) for n, axes in rows.items()}
    ends = [(n, boxes[n].y0 / dpi - 0.05, boxes[n].y1 / dpi + 0.05) for n in sorted(rows)]
    while ends:
        first, _, top = ends[0]
        part = [(n, bottom) for n, bottom, _ in ends if n == first or top + legend - bottom <= TALLEST]
        ends = ends[len(part) :]
        for n, axes in rows.items():
            for axis in axes:
                axis.set_visible(part[0][0] <= n <= part[-1][0])
        top = height if first == 0 else top + legend
        for of in page.legends:
            of.set_bbox_to_anchor((0, top / height), page.transFigure)
        yield Bbox([[0, part[-1][1] if ends else 0.0], [width, top]])


def write(drawing: Drawing, path: Path, columns: int = 0) -> tuple[list[Path], str]:
    """Write the picture to `path` (.png, .svg or .pdf), or for so many columns of a paper a .pdf and a .png without
    caption, further pages as NAME-2; and its numbers to the .csv next to it; each atomically. Returns the pictures and
    the caption."""
    suffixes = (".pdf", ".png") if columns else (path.suffix.lower(),)
    rendered = render(drawing.page, *suffixes, columns=columns)
    n_pages = len(rendered.pictures) // len(suffixes)
    names = [path.stem, *(f"{path.stem}-{n}" for n in range(2, n_pages + 1))]
    paths = [path.with_name(f"{name}{suffix}") for suffix in suffixes for name in names] if columns else [path]
    for each, content in zip(paths, rendered.pictures, strict=True):
        write_bytes(each, content)
    write_bytes(path.with_suffix(".csv"), csv_bytes(drawing.data))
    return paths, rendered.caption


def csv_bytes(data: pd.DataFrame) -> bytes:
    """The numbers as CSV: exact, missing ones empty; text that a spreadsheet would run as a formula is escaped."""
    return f"{to_csv(QueryResult.of_frame(data.rename(columns=str)))}\n".encode()
