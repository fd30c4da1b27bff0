"""`sparsedepth import`: somebody else's table of training runs as a store. Imports no torch."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer


def import_(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="runs, one a row: .csv, .tsv, .json, .jsonl, .parquet")
    ],
    map_file: Annotated[Path, typer.Option("--map", metavar="MAP.yaml", help="which column is what: `init import`")],
    out: Annotated[Path, typer.Option("-o", "--out", help="the store, a new folder")],
) -> None:
    """Take a table of other people's training runs into a store that query, best, effects, scaling and plot read."""
    from sparsedepth.cli.input_file import read_input
    from sparsedepth.store.import_table import import_table
    from sparsedepth.store.packing import check_new

    check_new(out)
    read_input(map_file, "import")
    taken = import_table(table, map_file, out)
    left = {"do not meet where": taken.not_wanted, "lack a value": taken.incomplete}
    said = "".join(f"; {count} {why}" for why, count in left.items() if count)
    print(f"{out}: {taken.runs} runs in {taken.clusters} clusters, of {taken.rows} rows{said}")
    if taken.unknown:
        print(f"unknown of every run (NULL, and in the column unknown_fields): {', '.join(taken.unknown)}")
    folder = quote(str(out))
    print(f"others' runs give a recipe of grade D at best; go on with: sparsedepth best {folder}; scaling fit {folder}")
