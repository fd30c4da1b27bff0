"""Send the finished runs of a results folder to a tracker, each once.

What was sent stands in DIR/trackers/sent-TRACKER.json, by place, run by run: a run is noted after the tracker has it
whole. A run that the tracker holds and that is not noted was cut off by a kill: it is removed there and sent anew. One
that is noted and that the tracker no longer holds is sent again. One process at a time sends to a tracker.
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
from sparsedepth.trackers.tracked_run import TrackedRun, run_ids, tracked_runs

Name = Literal["tensorboard", "mlflow", "trackio", "wandb"]
NAMES: tuple[Name, ...] = get_args(Name)
FOLDER = "trackers"
"""Of a results folder: what was sent, and by default what the tracker keeps. Derived: delete it at any time."""


class Tracker(Protocol):
    """Where runs are sent. Importing its module needs the tracker's package, and no more than it."""

    place: str
    """Where it keeps them."""

    def held(self) -> set[str] | None:
        """The run_ids of which it holds anything; None where it cannot be asked."""
        ...

    def discard(self, run_id: str) -> None:
        """Forget what it holds of a run, if anything."""
        ...

    def send(self, run: TrackedRun) -> None:
        """Take a run, which it does not hold. On return it is there whole."""
        ...

    def view_command(self) -> str:
        """The command that shows what was sent."""
        ...


def open_tracker(name: str, results: Path, at: str | None = None, project: str | None = None) -> Tracker:
    """The tracker, keeping its files `at` a place (default: its own variable, else in DIR/trackers), under the name of
    a `project` (default: the sweep's). Raises ValueError for another name, and where its package is missing."""
    if name not in NAMES:
        raise ValueError(f"--to {name!r} is not one of {', '.join(NAMES)}")
    definition = read_definition(results)
    named = project or (definition.name if definition else results.resolve().name)
    try:
        return importlib.import_module(f"sparsedepth.trackers.{name}").Tracker(results / FOLDER, at, named)
    except ImportError as error:
        raise ValueError(
            f"--to {name} needs a package that is not here ({error}): pip install {name}, or 'sparsedepth[trackers]'"
        ) from None


def sync(results: Path, name: str, tracker: Tracker) -> Iterator[str]:
    """Send what the tracker lacks; yields the run_id of each run once it is sent and noted. Raises ValueError where the
    folder holds no complete run, or one that is damaged."""
    ledger = results / FOLDER / f"sent-{name}.json"
    with hold(ledger.with_suffix(".lock")), open_store(results) as store:
        places: dict[str, list[str]] = json.loads(ledger.read_text()) if ledger.exists() else {}
        held = tracker.held()
        noted = {*places.get(tracker.place, [])}
        sent = noted if held is None else noted & held
        for run in tracked_runs(store, {*run_ids(store)} - sent):
            tracker.discard(run.run_id)
            tracker.send(run)
            sent.add(run.run_id)
            write_json(ledger, {**places, tracker.place: sorted(sent)})
            yield run.run_id


def is_running(results: Path) -> bool:
    """Whether the folder's sweep has runs that are still to be made."""
    states = scan(results, read_definition(results))
    return any(state.state in ("running", "interrupted", "planned") for state in states)
