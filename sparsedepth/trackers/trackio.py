"""Trackio: each run is a run of a project in Trackio's local database; nothing is uploaded to a Space."""

import contextlib
import importlib
import io
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sparsedepth.trackers.runs import LoggedRun, TrackedRun, open_database

VERSION = 2
"""The newest version of its databases that `read` knows."""


class Tracker:
    """A project in the databases of a folder."""

    def __init__(self, folder: Path, at: str | None, project: str) -> None:
        """`at`: the folder of Trackio's databases (default: TRACKIO_DIR, else one in the results folder)."""
        self.folder = Path(at or os.environ.get("TRACKIO_DIR") or folder.resolve() / "trackio")
        os.environ["TRACKIO_DIR"] = str(self.folder)  # read when trackio is imported
        self.trackio = importlib.import_module("trackio")
        self.project, self.place = project, f"{self.folder} {project}"
        self.view_command = f"TRACKIO_DIR={shlex.quote(str(self.folder))} trackio show --project {shlex.quote(project)}"

    def held(self) -> set[str]:
        return {run.name for run in self._runs()}

    def _runs(self) -> list:
        try:
            return [*self.trackio.Api().runs(self.project)]
        except ValueError:  # no such project yet
            return []

    def discard(self, run_id: str) -> None:
        for run in self._runs():
            if run.name == run_id:
                run.delete()

    def send(self, run: TrackedRun) -> None:
        tags = {f"tag_{name}": value for name, value in run.tags.items()}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints instructions for each run
            started = self.trackio.init(
                self.project, name=run.run_id, config={**run.params, **tags}, embed=False, auto_log_gpu=False
            )
            for step, values in run.curves:
                started.log(values, step=step)
            started.log(run.summary, step=run.last_step + 1)  # one entry for each step
            self.trackio.finish()
        if run.run_id not in self.held():
            raise ValueError(f"Trackio stored nothing in {self.folder}; name a folder that may be written (--at)")


def read(place: str) -> Iterator[LoggedRun]:
    """The runs of a project, or of its database FILE.db. Trackio does not store how a run ended."""
    path = Path(place)
    if path.suffix != ".db":
        path = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_project_db_path(place)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; TRACKIO_DIR=FOLDER names another folder")
    with open_database(path) as database:
        ((version,),) = database.execute("PRAGMA user_version")
        if version > VERSION:
            raise ValueError(f"the database has version {version}; up to {VERSION} is known")
        logged = database.execute("SELECT run_id, run_name, metrics FROM metrics ORDER BY step, id").fetchall()
        configs = database.execute("SELECT run_id, run_name, config FROM configs").fetchall()
    runs = {id: LoggedRun(id=id, name=name, project=path.stem) for id, name, _ in (*configs, *logged)}
    for id, _, text in configs:
        runs[id] = replace(runs[id], config=json.loads(text))
    for id, _, text in logged:
        runs[id] = replace(runs[id], metrics={**runs[id].metrics, **json.loads(text)})
    yield from runs.values()
