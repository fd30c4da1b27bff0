"""`report --watch`: the page of results folders while their sweeps run, rewritten until no run is left.

It is a file: written aside and renamed, so that a browser never sees half of it, and loaded again by its own script.
The progress on it is of each writing. Rows and figures are made again when runs were completed, and then not for REST
times as long as that took, which leaves most of the machine to the sweep. The last page is that of `report`.
"""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparsedepth.config.plain_text import counted, duration, visible
from sparsedepth.files import MARKER, digest, write_bytes
from sparsedepth.recipe.card import read_card
from sparsedepth.report.content import check
from sparsedepth.report.page import html, parts_of
from sparsedepth.store.connection import open_store
from sparsedepth.sweep.status import SweepSummary, running_line, sweep_summary, varied_fields

REST = 5.0
SILENT_SECONDS = 120.0
"""The page says that it was not written for so long, or for as long as ten writings or two makings of its figures."""


class WatchedReport:
    """The page of folders that are read again and again."""

    def __init__(
        self,
        folders: Sequence[Path],
        out: Path,
        seconds: float,
        depth: int | None = None,
        objective: str = "loss",
        card: Path | None = None,
    ) -> None:
        """Raises ValueError for a path that is no folder of a sweep, and as `read_card` and `check` do."""
        for folder in folders:
            if not folder.is_dir():
                what = "is a file, which does not change" if folder.is_file() else "is not an existing folder"
                raise ValueError(f"{folder} {what}; give the results folder of a sweep, or leave out --watch")
        self.folders, self.out, self.seconds = folders, out, seconds
        self._depth, self._objective = depth, objective
        self._verified = read_card(card) if card else None
        check(objective, self._verified)
        self._parts: dict[str, Any] | None = None
        self._problem = "no run is complete yet"
        self._version: str | None = None
        self._next = self._duration = 0.0

    def rounds(self) -> Iterator[None]:
        """Write the page once for each item; the last is written without one. Raises ValueError where the report of the
        complete runs cannot be made."""
        while True:
            summaries = [sweep_summary(folder) for folder in self.folders]  # before the rows: of no later state
            is_begun = any(summary.states for summary in summaries)
            if is_begun and not any(summary.is_left for summary in summaries):
                break
            self._write(summaries, self.seconds)
            if self._make(summaries):
                self._write(summaries, self.seconds)
            yield
        self._next = 0.0
        self._make(summaries)
        if self._problem:
            self._write(summaries)
            raise ValueError(self._problem)
        write_bytes(self.out, html(self.folders, self._parts).encode())

    def stop(self) -> None:
        """Write the page as of now, with the figures there are, so that it no longer loads itself again."""
        self._write([sweep_summary(folder) for folder in self.folders])

    def _make(self, summaries: Sequence[SweepSummary]) -> bool:
        """Make rows and figures again if they are due; whether they were."""
        begun, version = time.monotonic(), _version(self.folders)
        if version == self._version or begun < self._next:
            return False
        try:
            with open_store(*self.folders, skip_damaged=True) as store:
                self._parts = parts_of(store, self.folders, self._depth, self._objective, self._verified)
            self._problem = ""
        except ValueError as error:
            is_empty = not any(summary.counts["complete"] for summary in summaries)
            self._parts, self._problem = None, "no run is complete yet" if is_empty else str(error)
        self._version, self._duration = version, time.monotonic() - begun
        self._next = time.monotonic() + REST * self._duration
        return True

    def _write(self, summaries: Sequence[SweepSummary], seconds: float = 0.0) -> None:
        note = f"{self._problem[:1].upper()}{self._problem[1:]}. " if self._problem else ""
        if seconds:
            note += (
                f"This page loads itself again every {duration(seconds)} until no run is left, but not while a filter, "
                "a sorted table or an opened part is in use."
            )
        else:
            note += "This page is no longer written."
        names = [str(folder) if len(self.folders) > 1 else "" for folder in self.folders]
        now = time.time()
        live = {
            "sweeps": [_progress_of(summary, name) for summary, name in zip(summaries, names, strict=True)],
            "note": visible(note),
            "at": now,  # in seconds since 1970
            "written": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)),
            "seconds": seconds,  # until the page loads itself again; 0: never
            "silent": max(SILENT_SECONDS, 10 * seconds, 2 * self._duration),
        }
        write_bytes(self.out, html(self.folders, self._parts, live).encode())


def _version(folders: Sequence[Path]) -> str:
    """Changes when a run is completed or removed."""
    paths = [path for folder in folders for path in folder.glob(f"runs/*/{MARKER}")]
    return digest(sorted((str(path.parent), path.stat().st_mtime_ns) for path in paths))


def _progress_of(summary: SweepSummary, folder: str) -> dict[str, Any]:
    """The progress of a folder's sweep, as the template shows it: the lines of `status`, with each running run by what
    the sweep varies."""
    lines = []
    for state in summary.states:
        if state.state == "running":
            name = state.run_id
            if summary.definition and state.config:
                name = varied_fields(summary.definition, state.config)
            lines.append(f"running: {running_line(state, name)}")
    for (state, cause), n in summary.ended.most_common():
        lines.append(f"{state} {counted(n, 'run')}: {cause or 'no reason given'}")
    lines += [summary.best.text] if summary.best else []
    return {
        "folder": visible(folder),
        "share": summary.share,
        "percent": f"{math.floor(100 * summary.share)}%",
        "counts": summary.counts_text if summary.states else "no runs yet",
        "lines": [visible(line) for line in (*lines, *summary.remarks)],
    }
