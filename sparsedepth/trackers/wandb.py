"""Weights & Biases, offline: a folder per run, for the user to upload with `wandb sync`."""

import os
import shutil
from pathlib import Path

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported

import wandb

from sparsedepth.trackers.tracked_run import TrackedRun


class Tracker:
    """A folder of offline runs."""

    def __init__(self, folder: Path, at: str | None, project: str) -> None:
        """`at`: the folder in which wandb makes its own."""
        self.folder, self.project = Path(at or folder).resolve(), project
        self.place = str(self.folder)

    def held(self) -> None:
        """Unknown: `wandb sync --clean` removes uploaded runs."""

    def discard(self, run_id: str) -> None:
        for folder in self.folder.glob(f"wandb/offline-run-*-{run_id}"):
            shutil.rmtree(folder)

    def send(self, run: TrackedRun) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            mode="offline", silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        tags = [value for name, value in run.tags.items() if name in ("outcome", "tuning")]
        started = wandb.init(
            id=run.run_id,
            name=run.run_id,
            project=self.project,
            dir=self.folder,
            config={**run.params, **{f"tag_{name}": value for name, value in run.tags.items()}},
            tags=tags,
            settings=settings,
        )
        for step, values in run.curves:
            started.log(values, step=step)
        started.summary.update(run.summary)
        started.finish(exit_code=int(run.tags.get("outcome") == "diverged"))

    def view_command(self) -> str:
        return f"wandb sync {self.folder}/wandb/offline-run-*   (uploads)"
