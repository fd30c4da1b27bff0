"""`sparsedepth plot`: figures of results folders, with their numbers. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(plot)


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
        str | None,
        typer.Option(help="run_id of a figure of one run; default the lowest val_loss at the deepest depth"),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="name every figure, and what it shows")] = False,
) -> None:
    """Draw how sparsity, variance and effectiveness move together, with the numbers as CSV beside each picture."""
    from sparsedepth.plots.draw import FIGURES, default_figure, draw, draw_all
    from sparsedepth.plots.page import FORMATS
    from sparsedepth.store.connection import open_store

    if show_list:
        width = max(map(len, FIGURES))
        print("\n".join(f"{name:{width}}  {kind.meaning}" for name, kind in FIGURES.items()))
        return
    if not folders or out is None:
        raise ValueError("name a results folder and an output: sparsedepth plot DIR -o figure.png (or --list)")
    if f".{format}" not in FORMATS:
        raise ValueError(f"--format {format!r} is not one of {', '.join(one[1:] for one in FORMATS)}")
    into_folder = out.is_dir() or not out.suffix
    if figure == "all" and not into_folder:
        raise ValueError(f"--figure all draws several pictures, and -o {str(out)!r} is one; name a folder")
    with open_store(*folders) as store:
        if into_folder and figure in (None, "all"):
            written, left_out = draw_all(store, out, f".{format}", run)
        else:
            if into_folder:
                figure = figure or default_figure(store)
                out.mkdir(parents=True, exist_ok=True)
            path = out / f"{figure}.{format}" if into_folder else out
            draw(store, figure, path, run)
            written, left_out = [path], {}
    for path in written:
        print(f"{path} ({path.stat().st_size // 1024} KiB), numbers in {path.with_suffix('.csv').name}")
    for name, reason in left_out.items():
        print(f"left out {name}: {reason}")
