"""The options: what each keyword is on the command line. A command takes its keywords from the Python call (`of_call`).

Folder, Input, ... are what a Python call accepts for a type checker, and what the command line gives when it runs."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from sparsedepth.files import check_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsedepth.cli.input_file import Axes, Input, Settings

    Folder = ModelName = Path | str
    Names = Sequence[str] | str
    Number = int | str
else:
    Folder = Input = Path
    Settings = Axes = list[str]
    ModelName = Names = Number = str

Given = Mapping[str, Any]
"""The keywords of a call, with the values of the command line."""


def of_call(
    *calls: Callable[..., Any], only: Collection[str] | None = None, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes `function(given, ...)` a command with the keywords, defaults and help of the calls, and with those that it
    declares itself, which take the place of a call's. `given` gets the keywords of the calls."""
    derived = {
        parameter.name: _on_command_line(parameter)
        for call in calls
        for parameter in inspect.signature(call).parameters.values()
        if (only is None or parameter.name in only) and parameter.name not in without
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function).parameters.values()
        kinds = {name: parameter.kind for name, parameter in derived.items()}
        own = {
            parameter.name: parameter.replace(kind=kinds.get(parameter.name, inspect.Parameter.KEYWORD_ONLY))
            for parameter in own
        }
        signature = inspect.Signature([*(derived | own).values()])

        @functools.wraps(function)
        def command(*values: Any, **named: Any) -> None:
            bound = signature.bind(*values, **named)
            bound.apply_defaults()
            given = {name: value for name, value in bound.arguments.items() if name in derived}
            function(given, **{name: bound.arguments[name] for name in own})

        command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        command.__signature__ = signature  # ty: ignore[missing-attribute]
        return command

    return decorate


def _on_command_line(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter of a call as that of a command; *folders is a list."""
    if parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
        return parameter
    given, info = get_args(parameter.annotation)
    annotation = Annotated[GenericAlias(list, given), info]  # ty: ignore[invalid-type-form]
    return parameter.replace(annotation=annotation, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _writable(out: Path | None) -> Path | None:
    if out is not None:
        check_parent(out)
    return out


# Training

RunFile = Annotated[Input, typer.Argument(help="run configuration (YAML)")]
SweepFile = Annotated[Input | None, typer.Argument(help="sweep definition (YAML); or use --vary")]
Out = Annotated[Folder, typer.Option("-o", "--out", help="results folder; created if missing")]
Override = Annotated[Settings | None, typer.Option("--set", help="override a field: --set n_layers=24; repeatable")]
SweepOverride = Annotated[
    Settings | None, typer.Option("--set", help="override a field or a sweep key: --set n_layers=24; repeatable")
]
Vary = Annotated[Axes | None, typer.Option(help="sweep without a file: --vary n_kv_heads=1,2,4; repeatable")]
Seeds = Annotated[int | None, typer.Option(min=1, help="with --vary: number of seeds per configuration")]
Base = Annotated[Input | None, typer.Option(help="with --vary: run configuration (YAML) shared by all runs")]
Scale = Annotated[str | None, typer.Option(help="size preset from the definition's `scales`, such as micro")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default all")]
From = Annotated[
    Folder | None, typer.Option("--from", help="run or Hugging Face folder with the initial weights; default random")
]
Runtime = Annotated[
    Settings | None,
    typer.Option(help="setting that changes results by rounding at most: --runtime micro_batch=4; repeatable"),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="runs in parallel on each GPU (or group of --gpus-per-run), or on the CPU; default one per core or GPU, "
        "or as many on a GPU as timed steps or finished runs show to be faster",
    ),
]
Gpus = Annotated[str | None, typer.Option(help="GPUs to use, such as 0-7 or 0,2; default all")]
GpusPerRun = Annotated[int, typer.Option(min=1, help="GPUs (on a CPU: processes) per run, with torchrun")]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="SPARSEDEPTH_STORAGE",
        help="postgresql://USER@HOST/DATABASE for the queue of several machines; default a journal file in DIR",
    ),
]
Stack = Annotated[Number, typer.Option(help="train up to N runs of equal shape as one model; auto: where faster")]
MaxAttempts = Annotated[int, typer.Option(min=1, help="attempts per run before it counts as failed")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="try failed runs again")]


def slurm(
    *,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs to use, such as 0-7 or 0,2; default all. With --on slurm: GPUs per task, 1 or h100:2; "
            "with --on h100: how many"
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="--on slurm: partition (queue)")] = None,
    time: Annotated[str | None, typer.Option(help="--on slurm: time limit per task, such as 4:00:00")] = None,
    array: Annotated[int | None, typer.Option(min=1, help="--on slurm: tasks; default one per run, at most 64")] = None,
    account: Annotated[str | None, typer.Option(help="--on slurm: account")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="--on slurm: nodes per run, with --gpus-per-run on each")] = 1,
    sbatch: Annotated[list[str] | None, typer.Option(help="--on slurm: more for sbatch: --sbatch qos=low")] = None,
) -> None:
    """The options that --on slurm adds or reads in another way, for `of_call`."""


# Measuring

Model = Annotated[ModelName, typer.Argument(help="run folder, local Hugging Face folder, or hub name")]
Data = Annotated[str | None, typer.Option(help="text: stdlib, a path or hub:NAME; default the run's own, else stdlib")]
Tokens = Annotated[
    Folder | None,
    typer.Option(help="token ids instead: .npy, integers [sequences, length + 1], the last of a row only a target"),
]
Targets = Annotated[
    Folder | None,
    typer.Option(help="targets for --tokens, both [sequences, length]; positions with -100 are not scored"),
]
FitTokens = Annotated[
    Folder | None,
    typer.Option(help="token ids to fit usefulness's linear maps; default the last half of --tokens, not scored"),
]
SeqLen = Annotated[int | None, typer.Option(help="context length; default the run's own, else 256")]
Measures = Annotated[Names | None, typer.Option(help="all, or names: causal,permutation,...; default those of a run")]
MeasureOverride = Annotated[
    Settings | None, typer.Option("--set", help="override a measuring field: --set measure_tokens=4096; repeatable")
]
RecordFolder = Annotated[Folder | None, typer.Option("-o", "--out", help="folder for the record, for query and plot")]

# Reading results

FOLDERS = typer.Argument(metavar="DIR...", help="results folders, or run folders")
Folders = Annotated[list[Path], FOLDERS]
EachFolder = Annotated[Folder, FOLDERS]
"""of *folders"""
By = Annotated[str | None, typer.Option("--by", "--objective", help="quantity to rank by; default the loss")]
Objective = Annotated[str, typer.Option("--objective", "--by", help="quantity to improve")]
Depth = Annotated[int | None, typer.Option(help="only runs with this n_layers")]
Where = Annotated[str | None, typer.Option(help='only runs that satisfy this SQL condition: "params_active < 5e7"')]
Top = Annotated[int, typer.Option(min=1, help="number of configurations")]
RecipeFile = Annotated[
    Folder | None, typer.Option("-o", "--out", help="run configuration to write (YAML), with its card (.md, .json)")
]
RecipeDepth = Annotated[int | None, typer.Option(help="n_layers of the recipe; default the deepest")]
Matched = Annotated[str, typer.Option(help="a setting may use no more of this than its baseline")]
HoldoutDepth = Annotated[int | None, typer.Option(help="test the recipe of the smaller n_layers at this one")]
Images = Annotated[Folder | None, typer.Option("-o", "--out", help="image (.png, .svg or .pdf), or a folder of them")]
Figure = Annotated[str | None, typer.Option(help="name from --list, or all; default the chain, or all for a folder")]
FigureStyle = Annotated[str, typer.Option(help="screen; or paper: one column, 9 pt, PDF and PNG, the caption printed")]
ImageFormat = Annotated[str | None, typer.Option(help="image format in a folder: png (default), svg or pdf")]
FigureRun = Annotated[str | None, typer.Option(help="run_id, for figures of one run; default the best of the deepest")]
Format = Annotated[
    str | None, typer.Option(help="table, csv, json, markdown, latex or parquet; default by -o's suffix")
]
OutFile = Annotated[Path | None, typer.Option("-o", "--out", callback=_writable, help="write the output to this file")]
SkipDamaged = Annotated[bool, typer.Option("--skip-damaged", help="ignore damaged runs, and report how many")]
