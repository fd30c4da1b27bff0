"""`sparsedepth pack` and `unpack`: a results folder as a few files, and back. Neither imports torch."""

from pathlib import Path
from typing import Annotated

import typer


def pack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a finished sweep")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the pack, a new folder; default DIR.pack")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="keep the weights, which `measure` reads")] = False,
    digits: Annotated[
        int | None,
        typer.Option(
            "--digits",
            min=3,
            max=15,
            help="round curves and the values of layers, heads and pairs to this many significant digits; 5 save about "
            "a quarter of the size; `runs` is never rounded",
        ),
    ] = None,
) -> None:
    """Put all complete records of a results folder into a few files, which are read as the folder is."""
    from sparsedepth.store.packing import check_new
    from sparsedepth.store.packing import pack as write

    target = out or folder.resolve().with_name(f"{folder.resolve().name}.pack")
    check_new(target, folder)
    packed = write(folder, target, weights, digits)
    print(f"{target}: {packed.records} records in {packed.files} files, {packed.bytes / 1e6:.1f} MB")


def unpack(
    folder: Annotated[Path, typer.Argument(metavar="PACK", help="what `pack` wrote")],
    out: Annotated[Path, typer.Option("-o", "--out", help="the results folder, a new one")],
) -> None:
    """Make a pack the results folder it was: to measure or export its models, or to continue its sweep."""
    from sparsedepth.store.pack import is_pack, open_pack
    from sparsedepth.store.packing import check_new
    from sparsedepth.store.packing import unpack as write

    if not is_pack(folder):
        raise ValueError(f"{str(folder)!r} is no pack: it holds no pack.json")
    check_new(out, folder)
    unpacked = write(open_pack(folder), out)
    print(f"{out}: {unpacked.records} records in {unpacked.files} files, {unpacked.bytes / 1e6:.1f} MB")
    if unpacked.rewritten:
        print(f"{unpacked.rewritten} of them have new checksums: their tables are another pyarrow's, or were rounded")
