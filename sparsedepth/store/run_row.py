"""A record as a row of the view `runs`: its configuration, summary and manifest, typed by column."""

import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from sparsedepth import quantities
from sparsedepth.config.run import REPLICATE_FIELDS, RunConfig
from sparsedepth.quantities.record import Column
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.run_record import SUBJECTS, Record, Subject
from sparsedepth.store.schema import MANIFEST_COLUMNS, RUN_COLUMNS, stored_fields
from sparsedepth.store.subject import ImportedRun


def utf8(text: str) -> str:
    """The text with characters that UTF-8 cannot encode (lone surrogates, undecodable file names) as '?'."""
    return text.encode(errors="replace").decode()


_COLUMNS = {column.name: column for column in RUN_COLUMNS}
_SUMMARY_COLUMNS = frozenset(column.name for column in quantities.RUNS)


def run_row(run: Record) -> dict[str, Any]:
    """The values that are not NULL. Raises DamagedRun for a value that does not fit its column."""
    facts = {column.name: run.manifest.get(column.name) for column in MANIFEST_COLUMNS}
    if isinstance(facts["packages"], dict):
        facts["packages"] = json.dumps(facts["packages"], sort_keys=True)
    summary = {name: value for name, value in run.summary.items() if name in _SUMMARY_COLUMNS}
    try:
        return {
            "run_id": run.run_id,
            **_subject_columns(run.subject),
            **_typed({**summary, **facts}),
        }
    except MisfitError as misfit:
        name = "summary.json" if misfit.column.name in _SUMMARY_COLUMNS else "manifest.json"
        if misfit.column.name in RunConfig.model_fields:
            name = next(name for name, kind in SUBJECTS.items() if isinstance(run.subject, kind))
        raise DamagedRun(run.folder, name, str(misfit)) from None


def _subject_columns(subject: Subject) -> dict[str, Any]:
    """The cell, and the known fields of RunConfig: few for a measured model, those of its table for an imported run."""
    if isinstance(subject, ImportedRun):
        origin = {"cell_id": subject.cell_id, "origin": subject.origin, "cluster": subject.cluster}
        return _typed({**origin, "unknown_fields": ",".join(subject.unknown), **subject.config})
    if isinstance(subject, RunConfig):
        return {**_cell_columns(subject.cell), **_typed({name: getattr(subject, name) for name in REPLICATE_FIELDS})}
    return _typed({"cell_id": f"c-{subject.run_id}", "model": subject.model, **stored_fields(subject)})


@functools.lru_cache(maxsize=2048)
def _cell_columns(cell: RunConfig) -> dict[str, Any]:
    """The columns that all replicates share."""
    return _typed({"cell_id": cell.cell_id, **stored_fields(cell)})


_PYTHON_TYPES = {"BIGINT": int, "DOUBLE": float, "VARCHAR": str, "BOOLEAN": bool}
_LARGEST = {"BIGINT": 2**63 - 1, "DOUBLE": sys.float_info.max}
_KINDS = {name: (_PYTHON_TYPES[column.type], _LARGEST.get(column.type)) for name, column in _COLUMNS.items()}
"""Column -> Python type of its values, and their largest magnitude."""


class MisfitError(ValueError):
    """A value that does not fit its column."""

    def __init__(self, column: Column, value: object) -> None:
        super().__init__(f"has {column.name}={str(value)[:40]!r}, which is not a {column.type}")
        self.column = column


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not NULL, each in its column's type. Raises MisfitError."""
    typed = {}
    for name, value in values.items():
        if value is None:
            continue
        kind, largest = _KINDS[name]
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (largest is not None and not -largest <= value <= largest):
            raise MisfitError(_COLUMNS[name], value)
        typed[name] = utf8(value) if kind is str and not value.isascii() else value
    return typed
