"""`sparsedepth pack`: a results folder as a few files. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer


def pack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a finished sweep")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="new folder for the pack; default DIR.pack")] = None,
) -> None:
    """Pack the complete runs of a results folder into a few files. Commands that read the folder also read the pack."""
    from sparsedepth.store.packing import check_new
    from sparsedepth.store.packing import pack as write

    target = out or folder.resolve().with_name(f"{folder.resolve().name}.pack")
    check_new(target, folder)
    print(f"{target}: {write(folder, target)}")
