"""When a sweep gives up: its runs fail one after the other, which says that the cause is not theirs."""

from collections.abc import Callable
from pathlib import Path

from sparsedepth.sweep.status import RunState

MAX_FAILURES = 3
"""Runs that may fail one after the other, with none completed between, before the sweep stops."""


class Failures:
    """Counts the runs that have failed since the last one that was completed."""

    def __init__(self, failed_permanently: Callable[[str], bool]):
        self.failed_permanently = failed_permanently
        self.known: set[str] = set()
        self.in_a_row: list[str] = []
        self.last_reason: str | None = None

    def see(self, states: list[RunState], *, before: bool) -> bool:
        """Note what has changed since the last call; what ended `before` this invocation does not count.

        Returns whether a run has been completed since.
        """
        completed = False
        for state in states:
            failed = state.state == "failed" and self.failed_permanently(state.run_id)
            if state.run_id in self.known or not (failed or state.state == "complete"):
                continue
            self.known.add(state.run_id)
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

    def explain(self, results: Path) -> None:
        """Raise ValueError with the last reason, if there are too many."""
        if self.too_many:
            raise ValueError(
                f"{len(self.in_a_row)} runs failed one after the other, the last with: {self.last_reason}. "
                f"Their logs are {results / 'work'}/*/log.txt; mend the cause and give the same command again "
                f"with --retry-failed"
            )
