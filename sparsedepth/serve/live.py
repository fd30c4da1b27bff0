"""What the live page shows: how a sweep stands now; its runs and figures, as of the last reading.

All who look share a reading. The folder is looked at again, and read again where runs were completed, after at least
REST times as long as the last time took: a sweep on the same machine keeps most of it. Nothing is written but the cache
of rows that `query` keeps, too.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparsedepth.files import digest
from sparsedepth.plots.draw import FIGURES
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.report.page import Image, draw_image, html
from sparsedepth.report.tables import Table, TableCell, table_of, table_of_runs
from sparsedepth.store.checksums import damage_text
from sparsedepth.store.connection import open_store
from sparsedepth.store.run_record import MARKER
from sparsedepth.store.search import search_of
from sparsedepth.store.tables import INDEX
from sparsedepth.sweep.status import RunState, is_silent, varied_fields
from sparsedepth.sweep.summary import SweepSummary, sweep_summary

SHOWN = ("pareto", "curves", "by_layer", "variance")
"""The figures of the page: the front, the loss along training, what the layers do, residual variance."""
SHOWN_OF_SEARCH = ("history", "slices", "pareto", "by_layer")
"""Of a folder that a sampler fills."""
REST = 5.0
LEAST_SECONDS = 1.0
MAX_PAGE = 500
"""Rows of one answer."""

_DRAWING = threading.Lock()
"""matplotlib's settings are the process's."""

Value = TypeVar("Value")


class RefreshedValue(Generic[Value]):
    """A value that is made anew when it is asked for and old; those who ask meanwhile get the old one."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._value: list[Value] = []
        self._next = 0.0

    def get(self) -> Value:
        """Raises what making it raises."""
        if self._value and (time.monotonic() < self._next or not self._lock.acquire(blocking=False)):
            return self._value[0]
        if not self._value:
            self._lock.acquire()
        try:
            if time.monotonic() >= self._next:
                began = time.monotonic()
                self._value = [self._make()]
                took = time.monotonic() - began
                self._next = time.monotonic() + max(LEAST_SECONDS, REST * took)
        finally:
            self._lock.release()
        return self._value[0]

    def forget(self) -> None:
        self._value = []


class StoreReading:
    """The complete runs of a folder, as of one moment, and what is drawn of them."""

    def __init__(self, results: Path, version: str) -> None:
        self.version = version
        self._results = results
        self._images: dict[str, Image | str] = {}
        try:
            self._store = open_store(results, skip_damaged=True)
            self.runs: Table = table_of_runs(self._store.frame("select * from runs order by run_id"))
            self.problem = damage_text(self._store.damaged)
        except ValueError as error:
            is_empty = not any(_markers(results))
            self.problem = "no run is complete yet" if is_empty else str(error)
            self._store, self.runs = None, table_of([], [])

    @cached_property
    def _texts(self) -> list[str]:
        """What a filter looks through, of each run."""
        return ["\n".join(cell.text for cell in row).lower() for row in self.runs.rows]

    def image(self, name: str) -> Image:
        """A figure, drawn once. Raises NothingToDraw."""
        with _DRAWING:
            if name not in self._images:
                try:
                    if self._store is None:
                        raise NothingToDraw(self.problem)
                    self._images[name] = draw_image(FIGURES[name].drawing(self._store))
                except NothingToDraw as reason:
                    self._images[name] = str(reason)
            image = self._images[name]
        if isinstance(image, str):
            raise NothingToDraw(image)
        return image

    def report(self) -> str:
        """The whole report, made now. Raises ValueError where no run is complete."""
        with _DRAWING:
            if self._store is None:
                raise ValueError(self.problem)
            return html(self._store, [self._results])

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None

    def page(self, number: int, size: int, sort: str, descending: bool, words: str) -> dict[str, Any]:
        """A page of the table of runs: those that hold every one of the words, in the order of a column."""
        names = [column.name for column in self.runs.columns]
        wanted = words.lower().split()
        rows = list(self.runs.rows)
        if wanted:
            rows = [row for row, text in zip(rows, self._texts, strict=True) if all(word in text for word in wanted)]
        if sort in names:
            at = names.index(sort)
            missing = [row for row in rows if row[at].key == ""]  # they come last either way
            known = [row for row in rows if row[at].key != ""]
            rows = sorted(known, key=lambda row: _order(row[at]), reverse=descending) + missing
        size = min(max(size, 1), MAX_PAGE)
        n_pages = max(1, -(-len(rows) // size))
        number = min(max(number, 0), n_pages - 1)
        return {
            "version": self.version,
            "columns": [asdict(column) for column in self.runs.columns],
            "rows": [[cell.text for cell in row] for row in rows[number * size : (number + 1) * size]],
            "page": number,
            "n_pages": n_pages,
            "n_matching": len(rows),
            "n_runs": len(self.runs.rows),
        }


def _order(cell: TableCell) -> tuple[bool, float | str]:
    return (isinstance(cell.key, str), cell.key)


def _markers(results: Path) -> Iterator[Path]:
    """What says that a run, or a pack, is complete."""
    yield from results.glob(f"runs/*/{MARKER}")
    yield from results.glob(INDEX)


class Live:
    """A results folder that is looked at again and again."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._reading: StoreReading | None = None
        self._readings = RefreshedValue(self._read)
        self._status = RefreshedValue(self._look)

    @property
    def figures(self) -> tuple[str, ...]:
        return SHOWN_OF_SEARCH if search_of([self.results]) else SHOWN

    def reading(self) -> StoreReading:
        return self._readings.get()

    def close(self) -> None:
        """Let go of the rows: threads that still wait for a reader keep this object until the process ends."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None
        self._readings.forget()

    def status(self) -> Mapping[str, Any]:
        """How the sweep stands, with the version of the reading that rows and figures come from."""
        return {**self._status.get(), "version": self.reading().version, "problem": self.reading().problem}

    def _read(self) -> StoreReading:
        version = self._version()
        if self._reading is None or self._reading.version != version:
            self._reading = StoreReading(self.results, version)
        return self._reading

    def _version(self) -> str:
        """Changes when a run is completed, or one is taken away."""
        paths = _markers(self.results)
        return digest(sorted((path.parent.name, path.stat().st_mtime_ns) for path in paths))[:12]

    def _look(self) -> dict[str, Any]:
        now = sweep_summary(self.results)
        best = now.best
        return {
            "counts": {state: n for state, n in now.counts.items() if n},
            "share": now.share,
            "is_running": now.is_left,
            "running": [_running(now, state) for state in now.states if state.state == "running"],
            "ended": [{"runs": n, "state": state, "cause": cause} for (state, cause), n in now.ended.most_common()],
            "remarks": now.remarks,
            "best": None if best is None else best.text,
        }


def _running(now: SweepSummary, state: RunState) -> dict[str, Any]:
    """How one running run stands."""
    name = varied_fields(now.definition, state.config) if now.definition and state.config else state.run_id
    if state.progress is None:
        return {"name": name, "phase": "starting", "done": 0.0, "loss": None, "seconds_left": None, "is_silent": False}
    progress = state.progress
    return {
        "name": name,
        "phase": progress.phase,
        "done": progress.done,
        "loss": progress.loss,
        "seconds_left": progress.left,
        "is_silent": is_silent(progress),
    }
