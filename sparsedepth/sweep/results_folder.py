"""The results folder of a sweep: claim it, give it a permanent id, delete leftovers of dead processes; and which of its
runs have ended, so that a sweep does not compute them again and tuning continues without them. No torch.

One rule of that serves the driver, its workers, `status`, `plan` and Slurm. Without a result ended:

    pruned      while the definition prunes
    infeasible  out of memory
    failed      as many failures as a run may have (`--max-attempts`); with fewer it is computed again

The sweep writes its number of attempts into the folder, for readers that are not told."""

import contextlib
import fcntl
import math
import os
import re
import tempfile
import time
import uuid
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from sparsedepth import files
from sparsedepth.config.load import yaml_text
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import DEFINITION, SweepDefinition, read_definition
from sparsedepth.run.lease import is_held
from sparsedepth.run.scratch import Scratch, trunk_folder
from sparsedepth.store import run_record
from sparsedepth.store.checksums import RUN_ID
from sparsedepth.store.packs import is_pack, is_whole, open_pack, read_summary, refuse_pack
from sparsedepth.store.tuning_roles import objective_as_loss
from sparsedepth.train.checkpoint_files import remove_checkpoints

TEMPORARY = re.compile(
    r"^\.(room-\d+|progress-\d+|[a-z0-9.-]*lock-[0-9a-f]{32}|folder-id-[0-9a-f]{32}|.+\.tmp-[0-9a-f]+)$"
)
"""Temporary files that are renamed at once; older than TEMPORARY_SECONDS, their process has died."""

TEMPORARY_SECONDS = 600.0
SWEEP_LEASES = "work/sweep-*.lock"

ATTEMPTS = Path("work", "attempts.json")
EndState = Literal["failed", "infeasible", "pruned"]
Ended = Literal["complete"] | EndState
FAILED = ("failed", "infeasible")
"""What `--retry-failed` tries again."""


def lease_path(results: Path, lease_id: str) -> Path:
    """The lease of a sweep process for its trials. Raises ValueError for an invalid id from a shared storage."""
    return results / SWEEP_LEASES.replace("*", uuid.UUID(hex=lease_id).hex)


def claim(results: Path, definition: SweepDefinition) -> None:
    """Make `results` the folder of this sweep. Raises ValueError if it is another sweep's, or cannot be written."""
    refuse_pack(results)
    written = (*results.glob("work"), *results.glob("work/*"), *results.glob("work/*/checkpoints"))
    files.refuse_links(results, results / "runs", *written)
    try:
        results.mkdir(parents=True, exist_ok=True)
        with _locked_folder(results):
            check_same_sweep(results, definition)
            content = definition.model_dump(mode="json", exclude_unset=True, exclude={"scales"})
            files.write_text(results / DEFINITION, yaml_text(content, allow_unicode=True))
    except OSError as error:
        raise ValueError(f"{results} cannot be written ({error.strerror}); choose another --out") from None


def prepare(results: Path, definition: SweepDefinition, max_attempts: int) -> None:
    """Claim the folder, and store what readers of the sweep need. Raises ValueError as `claim`."""
    claim(results, definition)
    delete_leftovers(results)
    write_attempts(results, max_attempts)


def write_attempts(results: Path, max_attempts: int) -> None:
    (results / "work").mkdir(parents=True, exist_ok=True)
    files.write_json(results / ATTEMPTS, {"max_attempts": max_attempts})


@contextlib.contextmanager
def _locked_folder(results: Path) -> Generator[None]:
    """Locks the folder itself, if the file system can, so that two sweeps do not claim it at the same time."""
    handle = os.open(results, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_same_sweep(results: Path, definition: SweepDefinition) -> None:
    """Raises ValueError if the folder is another sweep's, with the ways to have both."""
    try:
        before = read_definition(results)
    except ValueError as error:
        raise ValueError(
            f"{error}; if {results / DEFINITION} is damaged, delete it and run the same command to write it again"
        ) from None
    models = (*results.glob("*.safetensors"), *results.glob("*/*.safetensors")) if before is None else ()
    if models:
        raise ValueError(f"{results} holds a model ({models[0].relative_to(results)}), and no sweep; name a new --out")
    if before and (before.name, before.base) != (definition.name, definition.base):
        reason = repr(before.name)
        fix = "choose another --out"
        if before.name == definition.name:
            keys = sorted({*before.base, *definition.base})
            fields = ", ".join(key for key in keys if before.base.get(key, ...) != definition.base.get(key, ...))
            reason = f"base differs in {fields}"
            fix = f"keep its base and vary {fields} under 'space', or {fix}"
        raise ValueError(
            f"{results} holds another sweep ({reason}), not {definition.name!r}; {fix} (best, plot, "
            "effects and recipe read several folders at once: best A B)"
        )


def delete_leftovers(results: Path) -> None:
    """Delete leases and temporary files of dead processes, and checkpoints of finished runs."""
    now = _file_system_time(results)
    for path in results.glob(SWEEP_LEASES):
        if not is_held(path, now):
            path.unlink(missing_ok=True)
    for path in (*results.glob(".*"), *results.glob("work/.*"), *results.glob("work/*/.*")):
        with contextlib.suppress(OSError):
            if TEMPORARY.search(path.name) and path.is_file() and now - path.stat().st_mtime > TEMPORARY_SECONDS:
                path.unlink()
    for marker in results.glob(f"runs/*/{run_record.MARKER}"):
        scratch = Scratch(results, marker.parent.name)
        if not is_held(scratch.lock, now):
            scratch.delete_leftovers()


def delete_trunks(results: Path, runs: Sequence[RunConfig]) -> None:
    """Delete the trunks of which every run is complete."""
    trunks = {run.run_id: folder for run in runs if (folder := trunk_folder(results, run))}
    complete = {run_id for run_id in trunks if run_record.is_complete(run_record.run_folder(results, run_id))}
    for folder in {*trunks.values()} - {folder for run_id, folder in trunks.items() if run_id not in complete}:
        remove_checkpoints(folder)


def _file_system_time(results: Path) -> float:
    """Now, by the clock that dates the folder's files; on a shared folder this machine's may differ."""
    try:
        with tempfile.TemporaryFile(dir=results) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # the folder cannot be written any more
        return time.time()


class RunEnd(NamedTuple):
    state: EndState
    reason: str


def read_attempts(results: Path) -> int:
    """Those of the sweep; 1 where none are written."""
    try:
        content = files.parse_json(files.read_regular(results / ATTEMPTS))
    except (OSError, ValueError):
        return 1
    attempts = content.get("max_attempts") if isinstance(content, dict) else None
    return attempts if isinstance(attempts, int) and attempts > 0 else 1


def run_ids(results: Path, kind: Literal["runs", "work"]) -> set[str]:
    """The runs of the folder or pack that have a record, which may be damaged, or a scratch folder, which complete runs
    have, too."""
    names: Collection[str]
    if is_pack(results):
        pack = open_pack(results)
        names = pack.run_ids if kind == "runs" else [place.partition("/")[2] for place in pack.places(kind)]
    else:
        names = os.listdir(results / kind) if (results / kind).is_dir() else []
    return {name for name in names if re.fullmatch(RUN_ID, name)}


class ResultsIndex:
    """Which runs of a sweep have ended, and their losses: the record of a sweep, from which its queue is derived. Each
    record is checked and read once; of a run without one it is asked anew, since other processes may be writing."""

    def __init__(self, results: Path, definition: SweepDefinition | None, max_attempts: int | None = None) -> None:
        """`definition`: None for `train`, or unknown; `max_attempts`: by default the folder's, else 1."""
        self.results = results
        self.definition = definition
        self._attempts = max_attempts or read_attempts(results)
        self.complete: set[str] = set()
        """runs that were found complete and undamaged"""
        self._losses: dict[str, float] = {}
        self._is_pack = is_pack(results)

    def loss_of(self, run_id: str) -> float | None:
        """As `LossOf`; math.inf also if the run was not scored, was pruned or does not fit into memory."""
        if run_id not in self._losses:
            if not self.is_complete(run_id):
                return math.inf if self.end(run_id) else None
            assert self.definition is not None
            self._losses[run_id] = objective_as_loss(read_summary(self.results, run_id), self.definition.objective)
        return self._losses[run_id]

    def is_complete(self, run_id: str) -> bool:
        """Whether the run is complete and undamaged."""
        if run_id not in self.complete and self._exists("runs", run_id) and is_whole(self.results, run_id):
            self.complete.add(run_id)
        return run_id in self.complete

    def end(self, run_id: str) -> RunEnd | None:
        """How an incomplete run ended; None if it is to be computed, or is being computed."""
        if not self._exists("work", run_id):
            return None
        scratch = Scratch(self.results, run_id)
        return None if is_held(scratch.lock) else self.recorded_end(scratch)

    def recorded_end(self, scratch: Scratch) -> RunEnd | None:
        """How the run of a scratch folder ended without a result; None if it is to be computed."""
        recorded = scratch.recorded()
        if recorded.pruned and (self.definition is None or self.definition.prune):
            return RunEnd("pruned", recorded.pruned)
        if recorded.infeasible:
            return RunEnd("infeasible", recorded.infeasible)
        return RunEnd("failed", recorded.failures[-1]) if len(recorded.failures) >= self._attempts else None

    def state(self, run_id: str) -> Ended | None:
        """'complete', or how the run ended without a result; None if it is to be computed."""
        if self.is_complete(run_id):
            return "complete"
        end = self.end(run_id)
        return end and end.state

    def _exists(self, kind: str, run_id: str) -> bool:
        """Whether the run has a folder: of thousands of planned runs most have none."""
        return self._is_pack or os.path.exists(f"{self.results}/{kind}/{run_id}")
