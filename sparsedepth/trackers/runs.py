"""Runs in other people's trackers: the finished runs of a results folder are sent, each once, and theirs are read.

DIR/trackers/sent-TRACKER.json lists the run_ids sent to each place; a run is added when the tracker has all of it. A
run in the tracker that is not listed is incomplete (the process was killed): it is removed there and sent again. So is
a listed run that the tracker no longer has. Only one process at a time sends to a tracker.

Those that a tracker has are read in a child process, as the table for `import` (`store.import_table`), a run per row:

    id  name  status  project  config.NAME ...  metrics.NAME ...

`status` is finished, failed or unfinished, and missing where the tracker does not tell; a metric is its last value. A
nested configuration has names with dots. Values whose name is that of a secret are left out."""

import hashlib
import importlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import readable_definition
from sparsedepth.files import open_regular, write_json
from sparsedepth.outside import SECONDS, in_child
from sparsedepth.quantities.quantity import without_none
from sparsedepth.run.lease import hold
from sparsedepth.store.connection import Store, open_store
from sparsedepth.store.table_file import MAX_ROWS, Choose, Texts, named, read_texts
from sparsedepth.sweep.results_folder import ResultsIndex
from sparsedepth.sweep.status import scan
from sparsedepth.words.plain_text import cause_of, without_password

PLACES = {
    "tensorboard": "a folder of event files, one folder per run",
    "mlflow": "a tracking URI, such as sqlite:///mlflow.db, or a folder of its file store",
    "trackio": "a project in the folder TRACKIO_DIR, or its .db file",
    "wandb": "a .wandb file, a run's folder, or a folder of them",
}
"""Tracker -> what stands behind its colon."""
SECRET = re.compile(
    r"(?i)(api|access|auth|private|bearer|hf|wandb)[_.-]?(key|token)s?(?![a-z])|(?<!per)[._/-]token$"
    r"|secret|passw|credential"
)
MAX_BYTES = 10**10
FOLDER = "trackers"
"""In a results folder: lists of sent runs, and by default the tracker's files. Can be deleted at any time."""
FACTS = ("seconds", "training_seconds", "peak_memory_bytes")
"""Numbers of the manifest in the summary."""
_CURVES = "select * exclude (run_id) from curves where run_id = '{}' order by step"
TAGS = ("run_id", "cell_id", "model", "outcome", "diverged_cause", "tuning", "device", "started")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A finished run in the form of a tracker. Missing values are left out."""

    run_id: str
    params: dict[str, bool | int | float | str]
    """Fields of the configuration."""
    curves: tuple[tuple[int, dict[str, float]], ...]
    """(step, values), in order."""
    summary: dict[str, float]
    """Measured quantities, named as the columns of `runs`."""
    tags: dict[str, str]
    started: float
    """Unix time; 0 if unknown."""

    @property
    def last_step(self) -> int:
        return int(self.summary.get("steps", 0)) or max((step for step, _ in self.curves), default=0)

    def time_at(self, step: int) -> float:
        """Unix time of a step, if all steps take equally long."""
        share = step / self.last_step if self.last_step else 1.0
        return self.started + share * self.summary.get("training_seconds", 0.0)


def open_tracker(name: str, results: Path, at: str | None = None, project: str | None = None) -> Any:
    """The tracker with its files `at` a place (default: its own environment variable, else DIR/trackers), for a
    `project` (default: the sweep's name). Raises ValueError for an unknown name, or a missing package.

    place             where it stores runs
    held()            the run_ids that it has, complete or not; None if it cannot list them
    discard(run_id)   removes a run, if it has any of it
    send(run)         stores a TrackedRun that it does not have, completely
    view_command      the command that shows what was sent"""
    if name not in PLACES:
        raise ValueError(f"--to {name!r} is not one of {', '.join(PLACES)}")
    if project and name == "tensorboard":
        raise ValueError(f"--project {project!r}: tensorboard has no projects; leave it out")
    definition = readable_definition(results)
    project = project or (definition.name if definition else results.resolve().name)
    try:
        return importlib.import_module(f"sparsedepth.trackers.{name}").Tracker(results / FOLDER, at, project)
    except ImportError as error:
        raise ValueError(
            f"--to {name} needs a package that is missing ({error}): pip install {name}, or '.[trackers]' in a clone"
        ) from None


def sync(results: Path, name: str, tracker: Any) -> Iterator[str]:
    """Send the runs that the tracker lacks; yields each run_id when the run is sent and listed. Raises ValueError if
    the folder has no complete run, or a damaged one."""
    sent_file = results / FOLDER / f"sent-{name}.json"
    with open_store(results) as store, hold(sent_file.with_suffix(".lock")):
        try:
            by_place: dict[str, list[str]] = json.loads(sent_file.read_text()) if sent_file.exists() else {}
        except ValueError:
            raise ValueError(f"{sent_file} is damaged; delete it, and what was sent is sent once more") from None
        with _errors_of(name):
            held = tracker.held()
        listed = {*by_place.get(tracker.place, [])}
        sent = listed if held is None else listed & held
        for run in tracked_runs(store, sent):
            with _errors_of(name):
                tracker.discard(run.run_id)
                tracker.send(run)
            sent.add(run.run_id)
            write_json(sent_file, {**by_place, tracker.place: sorted(sent)})
            yield run.run_id


@contextmanager
def _errors_of(name: str) -> Generator[None]:
    """Whatever a tracker's package raises, as a ValueError of one line."""
    try:
        yield
    except (ValueError, OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"{name} refused a run: {cause_of(error)}; the runs sent so far are kept, so run it again"
        ) from error


def has_unfinished_runs(results: Path) -> bool:
    runs = scan(ResultsIndex(results, readable_definition(results)))
    return any(run.state in ("running", "interrupted", "planned") for run in runs)


def tracked_runs(store: Store, sent: Set[str] = frozenset()) -> Iterator[TrackedRun]:
    """The runs of the store that are not sent yet, in order of run_id."""
    numbers = {column.name for column in quantities.RUNS} | {*FACTS}
    for record in store.sql("select * from runs order by run_id").records():
        row = without_none(record)
        if row["run_id"] not in sent:
            yield TrackedRun(
                run_id=row["run_id"],
                params={name: row[name] for name in RunConfig.model_fields if name in row},
                curves=tuple(
                    (int(of_step.pop("step")), {name: float(value) for name, value in without_none(of_step).items()})
                    for of_step in store.sql(_CURVES.format(row["run_id"])).records()
                ),
                summary={name: float(row[name]) for name in row if name in numbers and type(row[name]) in (int, float)},
                tags={name: str(row[name]) for name in TAGS if name in row},
                started=datetime.fromisoformat(row["started"]).timestamp() if "started" in row else 0.0,
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


def read_source(source: Path | str, choose: Choose, table_map: Mapping[str, Any], seconds: float = SECONDS) -> Texts:
    """The chosen columns of a table, or of the runs behind TRACKER:PLACE, which are read in a process of its own that
    is ended after so many seconds without a run. Raises ValueError, one line."""
    tracker, _, place = str(source).partition(":")
    if tracker not in PLACES or Path(source).exists():
        return read_texts(Path(source), choose, seconds)
    shown = without_password(str(source))
    rows = in_child(lambda: _rows(tracker, place, shown), shown, seconds)
    runs: list[dict[str, str | None]] = [json.loads(row) for row in rows]
    if not runs:
        raise ValueError(f"{shown} has no runs; give {PLACES[tracker]}")
    if len(runs) > MAX_ROWS:
        raise ValueError(f"{shown} has more than {MAX_ROWS:,} runs, the limit; name a part of it")
    _check(runs, shown, table_map)
    raw = [*dict.fromkeys(name for run in runs for name in run)]
    places, notes = named(raw)
    chosen = {name: [run.get(raw[places[name]]) for run in runs] for name in choose([*places])}
    return Texts(
        source=shown,
        name=f"{tracker}-{re.sub(r'[^.A-Za-z0-9_-]+', '-', Path(without_password(place)).name)[:100]}",
        sha256=hashlib.sha256(b"\n".join(rows)).hexdigest(),
        names=[*places],
        columns=pa.table({name: pa.array(values, pa.string()) for name, values in chosen.items()}),
        notes=notes,
        ids=[str(run["id"]) for run in runs],
    )


def _rows(tracker: str, place: str, shown: str) -> Iterator[bytes]:
    """Each run as JSON, one object of texts."""
    try:
        for run in importlib.import_module(f"sparsedepth.trackers.{tracker}").read(place):
            yield json.dumps(flat(vars(run))).encode()
    except ImportError as error:
        raise ValueError(f"{shown} needs a package that is missing ({error}): pip install {tracker}") from None
    except Exception as error:  # whatever a tracker's package raises for files that are damaged, or not its own
        raise ValueError(f"{shown} cannot be read: {cause_of(error)}") from error


def _check(runs: Sequence[Mapping[str, Any]], shown: str, table_map: Mapping[str, Any]) -> None:
    """Raises ValueError for two runs of one id, and for runs without an end in a map that does not look at status."""
    if twice := [id for id, n in Counter(run["id"] for run in runs).items() if n > 1]:
        raise ValueError(f"{shown} has two runs with the id {twice[0]!r}; move one of them away")
    cut = [run for run in runs if run["status"] in ("failed", "unfinished")]
    if cut and not re.search(r"\bstatus\b", json.dumps([table_map.get("where"), table_map.get("fields")])):
        whole = "status == 'finished'" if any(run["status"] == "finished" for run in runs) else "status is null"
        raise ValueError(
            f"{shown}: {len(cut)} of {len(runs)} runs did not finish, such as {cut[0]['id']} ({cut[0]['status']}), so "
            f"their last values are not final; choose in the map, such as where: {whole}"
        )


def flat(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Texts by names with dots, without secrets, images and tables, and what the tracker adds itself. Raises ValueError
    for two values of one such name."""
    found: dict[str, str | None] = {}
    inner = [(str(key), str(key), value) for key, value in reversed([*values.items()])]
    while inner:  # no recursion: keys may be nested deeply
        key, name, value = inner.pop()
        if key.startswith("_") or SECRET.search(name):
            continue
        if isinstance(value, Mapping):
            if "_type" not in value:
                inner += [(str(key), f"{name}.{key}", below) for key, below in reversed([*value.items()])]
            continue
        if name in found:
            raise ValueError(f"the name {name!r} is twice in one run, also as a key with dots; rename one of them")
        found[name] = value if value is None or isinstance(value, str) else json.dumps(value, default=str)
    return found


@contextmanager
def open_database(path: Path) -> Generator[sqlite3.Connection]:
    """A tracker's SQLite file, only read. Raises ValueError for what is no regular file, and for a view, which no
    tracker makes and which may have no end. Triggers, which MLflow has, act on no reader."""
    open_regular(path, MAX_BYTES, path.parent).close()
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        view = database.execute("SELECT name FROM sqlite_master WHERE type = 'view'").fetchone()
        if view:
            raise ValueError(f"{path} has the view {view[0]!r}, and a tracker's database has tables alone")
        yield database
