"""The scratch folder of an unfinished run: its lock, checkpoints, log, progress and failures.

    RESULTS/work/<run_id>/   lock  config.yaml  log.txt  progress.json  failures.json  memory.json
                             pruned.json  allocations.json
                             checkpoints/
                             record-<token>/<run_id>/   the record while it is written

It is no part of the record and can be deleted when nothing runs. The lock falls with its process, however that dies,
so a run is never left locked (`lease`); what decides is the rename of the record into its place.
"""

import dataclasses
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sparsedepth import files
from sparsedepth.config.plain_text import visible
from sparsedepth.run.allocation import Allocation
from sparsedepth.store.checksums import RUN_ID
from sparsedepth.store.find import read_file

STACKED = "trains in one process with other runs, log: "


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How a run stood when it last wrote its progress."""

    phase: str
    done: float
    """share of the run, 0 to 1"""
    loss: float | None
    at: float
    """Unix time"""
    left: float | None = None
    """estimated seconds to the end of the run"""
    elapsed: float = 0.0
    """seconds since the run's process started"""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A run that was ended early, since finished runs were better by then: no result, and none to be had."""

    step: int
    reason: str


@dataclass(frozen=True)
class Scratch:
    """The scratch folder of one run."""

    results: Path
    run_id: str

    @property
    def folder(self) -> Path:
        return self.results / "work" / self.run_id

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def last_log_line(self) -> str:
        """The last line of the log."""
        try:
            lines = visible(self.log.read_text(errors="replace"), keep="\n\r").splitlines()
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def refer_to(self, leader: "Scratch") -> None:
        """Note in the log that the run trains in one process with others, whose log lies with the first of them."""
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{STACKED}../{leader.run_id}/log.txt\n")

    def leader(self) -> "Scratch | None":
        """The run in whose log this run's last lines stand, if they are not in its own: the first of its stack."""
        named = re.fullmatch(rf"{STACKED}\.\./({RUN_ID})/log\.txt", self.last_log_line())
        return Scratch(self.results, named[1]) if named else None

    def write_progress(
        self, phase: str, done: float, loss: float | None = None, left: float | None = None, elapsed: float = 0.0
    ) -> None:
        """Replace progress.json. Not flushed to disk: it is worth little after a crash."""
        content = {"phase": phase, "done": done, "loss": loss, "at": time.time(), "left": left, "elapsed": elapsed}
        aside = self.folder / f".progress-{os.getpid()}"
        aside.write_text(json.dumps(content))
        os.replace(aside, self.folder / "progress.json")

    def progress(self) -> Progress | None:
        """How the run last stood, or None."""
        content = self._read("progress.json")
        if not isinstance(content, dict) or set(content) != set(Progress.__annotations__):
            return None
        numbers = (content["done"], content["at"], content["loss"] or 0.0, content["left"] or 0.0, content["elapsed"])
        whole = isinstance(content["phase"], str) and all(isinstance(number, int | float) for number in numbers)
        return dataclasses.replace(Progress(**content), phase=visible(content["phase"])) if whole else None

    def failures(self) -> list[str]:
        """The reasons of the attempts that failed."""
        content = self._read("failures.json")
        return [visible(str(reason)) for reason in content] if isinstance(content, list) else []

    def add_failure(self, reason: str) -> None:
        files.write_json(self.folder / "failures.json", [*self.failures(), reason])

    def prune(self, pruned: "Pruned") -> None:
        """Note that the run was ended early."""
        files.write_json(self.folder / "pruned.json", {"step": pruned.step, "reason": pruned.reason})

    def pruned(self) -> "Pruned | None":
        """Why and when the run was ended early, if it was."""
        content = self._read("pruned.json")
        if not isinstance(content, dict) or not isinstance(content.get("step"), int):
            return None
        return Pruned(step=content["step"], reason=visible(str(content.get("reason"))))

    def clear_failures(self) -> None:
        """Forget, too, what did not fit into memory: perhaps there is more of it now."""
        for name in ("failures.json", "memory.json"):
            (self.folder / name).unlink(missing_ok=True)

    def micro_batch(self) -> int | None:
        """Sequences per forward pass that may fit into memory, as far as the run has found out; None: not at all."""
        content = self._read("memory.json")
        known = content.get("micro_batch") if isinstance(content, dict) else None
        return known if isinstance(known, int) and known > 0 else None

    def infeasible(self) -> str | None:
        """Why the run does not fit into memory even with one sequence per forward pass."""
        content = self._read("memory.json")
        return visible(str(content["infeasible"])) if isinstance(content, dict) and content.get("infeasible") else None

    def lower_memory(self, tried: int, reason: str) -> bool:
        """Note that `tried` sequences per forward pass were too many: half next, or none. False: infeasible."""
        lower = {"micro_batch": (tried + 1) // 2} if tried > 1 else {"infeasible": reason}
        files.write_json(self.folder / "memory.json", lower)
        return tried > 1

    def begin(self, given: Allocation | None) -> None:
        """Note which task of a cluster has the run in hand from now on, if one has; for the holder of its lease."""
        starts = [*self.allocations(), *([given] if given else [])]
        if starts:
            (self.folder / "progress.json").unlink(missing_ok=True)  # the last start's; this one's is still to come
            files.write_json(self.folder / "allocations.json", [asdict(start) for start in starts])

    def allocations(self) -> list[Allocation]:
        """The tasks of a cluster that have, or had, the run in hand, one for each start of its process."""
        try:
            starts = TypeAdapter(list[Allocation]).validate_python(self._read("allocations.json") or [])
        except ValidationError:
            return []
        if starts and starts[-1].seconds is None and (progress := self.progress()):
            starts[-1] = dataclasses.replace(starts[-1], seconds=round(progress.elapsed, 3))
        return starts

    def _read(self, name: str) -> Any:
        try:
            return files.parse_json(read_file(self.folder, name))
        except (OSError, ValueError):
            return None
