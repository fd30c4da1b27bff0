"""`sparsedepth import`: a third-party table of training runs as a results folder. Imports no torch."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

SECONDS = 3600.0
"""Time limit of an import."""


def import_(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="table with one run per row: .csv, .tsv, .json, .jsonl, .parquet; or runs of a tracker: wandb:PATH, "
            "mlflow:URI, tensorboard:DIR, trackio:PROJECT",
        ),
    ],
    map_file: Annotated[
        Path, typer.Option("--map", metavar="MAP.yaml", help="maps columns to fields; template: `init import`")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="new results folder")],
) -> None:
    """Import third-party training runs from a table or a tracker, for query, best, effects, scaling and plot."""
    from sparsedepth.cli.input_file import read_input
    from sparsedepth.store.fences import limited
    from sparsedepth.store.import_table import import_table
    from sparsedepth.store.packing import check_new
    from sparsedepth.store.subject import unknown_text
    from sparsedepth.trackers.logged_runs import as_table

    check_new(out)
    table_map = read_input(map_file, "import")
    with limited(SECONDS), as_table(str(table), table_map) as path:
        result = import_table(path, map_file, out)
    skipped = {"excluded by where": result.excluded, "lack a value": result.incomplete}
    skipped_text = "".join(f"; {count} {reason}" for reason, count in skipped.items() if count)
    print(f"{out}: {result.runs} runs in {result.clusters} clusters, from {result.rows} rows{skipped_text}")
    if result.unknown:
        print(f"{unknown_text(result.unknown)} in every run: NULL, and named in the column unknown_fields")
    folder = quote(str(out))
    print("a recipe from imported runs fails its in-sample test: their other choices are unknown")
    print(f"next:\n  sparsedepth best {folder}")
    print(f"  sparsedepth scaling fit {folder}{' --cluster run' if result.clusters < result.runs else ''}")
