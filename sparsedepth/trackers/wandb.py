"""Weights & Biases, offline: a folder per run, for the user to upload with `wandb sync`."""

import json
import os
import shlex
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from sparsedepth.config.load import read_yaml
from sparsedepth.files import parse_json, read_regular
from sparsedepth.trackers.runs import LoggedRun, TrackedRun

HEADER = b":W&B\xe1\xbe\x00"
"""of a .wandb file: name, magic number, version 0"""
BLOCK = 32768
MAX_BYTES = 1_000_000_000


class Tracker:
    """A folder of offline runs."""

    def __init__(self, folder: Path, at: str | None, project: str) -> None:
        """`at`: the folder in which wandb makes its own, below one of the project."""
        self.folder, self.project = Path(at or folder, project).resolve(), project
        self.place = str(self.folder)
        self.view_command = f"wandb sync {shlex.quote(self.place)}/wandb/offline-run-*   (uploads)"

    def held(self) -> None:
        """Unknown: `wandb sync --clean` removes uploaded runs."""

    def discard(self, run_id: str) -> None:
        for folder in self.folder.glob(f"wandb/offline-run-*-{run_id}"):
            shutil.rmtree(folder)

    def send(self, run: TrackedRun) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            mode="offline", silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        tags = [value for name, value in run.tags.items() if name in ("outcome", "tuning")]
        config = {**run.params, **{f"tag_{name}": value for name, value in run.tags.items()}}
        place = {"id": run.run_id, "name": run.run_id, "project": self.project, "dir": self.folder}
        started = wandb.init(**place, config=config, tags=tags, settings=settings)
        for step, values in run.curves:
            started.log(values, step=step, commit=True)  # else the last is written after the summary, over its values
        started.summary.update(run.summary)
        started.finish(exit_code=int(run.tags.get("outcome") == "diverged"))


def read(place: str) -> Iterator[LoggedRun]:
    """The runs of a .wandb file, or of the runs' folders at and below a place, in order of their start. The folders of
    a run that was resumed are one: its later values count, and its last end."""
    folder = Path(place)
    parts = [folder] if folder.is_file() else sorted(folder.rglob("run-*.wandb"))
    logged = {path.parent for path in parts}
    parts += [path.parent for path in folder.rglob("files/config.yaml") if path.parents[1] not in logged]
    runs: dict[str, LoggedRun] = {}
    for part in sorted(parts, key=lambda part: part.parent.name.removeprefix("offline-")):
        run = _of_folder(part) if part.is_dir() else _of_file(part)
        first = runs.get(run.id, run)
        values = {"config": {**first.config, **run.config}, "metrics": {**first.metrics, **run.metrics}}
        runs[run.id] = replace(run, name=run.name or first.name, **values)
    yield from runs.values()


def _of_folder(files: Path) -> LoggedRun:
    """The run of config.yaml and wandb-summary.json, which a run writes when it is logged online."""
    config = read_yaml(files / "config.yaml")
    version = config.pop("wandb_version", 1)
    if version != 1 or not all(isinstance(entry, dict) and "value" in entry for entry in config.values()):
        raise ValueError(f"{files / 'config.yaml'} is not of version 1, where each name has a value")
    run = LoggedRun(id=files.parent.name.split("-", 2)[-1], config={name: of["value"] for name, of in config.items()})
    summary = files / "wandb-summary.json"
    if not summary.exists():
        return replace(run, status="unfinished")
    return replace(run, metrics=parse_json(read_regular(summary, inside=files)))


def _of_file(path: Path) -> LoggedRun:
    """The run of a .wandb file: unfinished without its last record, if it was killed or the file is cut off."""
    run = LoggedRun(id=path.stem.removeprefix("run-"), status="unfinished")
    config, logged, summary = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for content in records(path):
        record = Record.FromString(content)
        if record.HasField("run"):
            name, project = record.run.display_name or None, record.run.project
            run = replace(run, id=record.run.run_id, name=name, project=project)
        elif record.HasField("exit"):
            run = replace(run, status="failed" if record.exit.exit_code else "finished")
        _update(config, (*record.run.config.update, *record.config.update))
        _update(logged, record.history.item)
        _update(summary, record.summary.update)
    return replace(run, config=config, metrics=logged | summary)


def _update(values: dict[str, Any], items: Iterable[Any]) -> None:
    """Set each item: a value in JSON at a key, or at a path of keys."""
    for item in items:
        *path, last = item.nested_key or [item.key]
        inner = values
        for key in path:
            inner[key] = inner[key] if isinstance(inner.get(key), dict) else {}
            inner = inner[key]
        inner[last] = json.loads(item.value_json)


def records(path: Path) -> Iterator[bytes]:
    """The records up to the end, or to where the file is cut off: LevelDB's log, with the CRC of zlib."""
    content, at, parts = read_regular(path, MAX_BYTES, path.parent), len(HEADER), list[bytes]()
    if not content.startswith(HEADER):
        raise ValueError(f"{path} is not a .wandb file of version 0")
    while at + 7 <= len(content):
        if (rest := BLOCK - at % BLOCK) < 7:
            at += rest  # padding
            continue
        kind, end = content[at + 6], at + 7 + int.from_bytes(content[at + 4 : at + 6], "little")
        if end > len(content):
            return
        if zlib.crc32(content[at + 6 : end]) != int.from_bytes(content[at : at + 4], "little"):
            raise ValueError(f"{path} is damaged at byte {at:,}")
        parts.append(content[at + 7 : end])
        at = end
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []
