"""Trackio: each run is a run of a project in Trackio's local database; nothing is uploaded to a Space."""

import contextlib
import importlib
import io
import os
from pathlib import Path

from sparsedepth.trackers.tracked_run import TrackedRun


class Tracker:
    """A project in the databases of a folder."""

    def __init__(self, folder: Path, at: str | None, project: str) -> None:
        """`at`: the folder of Trackio's databases (default: TRACKIO_DIR, else one in the results folder)."""
        self.folder = Path(at or os.environ.get("TRACKIO_DIR") or folder.resolve() / "trackio")
        os.environ["TRACKIO_DIR"] = str(self.folder)  # read when trackio is imported
        self.trackio = importlib.import_module("trackio")
        self.project, self.place = project, f"{self.folder} {project}"

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

    def view_command(self) -> str:
        return f"TRACKIO_DIR={self.folder} trackio show --project {self.project}"
