"""`sparsedepth plot`: figures of results folders, with their data. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli import calls, option


def plot(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR...", help="results folders, or run folders")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="image (.png, .svg or .pdf), or a folder for images named by figure"),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(help="name from --list, or all; default the overview, or all for a folder")
    ] = None,
    format: Annotated[str | None, typer.Option(help="image format in a folder: png (default), svg or pdf")] = None,
    run: Annotated[
        str | None,
        typer.Option(help="run_id, for figures of one run; default the lowest val_loss at the largest depth"),
    ] = None,
    skip_damaged: option.SkipDamaged = False,
    show_list: Annotated[bool, typer.Option("--list", help="list all figures and what they show")] = False,
) -> None:
    """Draw figures of sparsity, residual variance and layer effectiveness, each with its data as CSV."""
    from sparsedepth.plots.draw import FIGURES, check_figure
    from sparsedepth.store.terminal import wrapped

    if show_list:
        width = max(map(len, FIGURES))
        print("\n".join(f"{name:{width}}  {kind.meaning}" for name, kind in FIGURES.items()))
        return
    if figure is not None:
        check_figure(figure)
    if not folders or out is None:
        raise ValueError("give a results folder and an output: sparsedepth plot DIR -o figure.png (or --list)")
    figures = calls.plot(*folders, out=out, figure=figure, format=format, run=run, skip_damaged=skip_damaged)
    for path in figures.paths:
        print(f"{path} ({path.stat().st_size // 1024} KiB), data in {path.with_suffix('.csv')}")
    print(wrapped(f"skipped {name}: {reason}" for name, reason in figures.left_out.items()), end="")
