"""`plot` and `report`: figures and pages of the runs of results folders. Neither imports torch."""

import time
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from sparsedepth.cli import option
from sparsedepth.cli.option import Folder, FolderOptions, Objective, RecipeDepth
from sparsedepth.files import check_parent
from sparsedepth.words.plain_text import commas, wrapped

if TYPE_CHECKING:
    from sparsedepth.plots.draw import Figures


@dataclass(frozen=True)
class PlotCommand(FolderOptions):
    """Draw one figure (default: the chain) or 'all'; `out` is an image, or a folder of images in `format` (default
    png). `style` 'paper': one column or two, 9 pt, as PDF and PNG, its caption apart, in several pages where 9 inches
    have no room. `depths`, `settings`, `panels`: these alone, as '4,12', 'baseline; depth_scale=lns', 'val_loss'.

    Raises ValueError for an unknown figure, suffix, run, depth or setting, for an image in another format than its
    suffix names, or if there is nothing to draw."""

    _: KW_ONLY
    out: Annotated[Folder | None, Option("-o", "--out", help="image (.png, .svg or .pdf), or a folder of them")] = None
    figure: Annotated[str | None, Option(help="name from --list, or all; default the chain, or all for a folder")] = (
        None
    )
    format: Annotated[str | None, Option(help="image format in a folder: png (default), svg or pdf")] = None
    style: Annotated[str, Option(help="screen; or paper: a column of 3.4 in, 9 pt, PDF and PNG")] = "screen"
    columns: Annotated[int, Option(help="of a paper: 1, or 2 (7 in)")] = 1
    depths: Annotated[str, Option(help="these depths alone: 4,12")] = ""
    settings: Annotated[str, Option(help="these settings alone: 'baseline; depth_scale=lns'")] = ""
    panels: Annotated[str, Option(help="these panels alone, by column panel of the CSV: val_loss")] = ""
    run: Annotated[str | None, Option(help="run_id, for figures of one run; default the best of the deepest")] = None

    def compute(self) -> "Figures":
        """Draws, with a bar for all figures, and writes what `out` names."""
        from sparsedepth.cli.run_progress import bar
        from sparsedepth.plots.draw import draw, silent
        from sparsedepth.plots.page import FORMATS
        from sparsedepth.plots.runs import Selection

        out = option.path_of_file(self.out)
        format = self.format
        suffix = "" if out is None or out.is_dir() else out.suffix.lower()
        if format is not None and {suffix, f".{format}"} <= {*FORMATS} and suffix != f".{format}":
            raise ValueError(f"-o {str(out)!r} is for {suffix[1:]}, and --format is {format!r}; drop one of the two")
        asked = (self.depths.replace(",", ";"), self.settings, self.panels.replace(",", ";"))
        depths, *others = (tuple(filter(None, map(str.strip, names.split(";")))) for names in asked)
        try:
            only = Selection(tuple(map(int, depths)), *others)
        except ValueError:
            raise ValueError(f"--depths {self.depths!r} are no numbers of layers; give them as 4,12") from None
        asked = (self.figure, out, self.run, format or "png", self.style)
        progress_bar = bar("figures") if self.figure == "all" else nullcontext(silent)
        with self.open() as store, progress_bar as progress:
            return draw(store, *asked, progress, self.columns, only)


def _list_figures(is_asked: bool) -> None:
    from sparsedepth.plots.draw import FIGURES

    if is_asked:
        width = max(map(len, FIGURES))
        print("\n".join(f"{name:{width}}  {kind.meaning}" for name, kind in FIGURES.items()))
        raise Exit


ShowList = Annotated[
    bool, Option("--list", is_eager=True, callback=_list_figures, help="list all figures and what they show")
]


@option.command
def plot(given: PlotCommand, show_list: ShowList = False) -> None:
    """Draw figures of sparsity, residual variance and layer effectiveness, each with its data as CSV."""
    from sparsedepth.plots.draw import FIGURES, check_figure

    if given.figure is not None:
        check_figure(given.figure)
    if given.out is None:
        raise ValueError("give a results folder and an output: sparsedepth plot DIR -o figure.png (or --list)")
    figures = given.compute()
    for path in figures.paths:
        print(f"{path} ({path.stat().st_size // 1024} KiB), data in {path.with_suffix('.csv')}")
    print(wrapped(f"caption of {name}: {text}" for name, text in figures.captions.items()), end="")
    ours = {name: why for name, why in figures.left_out.items() if not callable(FIGURES[name].place)}
    lines = [f"skipped {name}: {why}" for name, why in figures.left_out.items() if name not in ours]
    if ours:
        why, *others = {*ours.values()}
        why = "the folder has no rows for them; --figure NAME says what is missing" if others else why
        lines.append(f"skipped {commas(ours)}: {why}")
    print(wrapped(lines), end="")


@dataclass(frozen=True)
class ReportCommand(FolderOptions):
    """One HTML page of everything in results folders; returns its path. `card`: of a verified recipe.

    Raises ValueError for what cannot be read, and for a card without a verification."""

    out: Annotated[Folder, Option("-o", "--out", help="the page (.html), or a folder for report.html")]
    _: KW_ONLY
    depth: RecipeDepth = None
    objective: Objective = "loss"
    card: Annotated[Folder | None, Option(help="verified recipe card (from `recipe verify`) to include")] = None

    @property
    def page(self) -> Path:
        """Where it is written. Raises ValueError for no page."""
        out = option.path(self.out)
        out = out / "report.html" if out.is_dir() else out
        if out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"{str(out)!r} must end in .html, or be an existing folder")
        check_parent(out)
        return out

    @property
    def card_path(self) -> Path | None:
        return None if self.card is None else Path(self.card)

    def compute(self) -> Path:
        from sparsedepth.cli.run_progress import bar
        from sparsedepth.report.page import write_report

        out = self.page
        with bar("report") as progress:
            asked = (self.depth, self.objective, self.card_path, self.skip_damaged)
            write_report(self.paths, out, *asked, progress)
        return out


@option.command
def report(
    given: ReportCommand,
    watch: Annotated[
        float | None, Option(min=0.1, metavar="SECONDS", help="rewrite the page so often, until no run is left")
    ] = None,
) -> None:
    """Write one HTML page: summary, recipe, runs, figures with data, effects, failures, methods and provenance."""
    out = given.page
    if watch is None:
        given.compute()
    else:
        from sparsedepth.report.page import WatchedReport

        page = WatchedReport(given.paths, out, watch, given.depth, given.objective, given.card_path)
        print(
            f"{out}: rewritten every {watch:g} s until no run is left; open it in a browser (Ctrl-C to stop)",
            flush=True,
        )
        try:
            for _ in page.rounds():
                time.sleep(watch)
        except KeyboardInterrupt:
            page.stop()
            raise
        print("no run is left")
    print(f"{out} ({out.stat().st_size / 1e6:.2f} MB)")
