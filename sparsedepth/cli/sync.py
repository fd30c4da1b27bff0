"""`sparsedepth sync`: finished runs in TensorBoard, MLflow, Trackio or Weights & Biases. Imports no torch."""

import time
from pathlib import Path
from typing import Annotated

import typer


def sync(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder")],
    to: Annotated[str, typer.Option(help="tensorboard, mlflow, trackio or wandb (offline)")],
    at: Annotated[
        str | None,
        typer.Option(help="where it keeps them: a folder, or MLflow's tracking URI; default in DIR/trackers"),
    ] = None,
    project: Annotated[str | None, typer.Option(help="project or experiment; default the sweep's name")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="again and again, until nothing is left to run")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between two looks of --watch")] = 30.0,
) -> None:
    """Send finished runs to a tracker, each once: parameters, curves, what was measured, and tags."""
    from sparsedepth.trackers.sync import is_running, open_tracker
    from sparsedepth.trackers.sync import sync as send

    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder that exists; name a results folder")
    tracker = open_tracker(to, folder, at, project)
    n_sent = 0
    while True:
        goes_on = watch and is_running(folder)  # asked first: what ends meanwhile is sent in the next round
        if not goes_on or any(folder.glob("runs/*/complete")):
            for run_id in send(folder, to, tracker):
                n_sent += 1
                print(f"sent {run_id}", flush=True)
        if not goes_on:
            break
        time.sleep(every)
    print(f"{n_sent} runs sent to {to}: {tracker.place}\nnext: {tracker.view_command()}")
