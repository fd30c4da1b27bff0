"""`sparsedepth plot`: figures of results folders, with their numbers. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli.query import SkipDamaged


def plot(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR...", help="results folders, or run folders")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="picture (.png, .svg or .pdf), or a folder for pictures named by figure"),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(help="a name of --list, or all; default: the overview, or all into a folder")
    ] = None,
    format: Annotated[str, typer.Option(help="of pictures in a folder: png, svg or pdf")] = "png",
    run: Annotated[
        str | None, typer.Option(help="run_id of a figure of one run; default the lowest val_loss at the deepest depth")
    ] = None,
    skip_damaged: SkipDamaged = False,
    show_list: Annotated[bool, typer.Option("--list", help="name every figure, and what it shows")] = False,
) -> None:
    """Draw how sparsity, variance and effectiveness move together, with the numbers as CSV beside each picture."""
    from sparsedepth.cli import calls
    from sparsedepth.plots.draw import FIGURES

    if show_list:
        width = max(map(len, FIGURES))
        print("\n".join(f"{name:{width}}  {kind.meaning}" for name, kind in FIGURES.items()))
        return
    if not folders or out is None:
        raise ValueError("name a results folder and an output: sparsedepth plot DIR -o figure.png (or --list)")
    figures = calls.plot(*folders, out=out, figure=figure, format=format, run=run, skip_damaged=skip_damaged)
    for path in figures.paths:
        print(f"{path} ({path.stat().st_size // 1024} KiB), numbers in {path.with_suffix('.csv').name}")
    for name, reason in figures.left_out.items():
        print(f"left out {name}: {reason}")
