"""A record as a row of the view `runs`: its configuration, summary and manifest, typed by column."""

import json
import sys
from typing import Any

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.run_record import SUBJECTS, Record, Subject
from sparsedepth.store.schema import MANIFEST_COLUMNS, RUN_COLUMNS, stored_fields
from sparsedepth.store.subject import ImportedRun


def utf8(text: str) -> str:
    """The text with characters that UTF-8 cannot encode (lone surrogates, undecodable file names) as '?'."""
    return text.encode(errors="replace").decode()


_COLUMNS = {column.name: column for column in RUN_COLUMNS}
_TYPES: dict[str, tuple[type, float | None]] = {
    "BIGINT": (int, 2**63 - 1),
    "DOUBLE": (float, sys.float_info.max),
    "VARCHAR": (str, None),
    "BOOLEAN": (bool, None),
}
"""Column type -> Python type of its values, and their largest magnitude."""


def run_row(run: Record) -> dict[str, Any]:
    """The values that are not NULL. Raises DamagedRun for a value that does not fit its column."""
    facts = {column.name: run.manifest.get(column.name) for column in MANIFEST_COLUMNS}
    if isinstance(facts["packages"], dict):
        facts["packages"] = json.dumps(facts["packages"], sort_keys=True)
    subject = next(name for name, kind in SUBJECTS.items() if isinstance(run.subject, kind))
    parts = {
        subject: _subject_columns(run.subject),
        "summary.json": {column.name: run.summary.get(column.name) for column in quantities.RUNS},
        "manifest.json": facts,
    }
    row = {"run_id": run.run_id}
    for file, values in parts.items():
        row |= {name: _typed(run, file, name, value) for name, value in values.items() if value is not None}
    return row


def _subject_columns(subject: Subject) -> dict[str, Any]:
    """The cell, and the known fields of RunConfig: few for a measured model, those of its table for an imported run."""
    if isinstance(subject, ImportedRun):
        origin = {"cell_id": subject.cell_id, "origin": subject.origin, "cluster": subject.cluster}
        return {**origin, "unknown_fields": ",".join(subject.unknown), **subject.config}
    if isinstance(subject, RunConfig):
        return {"cell_id": subject.cell_id, **stored_fields(subject)}
    return {"cell_id": f"c-{subject.run_id}", "model": subject.model, **stored_fields(subject)}


def _typed(run: Record, file: str, name: str, value: Any) -> Any:
    """The value in its column's type. Raises DamagedRun."""
    column = _COLUMNS[name]
    kind, largest = _TYPES[column.type]
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (largest is not None and not -largest <= value <= largest):
        raise DamagedRun(run.folder, file, f"has {name}={str(value)[:40]!r}, which is not a {column.type}")
    return utf8(value) if kind is str and not value.isascii() else value
