"""The record of a measured model, whole or not there at all: written in a hidden folder beside it, and renamed.

The folder's name is free (its marker holds the run_id). RESULTS/models/NAME stands in one table with the runs of
RESULTS; RESULTS/runs holds trained runs alone.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sparsedepth.files import atomic_folder, refuse_complete, temporary_path, write_json
from sparsedepth.quantities.record import Table
from sparsedepth.store import run_record
from sparsedepth.store.measured_model import MeasuredModel


def check_place(out: Path) -> None:
    """Check where a record is to go. Raises ValueError, one line, unless `out` is absent or an empty folder, and a
    folder can be made beside it."""
    aside = temporary_path(out.resolve())
    if aside.parent.name == "runs":
        place = aside.parent.with_name("models")
        raise ValueError(f"{str(out)!r} is among the trained runs; name a folder in {str(place)!r}")
    refuse_complete(aside.parent)
    try:
        if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{str(out)!r} is not an empty folder; name a new one")
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        aside.rmdir()
    except OSError as error:
        raise ValueError(f"{str(out)!r} cannot be written ({error.strerror}); name another folder") from None


def save_measured(
    out: Path,
    model: MeasuredModel,
    summary: run_record.Row,
    manifest: run_record.Row,
    tables: Mapping[Table, Iterable[run_record.Row]],
) -> None:
    """Write and complete the record; a crash leaves no folder `out`. A table with no rows gets no file. Raises
    ValueError where `out` cannot be written."""
    check_place(out)
    with atomic_folder(out) as aside:
        write_json(aside / run_record.MODEL, model.model_dump(mode="json"))
        run_record.write_manifest(aside, manifest)
        run_record.write_summary(aside, {"outcome": "ok", "params_total": model.params_total, **summary})
        for table, rows in tables.items():
            if rows := list(rows):
                run_record.write_table(aside, table, rows)
        run_record.finish(aside)
