"""Stop a sweep after several failed runs in a row, which suggests a common cause."""

from collections.abc import Callable
from pathlib import Path

from sparsedepth.sweep.status import RunState

MAX_FAILURES = 3
"""Failed runs in a row, with no completed run in between, after which the sweep stops."""


class Failures:
    def __init__(self, failed_permanently: Callable[[str], bool]):
        self.failed_permanently = failed_permanently
        self.counted: set[str] = set()
        self.in_a_row: list[str] = []
        self.last_reason: str | None = None

    def update(self, states: list[RunState], *, before: bool) -> bool:
        """Count new failures, except those from `before` this invocation. Returns whether a run has been completed."""
        completed = False
        for state in states:
            failed = state.state == "failed" and self.failed_permanently(state.run_id)
            if state.run_id in self.counted or not (failed or state.state == "complete"):
                continue
            self.counted.add(state.run_id)
            if failed and not before:
                self.in_a_row.append(state.run_id)
                self.last_reason = state.reason
            elif not failed:
                self.in_a_row.clear()
                completed = True
        return completed

    @property
    def too_many(self) -> bool:
        return len(self.in_a_row) >= MAX_FAILURES

    def check(self, results: Path) -> None:
        """Raises ValueError with the last reason if there are too many failures."""
        if self.too_many:
            raise ValueError(
                f"{len(self.in_a_row)} runs failed in a row, the last with: {self.last_reason}. See the logs in "
                f"{results / 'work'}/*/log.txt, fix the cause, and run the same command again with --retry-failed"
            )
