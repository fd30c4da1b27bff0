"""`plot` and `report`: figures of results folders, and one page of everything. Neither imports torch."""

import gc
import time
from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli import calls, option
from sparsedepth.store.terminal import wrapped


def _collect_rarely() -> None:
    """The millions of objects of a page live until it is written: looking through them takes a tenth of its time."""
    gc.set_threshold(50_000, 20, 20)


@option.of_call(calls.plot)
def plot(
    given: option.Given,
    folders: Annotated[list[Path] | None, option.FOLDERS] = None,
    show_list: Annotated[bool, typer.Option("--list", help="list all figures and what they show")] = False,
) -> None:
    """Draw figures of sparsity, residual variance and layer effectiveness, each with its data as CSV."""
    from sparsedepth.plots.draw import FIGURES, check_figure

    if show_list:
        width = max(map(len, FIGURES))
        print("\n".join(f"{name:{width}}  {kind.meaning}" for name, kind in FIGURES.items()))
        return
    if given["figure"] is not None:
        check_figure(given["figure"])
    if not folders or given["out"] is None:
        raise ValueError("give a results folder and an output: sparsedepth plot DIR -o figure.png (or --list)")
    _collect_rarely()
    figures = calls.plot(*folders, **{name: value for name, value in given.items() if name != "folders"})
    for path in figures.paths:
        print(f"{path} ({path.stat().st_size // 1024} KiB), data in {path.with_suffix('.csv')}")
    print(wrapped(f"caption of {name}: {text}" for name, text in figures.captions.items()), end="")
    print(wrapped(f"skipped {name}: {reason}" for name, reason in figures.left_out.items()), end="")


def report(
    folders: option.Folders,
    out: Annotated[Path, typer.Option("-o", "--out", help="the page (.html), or a folder for report.html")],
    depth: Annotated[int | None, typer.Option(help="n_layers of the recipe; default the deepest")] = None,
    objective: option.Objective = "loss",
    card: Annotated[Path | None, typer.Option(help="verified recipe card (from `recipe verify`) to include")] = None,
    skip_damaged: option.SkipDamaged = False,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="rewrite the page so often, until no run is left"),
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
    _collect_rarely()
    if watch is None:
        with bar("report") as progress:
            write_report(folders, out, depth, objective, card, skip_damaged, progress)
    else:
        from sparsedepth.report.page import WatchedReport

        page = WatchedReport(folders, out, watch, depth, objective, card)
        every = f"{out}: rewritten every {watch:g} s until no run is left"
        print(f"{every}; open it in a browser (Ctrl-C to stop)", flush=True)
        try:
            for _ in page.rounds():
                time.sleep(watch)
        except KeyboardInterrupt:
            page.stop()
            raise
        print("no run is left")
    print(f"{out} ({out.stat().st_size / 1e6:.2f} MB)")
