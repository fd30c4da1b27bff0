"""The results folder of a sweep: claim it, give it a permanent id, delete leftovers of dead processes. No torch."""

import contextlib
import fcntl
import os
import re
import tempfile
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path

from sparsedepth import files
from sparsedepth.config.load import yaml_text
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import DEFINITION, SweepDefinition, read_definition
from sparsedepth.run.lease import is_held
from sparsedepth.run.scratch import Scratch, trunk_folder
from sparsedepth.store import run_record
from sparsedepth.store.records import refuse_pack
from sparsedepth.sweep.run_end import write_attempts
from sparsedepth.sweep.status import scan
from sparsedepth.train.checkpoint_files import remove_checkpoints

TEMPORARY = re.compile(
    r"^\.(room-\d+|progress-\d+|[a-z0-9.-]*lock-[0-9a-f]{32}|folder-id-[0-9a-f]{32}|.+\.tmp-[0-9a-f]+)$"
)
"""Temporary files that are renamed at once; older than TEMPORARY_SECONDS, their process has died."""

TEMPORARY_SECONDS = 600.0

FOLDER_ID = Path("work", "folder-id")


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


def prepare(results: Path, definition: SweepDefinition, max_attempts: int, *, retry_failed: bool) -> None:
    """Claim the folder, and store what readers of the sweep need. With `retry_failed`, forget the failures of all runs
    that are not being computed, and what did not fit into memory. Raises ValueError as `claim`."""
    claim(results, definition)
    delete_leftovers(results)
    write_attempts(results, max_attempts)
    if retry_failed:
        for state in scan(results, definition, max_attempts=max_attempts):
            if state.state != "running":
                Scratch(results, state.run_id).clear_failures()


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
        fix = f"if {results / DEFINITION} is damaged, delete it and run the same command to write it again"
        raise ValueError(f"{error}; {fix}") from None
    models = (*results.glob("*.safetensors"), *results.glob("*/*.safetensors")) if before is None else ()
    if models:
        raise ValueError(f"{results} holds a model ({models[0].relative_to(results)}), and no sweep; name a new --out")
    if before and (before.name, before.base) != (definition.name, definition.base):
        reason, fix = repr(before.name), "choose another --out"
        if before.name == definition.name:
            keys = sorted({*before.base, *definition.base})
            fields = ", ".join(key for key in keys if before.base.get(key) != definition.base.get(key))
            reason = f"base differs in {fields}"
            fix = f"keep its base and vary {fields} under 'space', or {fix}"
        together = "best, plot, effects and recipe read several folders at once: best A B"
        raise ValueError(f"{results} holds another sweep ({reason}), not {definition.name!r}; {fix} ({together})")


def delete_leftovers(results: Path) -> None:
    """Delete leases and temporary files of dead processes, and checkpoints of finished runs."""
    now = _file_system_time(results)
    for path in results.glob("work/sweep-*.lock"):
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
    trunks: dict[Path, bool] = {}
    for config in runs:
        if folder := trunk_folder(results, config):
            is_complete = run_record.is_complete(run_record.run_folder(results, config.run_id))
            trunks[folder] = trunks.get(folder, True) and is_complete
    for folder, is_finished in trunks.items():
        if is_finished:
            remove_checkpoints(folder)


def _file_system_time(results: Path) -> float:
    """Now, by the clock that dates the folder's files; on a shared folder this machine's may differ."""
    try:
        with tempfile.TemporaryFile(dir=results) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # the folder cannot be written any more
        return time.time()


def folder_id(results: Path) -> str:
    """The folder's permanent id: folders that share a database share no study. Raises ValueError if it is damaged."""
    path = results / FOLDER_ID
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".folder-id-{uuid.uuid4().hex}")
        temporary.write_text(uuid.uuid4().hex)
        files.sync(temporary)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(temporary, path)
        temporary.unlink()
    if not re.fullmatch("[0-9a-f]{32}", name := path.read_text(errors="replace")):
        raise ValueError(f"{path} is damaged; delete it, and run the same command to rebuild the study from the runs")
    return name
