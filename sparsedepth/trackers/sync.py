"""Send the finished runs of a results folder to a tracker, each once.

DIR/trackers/sent-TRACKER.json lists the run_ids sent to each place; a run is added when the tracker has all of it. A
run in the tracker that is not listed is incomplete (the process was killed): it is removed there and sent again. So is
a listed run that the tracker no longer has. Only one process at a time sends to a tracker.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol, get_args

from sparsedepth.config.sweep import read_definition
from sparsedepth.files import write_json
from sparsedepth.run.lease import hold
from sparsedepth.store.connection import open_store
from sparsedepth.sweep.status import scan
from sparsedepth.trackers.tracked_run import TrackedRun, tracked_runs

Name = Literal["tensorboard", "mlflow", "trackio", "wandb"]
NAMES: tuple[Name, ...] = get_args(Name)
FOLDER = "trackers"
"""In a results folder: lists of sent runs, and by default the tracker's files. Can be deleted at any time."""


class Tracker(Protocol):
    """A tracker. Its module imports the tracker's package."""

    place: str
    """Where it stores runs."""

    def held(self) -> set[str] | None:
        """The run_ids that it has, complete or not; None if it cannot list them."""

    def discard(self, run_id: str) -> None:
        """Remove a run, if it has any of it."""

    def send(self, run: TrackedRun) -> None:
        """Store a run that it does not have, completely."""

    def view_command(self) -> str:
        """The command that shows what was sent."""


def open_tracker(name: str, results: Path, at: str | None = None, project: str | None = None) -> Tracker:
    """The tracker with its files `at` a place (default: its own environment variable, else DIR/trackers), for a
    `project` (default: the sweep's name). Raises ValueError for an unknown name, or a missing package."""
    if name not in NAMES:
        raise ValueError(f"--to {name!r} is not one of {', '.join(NAMES)}")
    definition = read_definition(results)
    project = project or (definition.name if definition else results.resolve().name)
    try:
        return importlib.import_module(f"sparsedepth.trackers.{name}").Tracker(results / FOLDER, at, project)
    except ImportError as error:
        raise ValueError(
            f"--to {name} needs a package that is missing ({error}): pip install {name}, or '.[trackers]' in a clone"
        ) from None


def sync(results: Path, name: str, tracker: Tracker) -> Iterator[str]:
    """Send the runs that the tracker lacks; yields each run_id when the run is sent and listed. Raises ValueError if
    the folder has no complete run, or a damaged one."""
    sent_file = results / FOLDER / f"sent-{name}.json"
    with open_store(results) as store, hold(sent_file.with_suffix(".lock")):
        by_place: dict[str, list[str]] = json.loads(sent_file.read_text()) if sent_file.exists() else {}
        held = tracker.held()
        listed = {*by_place.get(tracker.place, [])}
        sent = listed if held is None else listed & held
        for run in tracked_runs(store, sent):
            tracker.discard(run.run_id)
            tracker.send(run)
            sent.add(run.run_id)
            write_json(sent_file, {**by_place, tracker.place: sorted(sent)})
            yield run.run_id


def has_unfinished_runs(results: Path) -> bool:
    """Whether the folder's sweep has unfinished runs."""
    states = scan(results, read_definition(results))
    return any(state.state in ("running", "interrupted", "planned") for state in states)
