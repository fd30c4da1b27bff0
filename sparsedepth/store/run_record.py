"""The run folder: the record of one run, complete or absent.

    RESULTS/runs/<run_id>/
        config.yaml       the RunConfig, all fields; or model.json, the facts of a model that was only measured; or
                          imported.json, the known facts of a run imported from a table
        manifest.json     how it was made: device, started, seconds, packages, ...
        summary.json      one value per quantity of quantities.RUNS; null if missing
        curves.parquet    one row per logged step            } where they apply
        layers.parquet    one row per step, layer and metric }
        heads.parquet     one row per step, head and metric  }
        pairs.parquet     one row per step, pair and metric  }
        tokens.parquet    one row per step and sampled token }
        difficulty.parquet  one row per step and difficulty of a task }
        model.safetensors the weights; copies may leave them out
        complete          last: {"run_id": ..., "files": {name: {"sha256": ..., "bytes": ...}}}

Each file is written under a temporary name and renamed, and `complete` is written after all others are on disk: a
folder without it is ignored. With it the folder never changes again, so it can be copied, merged and read without a
lock. Other files in the folder (a log, a checkpoint) are no part of the record. The record of a measured model may be
in a folder of any name, such as RESULTS/models/NAME; RESULTS/runs is for trained runs only."""

import contextlib
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparsedepth import quantities
from sparsedepth.config.load import MAX_BYTES as MAX_CONFIG_BYTES, build, parse_yaml, yaml_text
from sparsedepth.config.run import RunConfig, stored_config
from sparsedepth.files import (
    MARKER,
    atomic_folder,
    refuse_complete,
    refuse_current,
    sha256,
    temporary_path,
    write_bytes,
    write_json,
    write_text,
)
from sparsedepth.quantities.measured import PLUGINS
from sparsedepth.quantities.quantity import Named, Row, Table
from sparsedepth.store.checksums import RUN_ID, DamagedRun, Files, OtherVersion, files_in, is_complete, write_marker
from sparsedepth.store.parquet import file_schema, parse_table, table_bytes
from sparsedepth.store.schema import FILE_COLUMNS, KEYS, METRICS, TABLES
from sparsedepth.store.subject import ImportedRun, MeasuredModel
from sparsedepth.words.plain_text import did_you_mean

RUNS, MODELS, TOYS, EVALS = ("runs", "models", "toys", "evals")
"""The parts of a results folder: trained runs, models that were only measured, toy groups, evaluations."""
INDEX = "pack.json"
"""The file that makes a folder a pack."""
WEIGHTS = "model.safetensors"
CONFIG, MODEL, IMPORTED = "config.yaml", "model.json", "imported.json"
Subject = RunConfig | MeasuredModel | ImportedRun
SUBJECTS: Mapping[str, type[Subject]] = {CONFIG: RunConfig, MODEL: MeasuredModel, IMPORTED: ImportedRun}
"""A record has exactly one of these."""
REQUIRED = ("manifest.json", "summary.json")
FILES = (*SUBJECTS, *REQUIRED, *(f"{table}.parquet" for table in TABLES), WEIGHTS)
"""All files of a record; copies may lack the weights."""

_SEED = re.compile(r"^seed: (0|[1-9]\d{0,8})$", re.MULTILINE)


def subject_file(subject: Subject) -> str:
    """The file of a record that holds its subject."""
    return next(name for name, kind in SUBJECTS.items() if isinstance(subject, kind))


@dataclass(frozen=True, kw_only=True)
class Record:
    """A complete folder, read and verified."""

    run_id: str
    folder: Path
    subject: Subject
    summary: Named
    manifest: Named
    contents: Mapping[str, bytes]
    """The files, but for the weights."""

    @functools.cached_property
    def tables(self) -> dict[Table, pa.Table]:
        """Empty where the run has no such file. Raises DamagedRun."""
        return {table: parse_table(self.folder, table, self.contents.get(f"{table}.parquet")) for table in TABLES}

    @property
    def config(self) -> RunConfig:
        """Of a trained run."""
        assert isinstance(self.subject, RunConfig)
        return self.subject


# Writing


def run_folder(results: Path, run_id: str) -> Path:
    """`RESULTS/runs/<run_id>`. Raises ValueError for an invalid run_id, such as a path."""
    if not re.fullmatch(RUN_ID, run_id):
        raise ValueError(f"run_id {run_id[:40]!r} must be 12 hex digits, as RunConfig.run_id gives them")
    return results / RUNS / run_id


def write_config(folder: Path, config: RunConfig) -> None:
    """Write config.yaml with all fields, so that later changes of defaults do not affect the record."""
    write_text(folder / "config.yaml", yaml_text(config.model_dump(mode="json")))


def write_manifest(folder: Path, facts: Row) -> None:
    """Write manifest.json: how the run was made. Those in MANIFEST_COLUMNS become columns of `runs`."""
    write_json(folder / "manifest.json", _without_nan(dict(facts)))


def write_summary(folder: Path, summary: Row) -> None:
    """Write summary.json: all quantities of quantities.RUNS; missing ones, NaN and Inf are null."""
    names = [column.name for column in quantities.RUNS]
    for name in summary:
        assert name in names, f"{name!r} is not in quantities.RUNS; {did_you_mean(name, names, 'add it there')}"
    assert summary.get("outcome") in ("ok", "diverged"), f"outcome={summary.get('outcome')!r}, not ok or diverged"
    write_json(folder / "summary.json", _without_nan({name: summary.get(name) for name in names}))


def write_table(folder: Path, table: Table, rows: Iterable[Row]) -> None:
    """Write `<table>.parquet`."""
    write_bytes(folder / f"{table}.parquet", table_content(table, [*rows]))


def table_content(table: Table, rows: Sequence[Row]) -> bytes:
    """The file of a table, from one mapping per row; missing values, NaN and Inf are NULL."""
    _check_rows(table, rows)
    columns = {column.name: [_finite(row.get(column.name)) for row in rows] for column in FILE_COLUMNS[table]}
    return table_bytes(pa.table(columns, schema=file_schema(table)))


def finish(folder: Path, place: Path | None = None) -> None:
    """Complete the run: checksum and flush all files of the record, then write the marker. From here on the folder is
    read-only, and will be at `place`. Raises ValueError if a file is missing, is a link, or belongs to another run."""
    name, *others = [name for name in SUBJECTS if (folder / name).exists()] or [CONFIG]
    for needed in (name, *REQUIRED):
        if not (folder / needed).is_file():
            raise ValueError(f"run folder {str(folder)!r} cannot be completed without {needed}; write it first")
    if others:
        raise ValueError(f"{str(folder)!r} has {' and '.join((name, *others))}; a record has one of these")
    text = (folder / name).read_text(encoding="utf-8")
    subject = build(SUBJECTS[name], _parse_yaml(text) if name == CONFIG else json.loads(text), name)
    if name != MODEL and subject.run_id != (place or folder).name:
        raise ValueError(f"{str(folder / name)!r} is run {subject.run_id}; its folder must have that name")
    write_marker(folder, subject.run_id, FILES)


def check_place(out: Path) -> None:
    """Raises ValueError, one line, unless `out` is absent or an empty folder, in a folder that can be written."""
    temporary = temporary_path(out.resolve())
    if temporary.parent.name == "runs":
        models = str(temporary.parent.with_name("models"))
        raise ValueError(f"{str(out)!r} is among the trained runs; name a folder in {models!r}")
    refuse_complete(temporary.parent)
    refuse_current(out)
    try:
        if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{str(out)!r} is not an empty folder; name a new one with -o")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        temporary.rmdir()
    except OSError as error:
        raise ValueError(f"{str(out)!r} cannot be written ({error.strerror}); name another folder") from None


def save_measured(
    out: Path, model: MeasuredModel, summary: Row, manifest: Row, tables: Mapping[Table, Iterable[Row]]
) -> None:
    """`save_record` of a measured model. Raises as `check_place`."""
    check_place(out)
    save_record(out, model, {"outcome": "ok", "params_total": model.params_total, **summary}, manifest, tables)


def save_record(
    folder: Path,
    subject: MeasuredModel | ImportedRun,
    summary: Row,
    manifest: Row,
    tables: Mapping[Table, Iterable[Row]],
) -> None:
    """Write the record of a measured model, or of a point of somebody's training, atomically. Empty tables get no
    file."""
    with atomic_folder(folder) as aside:
        write_json(aside / subject_file(subject), subject.model_dump(mode="json"))
        write_manifest(aside, manifest)
        write_summary(aside, summary)
        for table, rows in tables.items():
            if rows := list(rows):
                write_table(aside, table, rows)
        finish(aside, folder)


def _check_rows(table: Table, rows: Sequence[Row]) -> None:
    names = [column.name for column in FILE_COLUMNS[table]]
    metrics = [metric.name for metric in METRICS.get(table, ())]
    seen = set()
    for row in rows:
        for name in row:
            assert name in names, f"{table} has no column {name!r}; it has {names}"
        if metrics:
            metric = str(row["metric"]).partition("@")[0]
            assert metric in metrics, (
                f"{metric!r} is no metric of {table}; {did_you_mean(metric, metrics, 'add it to its quantities')}"
            )
        key = tuple(row.get(name) for name in KEYS[table])
        assert None not in key, f"{table}: {dict(zip(KEYS[table], key, strict=True))} must be complete"
        assert key not in seen, f"{table}: two rows at {dict(zip(KEYS[table], key, strict=True))}"
        seen.add(key)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_nan(values: Named) -> Any:
    """The JSON object with None for each NaN and Inf in it."""
    return json.loads(json.dumps(values), parse_constant=lambda name: None)


# Reading


def run_files(files: Files) -> Files:
    """The files, if their marker is that of a record in a folder of this name. Raises DamagedRun."""
    folder = files.folder
    listed = files.marker.files
    run_id = files.marker.run_id
    if MODEL not in listed and run_id != folder.name and run_id != folder.resolve().name:  # for a folder given as '.'
        message = f"run folder {str(folder)!r} holds run {run_id[:40]!r} under another name; rename it to that"
        raise DamagedRun(folder, MARKER, f"is of run {run_id!r}, and the folder has another name", message)
    if unknown := set(listed) - set(FILES):
        raise DamagedRun(folder, MARKER, f"lists {sorted(unknown)[0][:40]!r}, which is no file of a run")
    subjects = [name for name in SUBJECTS if name in listed]
    if missing := {*(subjects or [CONFIG]), *REQUIRED} - set(listed):
        raise DamagedRun(folder, MARKER, f"does not list {min(missing)}")
    if len(subjects) > 1:
        raise DamagedRun(folder, MARKER, f"lists both {subjects[0]} and {subjects[1]}")
    return files


def verify(folder: Path) -> None:
    """Check all files, weights included, against their checksums. Raises DamagedRun, or ValueError if not complete."""
    listed = _complete_files(folder).marker.files
    for name, (expected, size) in listed.items():
        path = folder / name
        if name == WEIGHTS and not path.exists():
            continue
        if not path.is_file() or path.is_symlink():
            raise DamagedRun(folder, name, "is missing")
        if path.stat().st_size != size or sha256(path) != expected:
            raise DamagedRun(folder, name, "is not the file that was written (its checksum differs)")
    for name in FILES:
        if name not in listed and (folder / name).exists():
            raise DamagedRun(folder, name, "was added after the run was complete")


def problem(folder: Path) -> str:
    """Why the folder is not a complete, undamaged record; '' if it is one."""
    try:
        verify(folder)
    except ValueError as error:
        return str(error)
    return ""


def read_run(folder: Path) -> Record:
    """Read a trained run. Raises as `read_record` does, and ValueError for other records."""
    record = read_record(folder)
    if not isinstance(record.subject, RunConfig):
        kind = "an imported run" if isinstance(record.subject, ImportedRun) else "a measured model, not a run"
        raise ValueError(f"{str(folder)!r} is the record of {kind}; name a folder with {CONFIG}")
    return record


def read_record(folder: Path) -> Record:
    """Read and verify a complete folder, but for the weights. Raises DamagedRun, or ValueError if not complete."""
    return parse_record(_complete_files(folder))


def parse_record(files: Files) -> Record:
    """The record in these files. Raises DamagedRun."""
    folder = files.folder
    marker = files.marker
    contents = {name: files.read(name) for name in marker.files if name != WEIGHTS}
    (subject,) = (name for name in SUBJECTS if name in contents)
    manifest = parse_object(folder, "manifest.json", contents["manifest.json"])
    return Record(
        run_id=marker.run_id,
        folder=folder,
        subject=_parse_subject(folder, subject, contents[subject], marker.run_id, manifest.get("plugins")),
        summary=parse_object(folder, "summary.json", contents["summary.json"]),
        manifest=manifest,
        contents=contents,
    )


def _complete_files(folder: Path) -> Files:
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder; name that of a complete run, such as DIR/{RUNS}/RUN")
    if not is_complete(folder):
        refuse_several_runs(folder)
        raise ValueError(f"{str(folder)!r} holds no complete run (it has no file {MARKER!r})")
    return run_files(files_in(folder))


def refuse_several_runs(folder: Path) -> None:
    """Raises ValueError, with what to name instead, for a folder of several runs."""
    for pack in (folder, folder.parent.parent):  # PACK, or PACK/runs/RUN as it would be in a folder
        if (pack / INDEX).is_file():
            raise ValueError(
                f"{str(pack)!r} is a pack, which is only read by queries; name a run of its results folder"
            )
    if (folder / RUNS).is_dir():
        raise ValueError(f"{str(folder)!r} is a results folder; name one of {folder / RUNS}")


def _parse_subject(folder: Path, name: str, content: bytes, run_id: str, plugins: Any) -> Subject:
    """What a run is of. Raises OtherVersion for a field or plugin that is not known here, DamagedRun for another run's
    file."""
    try:
        if name == CONFIG:
            return _parse_config(content.decode())
        subject = build(SUBJECTS[name], parse_object(folder, name, content), name)
    except ValueError as error:
        loaded = {each for own in PLUGINS for each in own.makes}
        if files := [
            by.get("file")
            for task, by in (plugins.items() if isinstance(plugins, dict) else ())
            if isinstance(by, dict) and task.startswith("task:") and task not in loaded
        ]:
            told = f"is of the plugin {files[0]}, which is not loaded; name its file with --plugin"
            raise OtherVersion(folder, name, told, f"run folder {str(folder)!r}: {name} {told}") from None
        raise OtherVersion(folder, name, f"says what this version does not know ({error})") from None
    if subject.run_id != run_id:
        raise DamagedRun(folder, MARKER, f"is of run {run_id}, and {name} is {subject.run_id}")
    return subject


def _parse_config(text: str) -> RunConfig:
    """By cell, which is cached: replicates differ only in their seed, which no check reads."""
    seeds = _SEED.findall(text)
    if len(seeds) != 1:  # written by hand
        return _build_config(text)
    return _build_config(_SEED.sub("seed: 0", text)).model_copy(update={"seed": int(seeds[0])})


@functools.lru_cache(maxsize=2048)
def _build_config(text: str) -> RunConfig:
    with warnings.catch_warnings(action="ignore"):  # shown when the run was configured
        return stored_config(_parse_yaml(text), CONFIG)


def _parse_yaml(text: str) -> Any:
    """`parse_yaml` for files of `write_config`, by entry, which are cached: the runs of a sweep share most."""
    entries = re.split(r"\n(?=[a-z])", text.rstrip("\n")) if len(text) <= MAX_CONFIG_BYTES else [text]
    with contextlib.suppress(ValueError):
        parsed = [_parse_entry(entry) for entry in entries]
        if all(isinstance(part, dict) and len(part) == 1 for part in parsed):
            values = {key: value for part in parsed for key, value in part.items()}
            if len(values) == len(entries):
                return values
    return parse_yaml(text, CONFIG)


_parse_entry = functools.lru_cache(maxsize=10_000)(functools.partial(parse_yaml, source=CONFIG))


def parse_object(folder: Path, name: str, content: bytes) -> Named:
    """The object in a JSON file, NaN and Inf as None. Raises DamagedRun for anything else."""
    try:
        values = json.loads(content, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise DamagedRun(folder, name, f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise DamagedRun(folder, name, "is not a JSON object")
    return values
