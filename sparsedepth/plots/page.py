"""What every figure is: its numbers, and how they are laid out on a page; and a page as the bytes of a file."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.files import write_bytes
from sparsedepth.plots.style import RC
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.render import to_csv

FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Suffix -> metadata to leave out, so that the same numbers give the same file."""


class NothingToDraw(ValueError):
    """The store does not hold what a figure shows; the message says in one line what is missing."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    data: pd.DataFrame
    """Every number that is drawn."""
    page: Callable[[], Figure]
    """Lays the numbers out; to be called by `render`, which sets the style."""


def check_suffix(path: Path) -> None:
    """Raises ValueError unless `path` ends as a picture does."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} must end in one of: {', '.join(FORMATS)}")


def write(drawing: Drawing, path: Path) -> None:
    """The picture into `path` (.png, .svg or .pdf), its numbers into the .csv beside it; each whole or not at all."""
    write_bytes(path, render(drawing.page, path.suffix.lower()))
    write_bytes(path.with_suffix(".csv"), csv_bytes(drawing.data))


def render(build: Callable[[], Figure], suffix: str) -> bytes:
    """A page as the bytes of a file of that kind."""
    with matplotlib.rc_context(RC):
        content = io.BytesIO()
        build().savefig(content, format=suffix[1:], metadata=FORMATS[suffix])
    return content.getvalue()


def csv_bytes(data: pd.DataFrame) -> bytes:
    """The numbers as CSV: exact, missing ones empty, text that a spreadsheet would take for a formula made inert."""
    rows = data.astype(object).where(data.notna(), None).itertuples(index=False, name=None)
    plain = tuple(tuple(getattr(value, "item", lambda value=value: value)() for value in row) for row in rows)
    return f"{to_csv(QueryResult(columns=tuple(map(str, data.columns)), rows=plain))}\n".encode()
