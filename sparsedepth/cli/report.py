"""`sparsedepth report`: everything that results folders say, in one HTML file. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli.query import Folders, Objective, SkipDamaged


def report(
    folders: Folders,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="the page (.html), or a folder for report.html: one file, readable without a network"
        ),
    ],
    depth: Annotated[int | None, typer.Option(help="n_layers to advise on; default the deepest")] = None,
    objective: Objective = "loss",
    card: Annotated[
        Path | None, typer.Option(help="the recipe's card after its trial, which `recipe verify` wrote: shown with it")
    ] = None,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Write summary, recipe, runs, figures with their data, effects, failures, methods and provenance as a page."""
    from sparsedepth.report.page import write_report

    if out.is_dir():
        out /= "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{str(out)!r} must end in .html")
    size = write_report(folders, out, depth, objective, card, skip_damaged)
    print(f"{out} ({size / 1e6:.2f} MB)")
