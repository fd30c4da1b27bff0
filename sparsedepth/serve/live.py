"""Data of the live page: the current state of a sweep, and its runs and figures as of the last reading.

All clients share a reading. The folder is checked again, and read again if runs were completed, after at least REST
times the duration of the last reading, to leave most of the machine to the sweep. Only the cache of rows is written, as
by `query`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparsedepth.files import MARKER, digest
from sparsedepth.plots.draw import FIGURES
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.report.page import Image, draw_image, html
from sparsedepth.report.tables import Table, table_of, table_of_runs
from sparsedepth.run.scratch import Progress
from sparsedepth.store.checksums import damage_text
from sparsedepth.store.connection import open_store
from sparsedepth.store.search import search_of
from sparsedepth.store.tables import INDEX
from sparsedepth.sweep.status import RunState, is_silent, varied_fields
from sparsedepth.sweep.summary import SweepSummary, sweep_summary

SHOWN = ("pareto", "curves", "by_layer", "variance")
"""Figures of the page: the Pareto front, training curves, measures by layer, residual variance."""
SHOWN_OF_SEARCH = ("history", "slices", "pareto", "by_layer")
"""Figures for a folder that a sampler fills."""
REST = 5.0
LEAST_SECONDS = 1.0
MAX_PAGE = 500
"""Rows of one response."""

_DRAWING = threading.Lock()
"""matplotlib's settings are global."""

Value = TypeVar("Value")


class RefreshedValue(Generic[Value]):
    """A value that is recomputed on access when it is old; concurrent callers get the old value meanwhile."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._value: list[Value] = []
        self._next = 0.0

    def get(self) -> Value:
        """Raises as `make` does."""
        if self._value and (time.monotonic() < self._next or not self._lock.acquire(blocking=False)):
            return self._value[0]
        if not self._value:
            self._lock.acquire()
        try:
            if (start := time.monotonic()) >= self._next:
                self._value = [self._make()]
                end = time.monotonic()
                self._next = end + max(LEAST_SECONDS, REST * (end - start))
        finally:
            self._lock.release()
        return self._value[0]

    def forget(self) -> None:
        self._value = []


class StoreReading:
    """The complete runs of a folder at one time, and their figures."""

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
        """The searchable text of each run."""
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

    def page(self, number: int, size: int, sort: str, descending: bool, query: str) -> dict[str, Any]:
        """A page of the table of runs: those that contain all words of the query, sorted by a column."""
        names = [column.name for column in self.runs.columns]
        words = query.lower().split()
        rows = list(self.runs.rows)
        if words:
            rows = [row for row, text in zip(rows, self._texts, strict=True) if all(word in text for word in words)]
        if sort in names:
            index = names.index(sort)
            missing = [row for row in rows if row[index].key == ""]  # always last
            present = [row for row in rows if row[index].key != ""]
            present.sort(key=lambda row: (isinstance(row[index].key, str), row[index].key), reverse=descending)
            rows = present + missing
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


def _markers(results: Path) -> Iterator[Path]:
    """The marker files of complete runs and packs."""
    yield from results.glob(f"runs/*/{MARKER}")
    yield from results.glob(INDEX)


class Live:
    """A results folder that is read repeatedly."""

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
        """Release the rows: threads that still wait for a client keep this object until the process ends."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None
        self._readings.forget()

    def status(self) -> Mapping[str, Any]:
        """The state of the sweep, with the version of the reading of rows and figures."""
        return {**self._status.get(), "version": self.reading().version, "problem": self.reading().problem}

    def _read(self) -> StoreReading:
        version = self._version()
        if self._reading is None or self._reading.version != version:
            self._reading = StoreReading(self.results, version)
        return self._reading

    def _version(self) -> str:
        """Changes when a run is completed or removed."""
        paths = _markers(self.results)
        return digest(sorted((path.parent.name, path.stat().st_mtime_ns) for path in paths))

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
    """The state of a running run."""
    name = varied_fields(now.definition, state.config) if now.definition and state.config else state.run_id
    progress = state.progress or Progress(phase="starting", done=0.0, loss=None, at=time.time())
    return {
        "name": name,
        "phase": progress.phase,
        "done": progress.done,
        "loss": progress.loss,
        "seconds_left": progress.left,
        "is_silent": is_silent(progress),
    }
