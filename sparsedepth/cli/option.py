"""The options of a command are the fields of one record, from which the command line (`command`) and the Python call
(`call`) are derived: name, type, default and help are stated once.

Folder, Input, ... are what a Python call accepts for a type checker, and what the command line gives when it runs."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, ParamSpec, Protocol, TypeVar

from typer import Argument, Exit, Option

from sparsedepth.files import check_not_empty, check_parent
from sparsedepth.words.plain_text import commas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsedepth.cli.input_file import Axes, Input, Settings
    from sparsedepth.store.connection import Store

    Folder = ModelName = Path | str
    FolderList = Folder | Sequence[Folder]
    Names = NameList = Sequence[str] | str
    Number = int | str
else:
    Folder = Input = Path
    Settings = Axes = list[str]
    FolderList = list[Path]
    NameList = list[str]
    ModelName = Names = Number = str

Keywords = ParamSpec("Keywords")
Result = TypeVar("Result", covariant=True)


class Command(Protocol[Result]):
    """A record of options that computes its result, and prints nothing."""

    def compute(self) -> Result: ...


def call(record: Callable[Keywords, Command[Result]]) -> Callable[Keywords, Result]:
    """The Python call of a command: the fields of its record are the keywords, told with their help."""
    fields = inspect.signature(record).parameters
    signature = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in fields.values()])

    @functools.wraps(record, assigned=("__module__", "__doc__"), updated=())
    def computed(*values: Keywords.args, **named: Keywords.kwargs) -> Result:
        try:
            signature.bind(*values, **named)
        except TypeError as error:
            raise TypeError(f"sparsedepth.{computed.__name__}: {error}; it takes {commas(fields)}") from None
        return record(*values, **named).compute()

    told = "".join(
        f"\n{name}: {metadata.help}"
        for name, each in fields.items()
        for metadata in getattr(each.annotation, "__metadata__", ())
        if getattr(metadata, "help", None)
    )
    computed.__doc__ = f"{inspect.cleandoc(record.__doc__ or '')}\n{told}"
    computed.__signature__ = signature  # ty: ignore[missing-attribute]
    return computed


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes `function(given, ...)` a command, whose options are the fields of the record `given` and the parameters
    that the function declares itself."""
    first, *own = inspect.signature(function).parameters.values()
    fields = inspect.signature(first.annotation).parameters
    options = [*fields.values(), *(option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own)]
    signature = inspect.Signature(options)

    @functools.wraps(function)
    def run(*values: Any, **named: Any) -> None:
        bound = signature.bind(*values, **named)
        bound.apply_defaults()
        given = first.annotation(**{name: bound.arguments.pop(name) for name in fields})
        function(given, **bound.arguments)

    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = signature  # ty: ignore[missing-attribute]
    return run


def _writable(out: Path | None) -> Path | None:
    if out is not None:
        check_parent(out)
    return out


def path(out: Path | str) -> Path:
    """The path of an output. Raises ValueError for an empty one."""
    check_not_empty("out", out)
    return Path(out)


def path_of_file(out: Path | str | None) -> Path | None:
    return None if out is None else path(out)


def aside(text: object) -> None:
    """Tell people what programs that read stdout do not want."""
    print(text, file=sys.stderr, flush=True)


def stop(text: object, code: int) -> NoReturn:
    """End a command, and say why."""
    aside(text)
    raise Exit(code)


Out = Annotated[Folder, Option("-o", "--out", help="results folder; created if missing")]
Objective = Annotated[str, Option("--objective", "--by", help="quantity to improve")]
RecipeDepth = Annotated[int | None, Option(help="n_layers of the recipe; default the deepest")]
Folders = Annotated[FolderList, Argument(metavar="DIR...", help="results folders, or run folders")]
Format = Annotated[str | None, Option(help="table, csv, json, markdown, latex or parquet; default by -o's suffix")]
TextFormat = Annotated[str, Option(help="table, csv, json, markdown or latex")]
TableOrJson = Annotated[Literal["table", "json"], Option(help="output format")]
OutFile = Annotated[Path | None, Option("-o", "--out", callback=_writable, help="write the output to this file")]
Deadline = Annotated[float, Option(min=1.0, help="seconds in which a further part of a file must be read")]
SkipDamaged = Annotated[bool, Option("--skip-damaged", help="ignore damaged runs, and report how many")]
Gpus = Annotated[str | None, Option(help="GPUs to use, such as 0-7 or 0,2; default all")]
Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:0 or mps")]


@dataclass(frozen=True)
class FolderOptions:
    """What is read."""

    folders: Folders
    _: KW_ONLY
    skip_damaged: SkipDamaged = False

    @property
    def paths(self) -> list[Path]:
        return [Path(self.folders)] if isinstance(self.folders, str | Path) else [*map(Path, self.folders)]

    def open(self, time_limit: float = 60.0) -> "Store":
        """The runs that are read; `time_limit`: seconds of a query."""
        from sparsedepth.store.connection import open_store

        return open_store(*self.paths, time_limit=time_limit, skip_damaged=self.skip_damaged)


@dataclass(frozen=True)
class DefinitionOptions:
    """A sweep's runs."""

    file: Annotated[Input | None, Argument(help="sweep definition (YAML); or use --vary")] = None
    _: KW_ONLY
    vary: Annotated[Axes | None, Option(help="sweep without a file: --vary n_kv_heads=1,2,4; repeatable")] = None
    seeds: Annotated[int | None, Option(min=1, help="with --vary: number of seeds per configuration")] = None
    base: Annotated[Input | None, Option(help="with --vary: run configuration (YAML) shared by all runs")] = None
    scale: Annotated[str | None, Option(help="size preset from the definition's `scales`, such as micro")] = None
    set: Annotated[
        Settings | None,
        Option("--set", help="override a field or a sweep key: --set n_layers=24; repeatable"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How runs are computed."""

    device: Device = "auto"
    runtime: Annotated[
        Settings | None,
        Option(help="setting that changes results by rounding at most: --runtime micro_batch=4; repeatable"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(RuntimeOptions):
    """How many runs at a time, and on what."""

    workers: Annotated[
        int | None,
        Option(
            min=1,
            help="runs in parallel on each GPU (or group of --gpus-per-run), or on the CPU; default one per core; "
            "two on a GPU if they fit, or as many as timed steps or finished runs show to be faster",
        ),
    ] = None
    gpus: Gpus = None
    gpus_per_run: Annotated[int, Option(min=1, help="GPUs (on a CPU: processes) per run, with torchrun")] = 1
    stack: Annotated[Number, Option(help="train up to N runs of equal shape as one model; auto: where faster")] = "auto"


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """The queue of a sweep."""

    storage: Annotated[
        str | None,
        Option(
            envvar="SPARSEDEPTH_STORAGE",
            help="postgresql://USER@HOST/DATABASE for the queue of several machines; default a journal file in DIR",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where runs go, and how often each is tried."""

    out: Out
    max_attempts: Annotated[int, Option(min=1, help="attempts per run before it counts as failed")] = 2
    retry_failed: Annotated[bool, Option("--retry-failed", help="try failed runs again")] = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(WorkerOptions, StorageOptions, DefinitionOptions, ResultOptions):
    """All of a sweep."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(WorkerOptions):
    """What --on slurm adds, or reads in another way."""

    gpus: Annotated[
        str | None,
        Option(help="GPUs to use, such as 0-7 or 0,2; default all. With --on slurm: GPUs per task, 1 or h100:2"),
    ] = None
    partition: Annotated[str | None, Option(help="--on slurm: partition (queue)")] = None
    time: Annotated[str | None, Option(help="--on slurm: time limit per task, such as 4:00:00")] = None
    array: Annotated[int | None, Option(min=1, help="--on slurm: tasks; default one per run, at most 64")] = None
    account: Annotated[str | None, Option(help="--on slurm: account")] = None
    nodes: Annotated[int, Option(min=1, help="--on slurm: nodes per run, with --gpus-per-run on each")] = 1
    sbatch: Annotated[list[str] | None, Option(help="--on slurm: more for sbatch: --sbatch qos=low")] = None
