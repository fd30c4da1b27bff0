"""The scratch folder of an unfinished run: its lock, checkpoints, log, progress, failures, and Slurm tasks.

    RESULTS/work/<run_id>/   lock  config.yaml  log.txt  progress.json  failures.json  memory.json
                             pruned.json  allocations.json
                             checkpoints/
                             record-<token>/<run_id>/   the record while it is being written
    RESULTS/work/trunk-<key>/   checkpoints before the decay of runs of schedule wsd, for runs that train for longer

It is not part of the record, and can be deleted while nothing runs. The lock is released when its process dies."""

import contextlib
import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from sparsedepth import files
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.config.sweep import read_definition
from sparsedepth.store.checksums import RUN_ID
from sparsedepth.store.packs import read_file
from sparsedepth.train.checkpoint_files import remove_checkpoints
from sparsedepth.words.plain_text import last_line, visible

ONE_SEQUENCE = "out of memory with one sequence per forward pass"

SILENT_SECONDS = 120.0

STACKED = "trains in one process with other runs, log: "


@dataclass(frozen=True, kw_only=True)
class Progress:
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

    @property
    def is_silent(self) -> bool:
        """Whether there was no output for minutes: its machine may be down."""
        return time.time() - self.at > SILENT_SECONDS


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The Slurm task of one start of a run's process, from Slurm's environment variables."""

    task: str
    """12_3: job id of the array and task number; 12 outside of an array"""
    node: str
    partition: str
    nodes: int
    cpus: int
    """per node"""
    gpus: int
    """of all nodes"""
    restarts: int
    """how often the task had been requeued"""
    runs: int = 1
    """computed in parallel by the task, including this one"""
    seconds: float | None = None
    """time spent on the run so far"""


_PROGRESS, _STARTS = TypeAdapter(Progress), TypeAdapter(list[Allocation])


def node_hours(starts: Iterable[Allocation]) -> float:
    """nodes * seconds / (3600 * runs), summed over the starts; by the process's own clock."""
    return sum(start.nodes * (start.seconds or 0.0) / (3600 * start.runs) for start in starts)


def manifest_facts(starts: Sequence[Allocation]) -> Fields:
    """For a run's manifest: its starts, without node names, and their node hours; empty if there are none."""
    tasks = [{key: value for key, value in asdict(start).items() if key != "node"} for start in starts]
    return {"node_hours": node_hours(starts), "allocations": tasks} if tasks else {}


def allocation(runs: int = 1, environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The Slurm task of this process, which computes `runs` in parallel; None outside of Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return None

    own = {name: value for name, value in environment.items() if name.startswith("SLURM")}
    facts = defaultdict(str, {name.removeprefix("SLURM_"): value for name, value in own.items()})

    def count(name: str, default: int) -> int:
        return int(facts[name]) if facts[name].isdigit() else default

    array = facts["ARRAY_JOB_ID"]
    number = facts["ARRAY_TASK_ID"]
    nodes = count("JOB_NUM_NODES", 1)
    return Allocation(
        task=f"{array}_{number}" if array and number else facts["JOB_ID"],
        node=facts["SLURMD_NODENAME"],
        partition=facts["JOB_PARTITION"],
        nodes=nodes,
        cpus=count("CPUS_ON_NODE", 1),
        gpus=count("GPUS_ON_NODE", len(list(filter(None, facts["JOB_GPUS"].split(","))))) * nodes,
        restarts=count("RESTART_COUNT", 0),
        runs=runs,
    )


class TimeLeft:
    """The seconds left, by the pace since the first share above 0, at which a resumed run starts; None until known."""

    def __init__(self) -> None:
        self.start: tuple[float, float] | None = None
        """(time, share done)"""

    def __call__(self, done: float) -> float | None:
        now = time.monotonic()
        if self.start is None and done > 0:
            self.start = now, done
        if self.start is None or done <= self.start[1]:
            return None
        started, share = self.start
        return (1 - done) * (now - started) / (done - share)


def trunk_folder(results: Path, config: RunConfig) -> Path | None:
    """The checkpoints that runs of one trunk share; None if the schedule has no trunk, and outside a sweep, which knows
    when no run needs them any more."""
    if config.trunk_key is None or read_definition(results) is None:
        return None
    return results / "work" / f"trunk-{config.trunk_key}"


class Recorded(NamedTuple):
    failures: tuple[str, ...]
    """why each failed attempt failed"""
    pruned: str | None
    """why the run was pruned"""
    infeasible: str | None
    """why it does not fit into memory: in training with one sequence per forward pass, or in measuring"""
    micro_batch: int | None
    """sequences per forward pass to try next, after memory ran out"""


class Scratch:
    def __init__(self, results: Path, run_id: str):
        self.results = results
        self.run_id = run_id
        self.folder = results / "work" / run_id
        self.lock, self.checkpoints, self.log = (self.folder / name for name in ("lock", "checkpoints", "log.txt"))

    def read_log(self) -> bytes:
        return self.log.read_bytes() if self.log.is_file() else b""

    def note_leader(self, leader: "Scratch") -> None:
        """Write into the log that the run trains in the process of `leader`, and logs there."""
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{STACKED}../{leader.run_id}/log.txt\n")

    def leader(self) -> "Scratch | None":
        """The first run of this run's stack, which has the log; None if the run has its own."""
        named = re.fullmatch(
            rf"{STACKED}\.\./({RUN_ID})/log\.txt", last_line(self.read_log().decode(errors="replace"), "")
        )
        return Scratch(self.results, named[1]) if named else None

    def write_progress(
        self, phase: str, done: float, loss: float | None = None, left: float | None = None, elapsed: float = 0.0
    ) -> None:
        """Replace progress.json. Not flushed to disk, since it is not needed after a crash."""
        content = {"phase": phase, "done": done, "loss": loss, "at": time.time(), "left": left, "elapsed": elapsed}
        temporary = self.folder / f".progress-{os.getpid()}"
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self.folder / "progress.json")

    def progress(self) -> Progress | None:
        try:
            progress = _PROGRESS.validate_python(self._read("progress.json"))
        except ValidationError:
            return None
        return replace(progress, phase=visible(progress.phase))

    def recorded(self) -> Recorded:
        """What processes of the run have recorded, apart from its result; nothing where a file is damaged."""
        failures = self._read("failures.json")
        memory = self._read_object("memory.json")
        pruned = self._read_object("pruned.json")
        size = memory.get("micro_batch")
        shortage = memory.get("infeasible")
        return Recorded(
            tuple(visible(str(reason)) for reason in failures) if isinstance(failures, list) else (),
            visible(str(pruned.get("reason"))) if isinstance(pruned.get("step"), int) else None,
            visible(str(shortage)) if shortage else None,
            size if isinstance(size, int) and size > 0 else None,
        )

    def add_failure(self, reason: str) -> None:
        files.write_json(self.folder / "failures.json", [*self.recorded().failures, reason])

    def prune(self, step: int, reason: str) -> None:
        """Record that the run was ended early, because finished runs were better at that step; it has no result."""
        files.write_json(self.folder / "pruned.json", {"step": step, "reason": reason})

    def refuse_links(self) -> None:
        """Raises ValueError if a folder that the run writes to is a link."""
        files.refuse_links(self.results, self.checkpoints, self.results / "runs")

    def delete_leftovers(self) -> None:
        """Delete the checkpoints, and records that were not finished."""
        with contextlib.suppress(OSError):  # another process, presumed dead, may be writing a checkpoint
            remove_checkpoints(self.checkpoints)
        for record in self.folder.glob("record-*"):
            if not record.is_symlink():
                shutil.rmtree(record, ignore_errors=True)

    def clear_failures(self) -> None:
        """Also clears what did not fit into memory, since more may be free now."""
        for name in ("failures.json", "memory.json"):
            (self.folder / name).unlink(missing_ok=True)

    def halve_micro_batch(self, tried: int, reason: str) -> bool:
        """Record that `tried` sequences per forward pass did not fit: try half next. False if one did not fit."""
        if tried > 1:
            files.write_json(self.folder / "memory.json", {"micro_batch": (tried + 1) // 2})
        else:
            self.set_infeasible(f"{ONE_SEQUENCE}: {reason}")
        return tried > 1

    def set_infeasible(self, reason: str) -> None:
        """Record that the run does not fit into memory at all."""
        files.write_json(self.folder / "memory.json", {"infeasible": reason})

    def begin(self, allocation: Allocation | None) -> None:
        """Record the Slurm task that computes the run from now on, if any. Only for the holder of the lease."""
        starts = [*self.allocations(), *([allocation] if allocation else [])]
        if starts:
            (self.folder / "progress.json").unlink(missing_ok=True)  # belongs to the previous start
            files.write_json(self.folder / "allocations.json", [asdict(start) for start in starts])

    def allocations(self) -> list[Allocation]:
        """The Slurm tasks that computed the run, one for each start of its process."""
        try:
            starts = _STARTS.validate_python(self._read("allocations.json") or [])
        except ValidationError:
            return []
        if starts and starts[-1].seconds is None and (progress := self.progress()):
            starts[-1] = replace(starts[-1], seconds=round(progress.elapsed, 3))
        return starts

    def _read(self, name: str) -> Any:
        try:
            return files.parse_json(read_file(self.folder, name))
        except (OSError, ValueError):
            return None

    def _read_object(self, name: str) -> Fields:
        content = self._read(name)
        return content if isinstance(content, dict) else {}
