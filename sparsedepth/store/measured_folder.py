"""Write the record of a measured model, atomically: in a hidden folder, which is then renamed.

The folder may have any name (its marker holds the run_id). RESULTS/models/NAME is in the same view as the runs of
RESULTS; RESULTS/runs is for trained runs only.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sparsedepth.files import atomic_folder, refuse_complete, refuse_current, temporary_path, write_json
from sparsedepth.quantities.record import Table
from sparsedepth.store import run_record
from sparsedepth.store.measured_model import MeasuredModel


def check_place(out: Path) -> None:
    """Check the target folder of a record. Raises ValueError, one line, unless `out` is absent or an empty folder, in a
    writable folder."""
    temporary = temporary_path(out.resolve())
    if temporary.parent.name == "runs":
        models = temporary.parent.with_name("models")
        raise ValueError(f"{str(out)!r} is among the trained runs; name a folder in {str(models)!r}")
    refuse_complete(temporary.parent)
    refuse_current(out)
    try:
        if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{str(out)!r} is not an empty folder; name a new one")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        temporary.rmdir()
    except OSError as error:
        raise ValueError(f"{str(out)!r} cannot be written ({error.strerror}); name another folder") from None


def save_measured(
    out: Path,
    model: MeasuredModel,
    summary: run_record.Row,
    manifest: run_record.Row,
    tables: Mapping[Table, Iterable[run_record.Row]],
) -> None:
    """Write and complete the record; a crash leaves no folder `out`. Empty tables get no file. Raises ValueError if
    `out` cannot be written."""
    check_place(out)
    with atomic_folder(out) as aside:
        write_json(aside / run_record.MODEL, model.model_dump(mode="json"))
        run_record.write_manifest(aside, manifest)
        run_record.write_summary(aside, {"outcome": "ok", "params_total": model.params_total, **summary})
        for table, rows in tables.items():
            if rows := list(rows):
                run_record.write_table(aside, table, rows)
        run_record.finish(aside)
