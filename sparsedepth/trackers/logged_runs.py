"""Runs that a tracker has, as the table that `import` reads (`store.import_table`): one run per row.

    id  name  status  project  config.NAME ...  metrics.NAME ...

`status` is finished, failed or unfinished, and missing where the tracker does not tell; a metric is its last value. A
nested configuration has names with dots. Values whose name is that of a secret are left out.
"""

import importlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACES = {
    "tensorboard": "a folder of event files, one folder per run",
    "mlflow": "a tracking URI, such as sqlite:///mlflow.db, or a folder of its file store",
    "trackio": "a project in the folder TRACKIO_DIR, or its .db file",
    "wandb": "a .wandb file, a run's folder, or a folder of them",
}
"""Tracker -> what stands behind its colon."""
SECRET = re.compile(
    r"(?i)(api|access|auth|private|bearer|hf|wandb)[_.-]?(key|token)s?(?![a-z])|[._/-]token$|secret|passw|credential"
)


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run as its tracker has it."""

    id: str
    name: str | None = None
    status: str | None = None
    project: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def as_table(source: str, table_map: Mapping[str, Any]) -> Generator[Path]:
    """The file of a table, or of the runs behind TRACKER:PLACE. Raises ValueError, one line; what is raised in its
    context names the source, not the file."""
    tracker, _, place = source.partition(":")
    if tracker not in PLACES or Path(source).exists():
        yield Path(source)
        return
    shown = without_password(source)
    runs = _read(tracker, place, shown)
    if not runs:
        raise ValueError(f"{shown} has no runs; give {PLACES[tracker]}")
    _check(runs, shown, table_map)
    with tempfile.TemporaryDirectory() as folder:
        name = re.sub(r"[^\w.-]+", "-", Path(without_password(place)).name)[:100]
        path = Path(folder, f"{tracker}-{name}.jsonl")
        path.write_text("".join(f"{json.dumps(dict(_flat(vars(run))))}\n" for run in runs), encoding="utf-8")
        try:
            yield path
        except ValueError as error:
            text = str(error).replace(repr(str(path)), shown).replace(str(path), shown)
            text = re.sub(r"\brow (\d+)", lambda row: f"{row[0]} ({runs[int(row[1]) - 1].id})", text)
            raise ValueError(text) from None


def _read(tracker: str, place: str, shown: str) -> list[LoggedRun]:
    try:
        return [*importlib.import_module(f"sparsedepth.trackers.{tracker}").read(place)]
    except ImportError as error:
        raise ValueError(f"{shown} needs a package that is missing ({error}): pip install {tracker}") from None
    except MemoryError:
        raise
    except Exception as error:  # whatever a tracker's package raises for files that are damaged, or not its own
        cause = " ".join(without_password(str(error)).split())[:300] or type(error).__name__
        raise ValueError(f"{shown} cannot be read: {cause}") from error


def _check(runs: Sequence[LoggedRun], shown: str, table_map: Mapping[str, Any]) -> None:
    """Raises ValueError for two runs of one id, and for runs without an end in a map that does not look at status."""
    if twice := [id for id, n in Counter(run.id for run in runs).items() if n > 1]:
        raise ValueError(f"{shown} has two runs with the id {twice[0]!r}; move one of them away")
    cut = [run for run in runs if run.status in ("failed", "unfinished")]
    if cut and not re.search(r"\bstatus\b", json.dumps([table_map.get("where"), table_map.get("fields")])):
        whole = "status == 'finished'" if any(run.status == "finished" for run in runs) else "status is null"
        raise ValueError(
            f"{shown}: {len(cut)} of {len(runs)} runs did not finish, such as {cut[0].id} ({cut[0].status}), so their "
            f"last values are not final; choose in the map, such as where: {whole}"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """(name with dots, text), without secrets, images and tables, and what the tracker adds itself."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if str(key).startswith("_") or SECRET.search(name):
            continue
        if not isinstance(value, Mapping):
            yield name, value if value is None or isinstance(value, str) else json.dumps(value, default=str)
        elif "_type" not in value:
            yield from _flat(value, f"{name}.")


def without_password(text: str) -> str:
    """A text whose addresses, as postgresql://user:password@host, have neither user nor password."""
    return re.sub(r"(password=)[^&\s]+", r"\1...", re.sub(r"//[^/\s]*@", "//", text))
