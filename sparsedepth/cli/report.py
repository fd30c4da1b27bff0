"""`sparsedepth report`: all results as one HTML file, which --watch rewrites while a sweep runs. Imports no torch."""

import time
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
    watch: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="rewrite the page so often, with the sweep's progress, until no run is left; it loads itself again",
        ),
    ] = None,
) -> None:
    """Write one HTML page: summary, recipe, runs, figures with data, effects, failures, methods and provenance."""
    from sparsedepth.cli.run_progress import bar
    from sparsedepth.files import check_parent
    from sparsedepth.report.page import write_report

    if out.is_dir():
        out /= "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{str(out)!r} must end in .html, or be an existing folder")
    check_parent(out)
    if watch is None:
        with bar("report") as progress:
            size = write_report(folders, out, depth, objective, card, skip_damaged, progress)
    else:
        _watch(folders, out, depth, objective, card, watch)
        size = out.stat().st_size
    print(f"{out} ({size / 1e6:.2f} MB)")


def _watch(
    folders: list[Path], out: Path, depth: int | None, objective: str, card: Path | None, seconds: float
) -> None:
    """Rewrite the page until no run is left. Damaged runs are left out, and named on it."""
    from sparsedepth.report.watch import WatchedReport

    page = WatchedReport(folders, out, seconds, depth, objective, card)
    print(
        f"{out}: rewritten every {seconds:g} s until no run is left; open it in a browser (Ctrl-C to stop)", flush=True
    )
    try:
        for _ in page.rounds():
            time.sleep(seconds)
    except KeyboardInterrupt:
        page.stop()
        raise
    print("no run is left")
