"""The run folder: the record of one run, whole or not there at all.

    RESULTS/runs/<run_id>/
        config.yaml       the RunConfig, every field; or model.json, what is known of a model that was only measured
        manifest.json     how it was made: device, started, seconds, packages, ...
        summary.json      one value per quantity of glossary.RUNS; a missing one is null
        curves.parquet    one row per logged step            } where they apply
        layers.parquet    one row per step, layer and metric }
        heads.parquet     one row per step, head and metric  }
        pairs.parquet     one row per step, pair and metric  }
        model.safetensors the weights; copies may leave them out
        complete          last: {"run_id": ..., "files": {name: {"sha256": ..., "bytes": ...}}}

Every file is written aside and renamed, and `complete` is written when all the others are on disk: a folder without it
does not count. With it the folder never changes again, so it can be copied, merged and read without a lock. Other files
(a log, a checkpoint of an unfinished run) may lie in the folder; they are no part of the record. The record of a
measured model lies in a folder of any name (`sparsedepth.store.save`).
"""

import difflib
import hashlib
import io
import json
import math
import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from sparsedepth import glossary
from sparsedepth.config.load import MAX_BYTES as MAX_CONFIG_BYTES
from sparsedepth.config.load import build, parse_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.files import sha256, sync_folder, write_bytes, write_json, write_text
from sparsedepth.glossary import Table
from sparsedepth.store.measured import MeasuredModel
from sparsedepth.store.schema import FILE_COLUMNS, KEYS, METRICS, TABLES, Column

MARKER = "complete"
WEIGHTS = "model.safetensors"
CONFIG, MODEL = "config.yaml", "model.json"
"""What was trained, or what was measured: a record has one of the two."""
REQUIRED = ("manifest.json", "summary.json")
FILES = (CONFIG, MODEL, *REQUIRED, *(f"{table}.parquet" for table in TABLES), WEIGHTS)
"""The names that make up the record; the weights alone may be absent from a copy."""

RUN_ID = r"[0-9a-f]{12}"

MAX_TEXT_BYTES = 10_000_000
MAX_ROWS = 50_000_000
"""A file above these is not read: no run of ours comes near."""

Row = Mapping[str, Any]


class DamagedRun(ValueError):
    """A complete folder whose files are not the ones it was completed with."""

    def __init__(self, folder: Path, name: str, problem: str) -> None:
        super().__init__(
            f"run folder {str(folder)!r} is damaged: {name} {problem}; "
            f"copy the folder again from where it was made, or delete it and run it again"
        )
        self.folder, self.name = folder, name


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What `complete` says."""

    run_id: str
    files: dict[str, tuple[str, int]]
    """sha256 and size in bytes, by name."""
    digest: str
    """SHA-256 of the marker itself: it names the content of the whole folder."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A complete folder, read and verified."""

    run_id: str
    folder: Path
    summary: dict[str, Any]
    manifest: dict[str, Any]
    tables: dict[Table, pa.Table]
    """Empty where the run has no such file."""


@dataclass(frozen=True, kw_only=True)
class Run(Record):
    """A trained run."""

    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Measured(Record):
    """A model that was only measured."""

    model: MeasuredModel


# Writing


def run_folder(results: Path, run_id: str) -> Path:
    """`RESULTS/runs/<run_id>`. Raises ValueError for anything but a run_id, such as a path."""
    if not re.fullmatch(RUN_ID, run_id):
        raise ValueError(f"run_id {run_id[:40]!r} must be 12 hex digits, as RunConfig.run_id gives them")
    return results / "runs" / run_id


def write_config(folder: Path, config: RunConfig) -> None:
    """Write config.yaml: every field, so that a later change of a default leaves the record as it was."""
    _refuse_complete(folder)
    write_text(folder / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def write_manifest(folder: Path, facts: Row) -> None:
    """Write manifest.json: plain JSON facts about how the run was made. `device`, `started` (ISO 8601), `seconds` and
    `packages` (name: version) become columns of `runs`."""
    _refuse_complete(folder)
    write_json(folder / "manifest.json", _finite(dict(facts)))


def write_summary(folder: Path, summary: Row) -> None:
    """Write summary.json: the quantities of glossary.RUNS, those not given as null. NaN and Inf count as missing."""
    _refuse_complete(folder)
    names = [quantity.name for quantity in glossary.RUNS]
    for name in summary:
        assert name in names, f"{name!r} is not in glossary.RUNS; nearest: {_nearest(name, names)}"
    assert summary.get("outcome") in ("ok", "diverged"), f"outcome={summary.get('outcome')!r}, not ok or diverged"
    write_json(folder / "summary.json", {name: _finite(summary.get(name)) for name in names})


def write_table(folder: Path, table: Table, rows: Iterable[Row]) -> None:
    """Write `<table>.parquet` from one mapping per row. A value left out, None, NaN or Inf is stored as NULL."""
    _refuse_complete(folder)
    rows = list(rows)
    _check_rows(table, rows)
    columns = {column.name: [_finite(row.get(column.name)) for row in rows] for column in FILE_COLUMNS[table]}
    content = io.BytesIO()
    pq.write_table(pa.table(columns, schema=file_schema(table)), content, compression="zstd")
    write_bytes(folder / f"{table}.parquet", content.getvalue())


def finish(folder: Path) -> None:
    """Complete the run: checksum every file of the record, flush it, and write the marker. From here on the folder is
    read-only. Raises ValueError where a file is missing, is a link, or belongs to another run."""
    _refuse_complete(folder)
    first = MODEL if (folder / MODEL).is_file() else CONFIG
    for name in (first, *REQUIRED):
        if not (folder / name).is_file():
            raise ValueError(f"run folder {str(folder)!r} cannot be completed without {name}; write it first")
    if first == MODEL and (folder / CONFIG).exists():
        raise ValueError(f"{str(folder)!r} has {CONFIG} and {MODEL}; a record is of a run or of a measured model")
    text = (folder / first).read_text(encoding="utf-8")
    values = json.loads(text) if first == MODEL else parse_yaml(text, CONFIG)
    subject = build(MeasuredModel if first == MODEL else RunConfig, values, first)
    if first == CONFIG and subject.run_id != folder.name:
        raise ValueError(f"{str(folder / CONFIG)!r} is run {subject.run_id}; its folder must have that name")
    files = {}
    for name in FILES:
        path = folder / name
        if path.is_symlink():
            raise ValueError(f"{str(path)!r} is a link; a run folder must hold its own files")
        if path.exists():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[name] = {"sha256": sha256(path), "bytes": path.stat().st_size}
    sync_folder(folder)
    write_json(folder / MARKER, {"run_id": subject.run_id, "files": files})


def _refuse_complete(folder: Path) -> None:
    if is_complete(folder):
        raise ValueError(
            f"run folder {str(folder)!r} is complete and never changes; to repeat the run, delete it first"
        )


def _check_rows(table: Table, rows: list[Row]) -> None:
    names = [column.name for column in FILE_COLUMNS[table]]
    metrics = [metric.name for metric in METRICS.get(table, ())]
    seen = set()
    for row in rows:
        for name in row:
            assert name in names, f"{table} has no column {name!r}; it has {names}"
        if metrics:
            metric = str(row["metric"]).partition("@")[0]
            assert metric in metrics, f"{metric!r} is no metric of {table}; nearest: {_nearest(metric, metrics)}"
        key = tuple(row.get(name) for name in KEYS[table])
        assert None not in key, f"{table}: {dict(zip(KEYS[table], key, strict=True))} must be complete"
        assert key not in seen, f"{table}: two rows at {dict(zip(KEYS[table], key, strict=True))}"
        seen.add(key)


def _nearest(name: str, names: list[str]) -> str:
    return ", ".join(difflib.get_close_matches(name, names, n=1, cutoff=0)) or "none"


def _finite(value: Any) -> Any:
    """The value with every NaN and Inf in it turned into None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


# Reading


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a finished run; looks at nothing but the marker's presence."""
    try:
        return stat.S_ISREG(os.lstat(os.path.join(folder, MARKER)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_marker(folder: Path) -> Marker:
    """The marker of a complete folder. Raises DamagedRun where it is not one that `finish` writes."""
    content = _read_bytes(folder, MARKER, MAX_TEXT_BYTES)
    try:
        values = json.loads(content)
        files = {name: (entry["sha256"], entry["bytes"]) for name, entry in values["files"].items()}
        run_id = values["run_id"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedRun(folder, MARKER, "is not a list of checksums") from None
    if not isinstance(run_id, str) or not re.fullmatch(RUN_ID, run_id):
        raise DamagedRun(folder, MARKER, "names no run")
    if (
        MODEL not in files and run_id != folder.name and run_id != folder.resolve().name
    ):  # the latter for a folder given as '.'
        raise DamagedRun(folder, MARKER, f"is of run {str(run_id)[:40]!r}, and the folder has another name")
    if unknown := set(files) - set(FILES):
        raise DamagedRun(folder, MARKER, f"lists {sorted(unknown)[0][:40]!r}, which is no file of a run")
    if missing := {CONFIG if MODEL not in files else MODEL, *REQUIRED} - set(files):
        raise DamagedRun(folder, MARKER, f"does not list {min(missing)}")
    if {CONFIG, MODEL} <= set(files):
        raise DamagedRun(folder, MARKER, f"lists both {CONFIG} and {MODEL}")
    return Marker(run_id=run_id, files=files, digest=hashlib.sha256(content).hexdigest())


def verify(folder: Path) -> None:
    """Check every file, weights included, against its checksum. Raises DamagedRun, or ValueError if not complete."""
    marker = _marker_of_complete(folder)
    for name, (expected, size) in marker.files.items():
        path = folder / name
        if name == WEIGHTS and not path.exists():
            continue
        if not path.is_file() or path.is_symlink():
            raise DamagedRun(folder, name, "is missing")
        if path.stat().st_size != size or sha256(path) != expected:
            raise DamagedRun(folder, name, "is not the file that was written (its checksum differs)")
    for name in FILES:
        if name not in marker.files and (folder / name).exists():
            raise DamagedRun(folder, name, "was added after the run was complete")


def read_run(folder: Path) -> Run:
    """Read a trained run. Raises as `read_record` does, and ValueError for a measured model."""
    found = read_record(folder)
    if not isinstance(found, Run):
        raise ValueError(f"{str(folder)!r} is the record of a measured model, not a run; name a folder with {CONFIG}")
    return found


def read_record(folder: Path) -> Run | Measured:
    """Read a complete folder, checking what is read (all but the weights) against its checksums.
    Raises DamagedRun, or ValueError if the folder is not complete."""
    marker = _marker_of_complete(folder)
    contents = {name: _read_verified(folder, name, marker) for name in marker.files if name != WEIGHTS}
    common: dict[str, Any] = {
        "run_id": marker.run_id,
        "folder": folder,
        "summary": _parse_json(folder, "summary.json", contents["summary.json"]),
        "manifest": _parse_json(folder, "manifest.json", contents["manifest.json"]),
        "tables": {table: _parse_table(folder, table, contents.get(f"{table}.parquet")) for table in TABLES},
    }
    if MODEL in contents:
        return Measured(model=_parse_model(folder, contents[MODEL], marker), **common)
    return Run(config=_parse_config(folder, contents[CONFIG]), **common)


def _marker_of_complete(folder: Path) -> Marker:
    if not is_complete(folder):
        raise ValueError(f"{str(folder)!r} holds no complete run (it has no file {MARKER!r})")
    return read_marker(folder)


def _read_bytes(folder: Path, name: str, limit: int) -> bytes:
    """The file's bytes; a link is not followed, so a folder from elsewhere cannot point out of itself."""
    try:
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamagedRun(folder, name, "is missing") from None
    except OSError as error:
        raise DamagedRun(folder, name, f"cannot be read ({error.strerror})") from None
    with open(handle, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise DamagedRun(folder, name, f"is larger than {limit:,} bytes")
    return content


def _read_verified(folder: Path, name: str, marker: Marker) -> bytes:
    expected, size = marker.files[name]
    content = _read_bytes(folder, name, size)
    if len(content) != size or hashlib.sha256(content).hexdigest() != expected:
        raise DamagedRun(folder, name, "is not the file that was written (its checksum differs)")
    return content


def _parse_config(folder: Path, content: bytes) -> RunConfig:
    try:
        with warnings.catch_warnings(action="ignore"):  # said when the run was configured
            return build(RunConfig, _parse_yaml(content.decode()), "config.yaml")
    except ValueError as error:
        raise DamagedRun(folder, "config.yaml", f"is no configuration of this version ({error})") from None


def _parse_model(folder: Path, content: bytes, marker: Marker) -> MeasuredModel:
    try:
        model = build(MeasuredModel, _parse_json(folder, MODEL, content), MODEL)
    except ValueError as error:
        raise DamagedRun(folder, MODEL, f"describes no model of this version ({error})") from None
    if model.run_id != marker.run_id:
        raise DamagedRun(folder, MARKER, f"is of run {marker.run_id}, and {MODEL} is {model.run_id}")
    return model


def _parse_yaml(text: str) -> Any:
    """`parse_yaml` at ten times the speed for a text without aliases, as `write_config` writes it."""
    if not hasattr(yaml, "CSafeLoader") or "&" in text or "*" in text or len(text) > MAX_CONFIG_BYTES:
        return parse_yaml(text, "config.yaml")
    loader = yaml.CSafeLoader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(_one_line(error)) from None
    finally:
        loader.dispose()


def _parse_json(folder: Path, name: str, content: bytes) -> dict[str, Any]:
    try:
        values = json.loads(content, parse_constant=lambda name: None)  # NaN and Inf, which are missing values here
    except (ValueError, RecursionError) as error:
        raise DamagedRun(folder, name, f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise DamagedRun(folder, name, "is not a JSON object")
    return values


def _parse_table(folder: Path, table: Table, content: bytes | None) -> pa.Table:
    schema = file_schema(table)
    if content is None:
        return pa.Table.from_batches([], schema)
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        if file.metadata.num_rows > MAX_ROWS:
            raise DamagedRun(folder, f"{table}.parquet", f"has more than {MAX_ROWS:,} rows")
        return file.read(use_threads=False).select(schema.names).cast(schema)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DamagedRun(folder, f"{table}.parquet", f"is not a {table} table ({_one_line(error)})") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# Arrow types


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type of a column."""
    return {"BIGINT": pa.int64(), "DOUBLE": pa.float64(), "VARCHAR": pa.string(), "BOOLEAN": pa.bool_()}[column.type]


def file_schema(table: Table) -> pa.Schema:
    """The Arrow schema of `<table>.parquet`."""
    return pa.schema(
        [
            pa.field(column.name, arrow_type(column), nullable=column.name not in KEYS[table])
            for column in FILE_COLUMNS[table]
        ]
    )
