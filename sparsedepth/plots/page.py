"""A figure: its numbers and its page; and how a page becomes a file."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.files import check_parent, write_bytes
from sparsedepth.plots.style import PAPER, RC
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.render import to_csv

FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Suffix -> metadata to leave out, so that the same numbers give the same file."""


class NothingToDraw(ValueError):
    """The store lacks the numbers of a figure; the message names in one line what is missing."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    data: pd.DataFrame
    """Every number that is drawn."""
    page: Callable[[], Figure]
    """Builds the page; called by `render`, which sets the style."""


def check_path(path: Path) -> None:
    """Raises ValueError unless `path` ends in one of FORMATS, in a folder that exists."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} must end in one of: {', '.join(FORMATS)}")
    check_parent(path)


def write(drawing: Drawing, path: Path) -> None:
    """Write the picture to `path` (.png, .svg or .pdf) and its numbers to the .csv next to it; each atomically."""
    write_bytes(path, render(drawing.page, path.suffix.lower()))
    write_bytes(path.with_suffix(".csv"), csv_bytes(drawing.data))


def write_for_paper(drawing: Drawing, path: Path) -> str:
    """Write the figure for a column of a paper as .pdf and .png, and its numbers as .csv; returns its caption, which is
    text for the paper and not in the picture."""
    with matplotlib.rc_context(PAPER):
        page = drawing.page()
        notes = " ".join(page.get_supxlabel().split())
        page.supxlabel("")
        for suffix in (".pdf", ".png"):
            write_bytes(path.with_suffix(suffix), _picture(page, suffix))
    write_bytes(path.with_suffix(".csv"), csv_bytes(drawing.data))
    return notes


def render(build: Callable[[], Figure], suffix: str) -> bytes:
    """The page as the bytes of a file with this suffix."""
    with matplotlib.rc_context(RC):
        return _picture(build(), suffix)


def _picture(page: Figure, suffix: str) -> bytes:
    content = io.BytesIO()
    page.savefig(content, format=suffix[1:], metadata=FORMATS[suffix])
    return content.getvalue()


def csv_bytes(data: pd.DataFrame) -> bytes:
    """The numbers as CSV: exact, missing ones empty; text that a spreadsheet would run as a formula is escaped."""
    rows = data.astype(object).where(data.notna(), None).itertuples(index=False, name=None)
    plain = tuple(tuple(getattr(value, "item", lambda value=value: value)() for value in row) for row in rows)
    return f"{to_csv(QueryResult(columns=tuple(map(str, data.columns)), rows=plain))}\n".encode()
