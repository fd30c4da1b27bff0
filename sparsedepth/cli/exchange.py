"""`export`, `import`, `pack` and `sync`: models and runs to and from other programs. Only `export` imports torch."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from sparsedepth.cli import option
from sparsedepth.cli.option import Deadline, Folder
from sparsedepth.files import MARKER
from sparsedepth.words.plain_text import commas, counted, in_shell

if TYPE_CHECKING:
    from sparsedepth.exchange.export import Exported
    from sparsedepth.store.import_table import Imported


@dataclass(frozen=True)
class ExportCommand:
    """A run as a model of transformers in a new folder `out`; what was written, and how far its logits agree.

    Raises ValueError for a run that cannot be expressed, and where logits differ."""

    run: Annotated[Folder, Argument(help="folder of a complete run")]
    out: Annotated[Folder, Option("-o", "--out", help="new folder")]

    def compute(self) -> "Exported":
        from sparsedepth.exchange.export import export as export_run

        return export_run(Path(self.run), option.path(self.out))


@option.command
def export(given: ExportCommand) -> None:
    """Export a run as a Hugging Face model (Llama, Mixtral, ...), and check that its logits agree."""
    exported = given.compute()
    print(f"written: {exported.folder}, a {exported.family} model of transformers")
    parity = commas(f"{value:.1e} on {name}" for name, value in exported.parity.items())
    print(f"logits differ by {parity}, in transformers {exported.transformers}")
    for note in exported.notes:
        print(f"note: {note}")


@dataclass(frozen=True)
class ImportCommand:
    """Runs of others from a table or a tracker, written to the new folder `out`; how many, and what is not known.

    Raises ValueError for a map or a table with mistakes, all at once."""

    table: Annotated[
        str,
        Argument(
            metavar="TABLE",
            help="one run per row: .csv, .tsv, .json, .jsonl, .parquet; or a tracker's runs: wandb:PATH, mlflow:URI, "
            "tensorboard:DIR, trackio:PROJECT",
        ),
    ]
    map: Annotated[Folder, Option("--map", metavar="MAP.yaml", help="columns to fields; see `init import`")]
    out: Annotated[Folder, Option("-o", "--out", help="new results folder")]
    deadline: Deadline = 60.0

    def compute(self) -> "Imported":
        from sparsedepth.cli.input_file import read_input
        from sparsedepth.store.import_table import import_table
        from sparsedepth.store.run_record import check_place
        from sparsedepth.trackers.runs import read_source

        out = option.path(self.out)
        map_file = Path(self.map)
        check_place(out)
        read = partial(read_source, table_map=read_input(map_file, "import"), seconds=self.deadline)
        return import_table(str(self.table), map_file, out, read)


@option.command
def import_(given: ImportCommand) -> None:
    """Import third-party training runs from a table or a tracker, for query, best, effects, scaling and plot."""
    from sparsedepth.words.runs import unknown_text

    result = given.compute()
    out = given.out
    skipped = {"excluded by where": result.excluded, "lack a value": result.incomplete}
    skipped_text = "".join(f"; {count} {reason}" for reason, count in skipped.items() if count)
    found = f"{counted(result.runs, 'run')} in {counted(result.clusters, 'cluster')}"
    print(f"{out}: {found}, from {counted(result.rows, 'row')}{skipped_text}")
    for note in result.notes:
        print(f"note: {note}")
    if result.unknown:
        print(f"{unknown_text(result.unknown)} in every run: NULL, and named in the column unknown_fields")
    folder = in_shell(out)
    print("a recipe from imported runs fails its in-sample test: their other choices are unknown")
    print(f"next:\n  sparsedepth best {folder}")
    print(f"  sparsedepth scaling fit {folder}{' --cluster run' if result.clusters < result.runs else ''}")


class Packed(NamedTuple):
    folder: Path
    n_records: int
    n_files: int
    n_bytes: int


@dataclass(frozen=True)
class PackCommand:
    """The complete runs of a results folder in a few files: the new folder, and what is in it.

    Raises ValueError where there is no record, or one is damaged."""

    folder: Annotated[Folder, Argument(metavar="DIR", help="results folder of a finished sweep")]
    out: Annotated[Folder | None, Option("-o", "--out", help="new folder for the pack; default DIR.pack")] = None

    def compute(self) -> Packed:
        from sparsedepth.store.packs import pack as write
        from sparsedepth.store.run_record import check_place

        folder = Path(self.folder)
        target = option.path(self.out or folder.resolve().with_name(f"{folder.resolve().name}.pack"))
        if folder.resolve() in target.resolve().parents:  # its runs would be found twice
            raise ValueError(f"{str(target)!r} is inside its source {str(folder)!r}; name a folder outside with -o")
        check_place(target)
        n_records = write(folder, target)
        sizes = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
        return Packed(target, n_records, len(sizes), sum(sizes))


@option.command
def pack(given: PackCommand) -> None:
    """Pack the complete runs of a results folder into a few files. Commands that read the folder also read the pack."""
    packed = given.compute()
    size = f"{packed.n_bytes / 1e6:,.1f} MB" if packed.n_bytes >= 1e6 else f"{packed.n_bytes / 1e3:.1f} kB"
    print(f"{packed.folder}: {counted(packed.n_records, 'record')} in {counted(packed.n_files, 'file')}, {size}")


def sync(
    folder: Annotated[Path, Argument(metavar="DIR", help="results folder")],
    to: Annotated[str, Option(help="tensorboard, mlflow, trackio or wandb (offline)")],
    at: Annotated[str | None, Option(help="its folder, or MLflow's URI; default in DIR/trackers")] = None,
    project: Annotated[str | None, Option(help="project or experiment; default the sweep's name")] = None,
    watch: Annotated[bool, Option("--watch", help="repeat until no run is left")] = False,
    every: Annotated[float, Option(min=0.1, help="seconds between updates with --watch")] = 30.0,
) -> None:
    """Send each finished run to a tracker, once: parameters, curves, measurements and tags."""
    from sparsedepth.trackers.runs import has_unfinished_runs, open_tracker, sync as send

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
    print(f"{counted(n_sent, 'run')} sent to {to}: {tracker.place}\nnext: {tracker.view_command}")
