"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.files import check_parent


def _in_a_folder(out: Path | None) -> Path | None:
    if out is not None:
        check_parent(out)
    return out


# Training

Out = Annotated[Path, typer.Option("-o", "--out", help="results folder; created if missing")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="override a field or a sweep key: --set n_layers=24; repeatable")
]
Override = Annotated[list[str] | None, typer.Option("--set", help="override a field: --set n_layers=24; repeatable")]
Vary = Annotated[
    list[str] | None,
    typer.Option(help="sweep without a file: --vary n_kv_heads=1,2,4; repeatable, all combinations run"),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="with --vary: number of seeds per configuration")]
Base = Annotated[Path | None, typer.Option(help="with --vary: run configuration (YAML) shared by all runs")]
Scale = Annotated[str | None, typer.Option(help="size preset from the definition's `scales`, such as micro")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0")]
Compile = Annotated[bool, typer.Option("--compile", help="compile each block with torch.compile")]
Runtime = Annotated[
    list[str] | None,
    typer.Option(
        help="setting that changes results by rounding at most: --runtime micro_batch=4 --runtime checkpoint_seconds=60"
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="runs in parallel on each GPU (or group of --gpus-per-run), or on the CPU; default one per GPU or core"
    ),
]
Gpus = Annotated[str | None, typer.Option(help="GPUs to use, such as 0-7 or 0,2; default all")]
GpusOrPerTask = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help="GPUs to use, such as 0-7 or 0,2; default all. With --on slurm: GPUs per task, 1 or h100:2; "
        "with --on h100: how many",
    ),
]
GpusPerRun = Annotated[int, typer.Option(min=1, help="GPUs (on a CPU: processes) per run, with torchrun")]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="SPARSEDEPTH_STORAGE",
        help="postgresql://USER@HOST/DATABASE for the queue of several machines; default a journal file in DIR",
    ),
]
Stack = Annotated[
    str,
    typer.Option(help="train up to N runs of equal shape in one process as one model; auto: where faster; 1: never"),
]
MaxAttempts = Annotated[int, typer.Option(min=1, help="attempts per run before it counts as failed")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the estimated cost, as `plan` does, and exit")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="try failed runs again")]

# Slurm

On = Annotated[
    str | None, typer.Option("--on", help="slurm: submit a job array from this login node; default run locally")
]
Partition = Annotated[str | None, typer.Option(help="--on slurm: partition (queue)")]
TimeLimit = Annotated[
    str | None, typer.Option("--time", help="--on slurm: time limit per task, such as 4:00:00; default the partition's")
]
Array = Annotated[int | None, typer.Option(min=1, help="--on slurm: number of tasks; default one per run, at most 64")]
Account = Annotated[str | None, typer.Option(help="--on slurm: account")]
Nodes = Annotated[int, typer.Option(min=1, help="--on slurm: nodes per run, with --gpus-per-run on each")]
Sbatch = Annotated[
    list[str] | None, typer.Option(help="--on slurm: another sbatch option: --sbatch qos=low; repeatable")
]

# Reading results

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="results folders, or run folders")]
Format = Annotated[
    str | None,
    typer.Option(help="table, csv, json, markdown, latex or parquet; default by the suffix of -o, else table"),
]
OutFile = Annotated[
    Path | None, typer.Option("-o", "--out", callback=_in_a_folder, help="write the output to this file")
]
Objective = Annotated[
    str, typer.Option("--objective", "--by", help="quantity to improve: loss (the comparable validation loss), ...")
]
SkipDamaged = Annotated[bool, typer.Option("--skip-damaged", help="ignore damaged runs, and report how many")]
