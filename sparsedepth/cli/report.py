"""`sparsedepth report`: one HTML file with all results. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli import option


def report(
    folders: option.Folders,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="the page (.html), or a folder for report.html; self-contained, works offline"
        ),
    ],
    depth: Annotated[int | None, typer.Option(help="n_layers of the recipe; default the deepest")] = None,
    objective: option.Objective = "loss",
    card: Annotated[Path | None, typer.Option(help="verified recipe card (from `recipe verify`) to include")] = None,
    skip_damaged: option.SkipDamaged = False,
) -> None:
    """Write one HTML page: summary, recipe, runs, figures with data, effects, failures, methods and provenance."""
    from sparsedepth.report.page import write_report

    if out.is_dir():
        out /= "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{str(out)!r} must end in .html, or be an existing folder")
    size = write_report(folders, out, depth, objective, card, skip_damaged)
    print(f"{out} ({size / 1e6:.2f} MB)")
