"""`sparsedepth pack` and `unpack`: convert a results folder to a few files, and back. Neither imports torch."""

from pathlib import Path
from typing import Annotated

import typer


def pack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a finished sweep")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="new folder for the pack; default DIR.pack")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="include weights, which `measure` needs")] = False,
    digits: Annotated[
        int | None,
        typer.Option(
            "--digits",
            min=2,
            max=15,
            help="round all views but `runs` to this many significant digits, quantities of `runs` to 7; 5 save about "
            "40% of the size",
        ),
    ] = None,
) -> None:
    """Pack the complete runs of a results folder into a few files. Commands that read the folder also read the pack."""
    from sparsedepth.store.packing import check_new
    from sparsedepth.store.packing import pack as write

    target = out or folder.resolve().with_name(f"{folder.resolve().name}.pack")
    check_new(target, folder)
    packed = write(folder, target, weights, digits)
    print(f"{target}: {packed.text}")


def unpack(
    folder: Annotated[Path, typer.Argument(metavar="PACK", help="folder written by `pack`")],
    out: Annotated[Path, typer.Option("-o", "--out", help="new results folder")],
) -> None:
    """Restore the results folder from a pack, to measure or export its models or to resume its sweep."""
    from sparsedepth.store.pack import is_pack, open_pack
    from sparsedepth.store.packing import check_new
    from sparsedepth.store.packing import unpack as write

    if not is_pack(folder):
        raise ValueError(f"{str(folder)!r} is not a pack: it has no pack.json; give a folder written by `pack`")
    check_new(out, folder)
    unpacked = write(open_pack(folder), out)
    print(f"{out}: {unpacked.text}")
    if unpacked.rewritten:
        print(f"{unpacked.rewritten} of them have new checksums: rounded, or written by another version of pyarrow")
