"""`sparsedepth sync`: finished runs in TensorBoard, MLflow, Trackio or Weights & Biases. Imports no torch."""

import time
from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.files import MARKER


def sync(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder")],
    to: Annotated[str, typer.Option(help="tensorboard, mlflow, trackio or wandb (offline)")],
    at: Annotated[
        str | None, typer.Option(help="the tracker's folder, or MLflow's tracking URI; default in DIR/trackers")
    ] = None,
    project: Annotated[str | None, typer.Option(help="project or experiment; default the sweep's name")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="repeat until no run is left")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between updates with --watch")] = 30.0,
) -> None:
    """Send each finished run to a tracker, once: parameters, curves, measurements and tags."""
    from sparsedepth.trackers.sync import has_unfinished_runs, open_tracker
    from sparsedepth.trackers.sync import sync as send

    if not folder.is_dir():
        raise ValueError(f"{folder} is not an existing folder; give a results folder")
    tracker = open_tracker(to, folder, at, project)
    n_sent = 0
    while True:
        # before sending: a run that ends meanwhile is sent in the next round
        repeats = watch and has_unfinished_runs(folder)
        if not repeats or any(folder.glob(f"runs/*/{MARKER}")):
            for run_id in send(folder, to, tracker):
                n_sent += 1
                print(f"sent {run_id}", flush=True)
        if not repeats:
            break
        time.sleep(every)
    print(f"{n_sent} runs sent to {to}: {tracker.place}\nnext: {tracker.view_command()}")
