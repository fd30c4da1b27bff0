"""Which runs have ended, with a result or without one, so that a sweep does not compute them again and tuning continues
without them: one rule for the driver, its workers, `status`, `plan` and Slurm. Without a result ended:

    pruned      while the definition prunes
    infeasible  out of memory
    failed      as many failures as a run may have (`--max-attempts`); with fewer it is computed again

The sweep writes its number of attempts into the folder, for readers that are not told.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from sparsedepth import files
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.run.lease import is_held
from sparsedepth.run.scratch import Scratch
from sparsedepth.store.records import is_pack, is_whole, read_summary
from sparsedepth.store.tuning_roles import objective_as_loss

ATTEMPTS = Path("work", "attempts.json")
EndState = Literal["failed", "infeasible", "pruned"]


class RunEnd(NamedTuple):
    state: EndState
    reason: str


EndRule = Callable[[Scratch], RunEnd | None]
"""How the run of a scratch folder ended without a result; None if it is to be computed."""


def end_rule(results: Path, definition: SweepDefinition | None, max_attempts: int | None = None) -> EndRule:
    """The rule of a sweep (None: of `train`, or unknown); its number of attempts is by default the folder's, else 1."""
    prunes = definition is None or definition.prune is not None
    attempts = max_attempts or _read_attempts(results)

    def end_of(scratch: Scratch) -> RunEnd | None:
        if prunes and (reason := scratch.pruned()):
            return RunEnd("pruned", reason)
        if shortage := scratch.infeasible():
            return RunEnd("infeasible", shortage)
        failures = scratch.failures()
        return RunEnd("failed", failures[-1]) if len(failures) >= attempts else None

    return end_of


def write_attempts(results: Path, max_attempts: int) -> None:
    (results / "work").mkdir(parents=True, exist_ok=True)
    files.write_json(results / ATTEMPTS, {"max_attempts": max_attempts})


def _read_attempts(results: Path) -> int:
    try:
        content = files.parse_json(files.read_regular(results / ATTEMPTS))
    except (OSError, ValueError):
        return 1
    attempts = content.get("max_attempts") if isinstance(content, dict) else None
    return attempts if isinstance(attempts, int) and attempts > 0 else 1


def has_begun(scratch: Scratch) -> bool:
    """Whether the run has been begun: avoids opening several files for each planned run."""
    return scratch.folder.exists() or is_pack(scratch.results)


class ResultsIndex:
    """Which runs of a sweep have ended, and their losses; each record is checked and read once. With `is_read_only`,
    where other processes may be writing: a run that is held has not ended, and each scratch folder is read once."""

    def __init__(
        self, results: Path, definition: SweepDefinition, max_attempts: int | None = None, *, is_read_only: bool = False
    ) -> None:
        self.results, self.objective, self._is_read_only = results, definition.objective, is_read_only
        self._rule = end_rule(results, definition, max_attempts)
        self._complete: set[str] = set()
        self._losses: dict[str, float] = {}
        self._ends: dict[str, RunEnd | None] = {}

    def loss_of(self, run_id: str) -> float | None:
        """The first objective as a loss (lower is better): math.inf if it diverged, was not scored or ended without a
        result; None if it has not ended."""
        if run_id not in self._losses:
            if not self.is_complete(run_id):
                return math.inf if self.end(run_id) else None
            self._losses[run_id] = objective_as_loss(read_summary(self.results, run_id), self.objective)
        return self._losses[run_id]

    def is_complete(self, run_id: str) -> bool:
        """Whether the run is complete and undamaged."""
        if run_id not in self._complete and is_whole(self.results, run_id):
            self._complete.add(run_id)
        return run_id in self._complete

    def end(self, run_id: str) -> RunEnd | None:
        """How an incomplete run ended; None if it is to be computed."""
        scratch = Scratch(self.results, run_id)
        if not self._is_read_only:
            return self._rule(scratch)
        if run_id not in self._ends:
            self._ends[run_id] = self._rule(scratch) if has_begun(scratch) and not is_held(scratch.lock) else None
        return self._ends[run_id]

    def state(self, run_id: str) -> str | None:
        """'complete', or how the run ended without a result; None if it is to be computed."""
        if self.is_complete(run_id):
            return "complete"
        end = self.end(run_id)
        return end and end.state
