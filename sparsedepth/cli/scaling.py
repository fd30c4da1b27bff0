"""`sparsedepth scaling`: the depth law, depths at equal FLOPs, and what carrying lr costs. Imports no torch."""

import json
import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, Typer

from sparsedepth.cli import option
from sparsedepth.cli.option import Deadline, Folder, FolderOptions, Format, OutFile, TextFormat
from sparsedepth.cli.read import show
from sparsedepth.words.formats import FORMATS, choose_format, render
from sparsedepth.words.plain_text import commas, wrapped
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.scaling.law import Law
    from sparsedepth.scaling.report import Report

COLUMNS = "model_size, num_tokens, d_model, n_layers, loss"

app = Typer(
    help="How loss falls with compute, width, depth and data; and whether lr carries over sizes.", no_args_is_help=True
)


Bootstrap = Annotated[int, Option(min=0, help="bootstrap refits; 0 for none")]


@dataclass(frozen=True)
class FitOptions:
    """The depth law fitted to the runs of a folder or a table, how the loss falls with width, depth and data: `fit`
    with its parameters, and `doubts`. Raises ValueError for points that do not determine it."""

    source: Annotated[Folder, Argument(metavar="SOURCE", help=f"results folder, or CSV with columns {COLUMNS}")]
    _: KW_ONLY
    fixed: Annotated[list[str] | None, Option("--fix", help="fix an exponent: --fix a_l=1; repeatable")] = None
    without: Annotated[list[str] | None, Option(help="omit a term: width, depth or data; repeatable")] = None
    exclude_highest: Annotated[int, Option(min=0, help="exclude this many of the highest losses, with ties")] = 0
    where: Annotated[str | None, Option(help="for a folder: only runs that satisfy this SQL condition")] = None
    cluster: Annotated[
        str | None, Option(help="columns that define a cluster, resampled together: run; d_model,n_layers")
    ] = None
    bootstrap: Bootstrap = 500
    deadline: Deadline = 60.0

    def compute(self) -> "Report":
        from sparsedepth.scaling import points
        from sparsedepth.scaling.fit_law import bootstrap as refitted, fit_law
        from sparsedepth.scaling.report import Report

        law = law_of(self.fixed or [], self.without or [])
        source = Path(self.source)
        every = points.read_points(source, self.where, self.cluster, self.deadline)
        found = points.exclude_highest(every, self.exclude_highest)
        law_fit = fit_law(found, law)
        boot = refitted(law_fit, self.bootstrap) if self.bootstrap else None
        names = points.other_differences(source, self.where) if source.is_dir() else []
        ignored = f"runs also differ in {commas(names)}, which the law ignores; filter with --where"
        remarks = (ignored,) if names else ()
        return Report(
            source=str(self.source), fit=law_fit, n_excluded=self.exclude_highest, boot=boot, of_source=remarks
        )


@dataclass(frozen=True)
class LawPlotOptions(FitOptions):
    _: KW_ONLY
    bootstrap: Bootstrap = 200


def law_of(fixed: list[str], without: list[str]) -> "Law":
    """The law without some terms, and with some exponents fixed. Raises ValueError for an unknown term."""
    from sparsedepth.scaling.law import TERMS, Law

    if unknown := {*without} - {term.name for term in TERMS}:
        raise ValueError(f"--without {min(unknown)!r} is not a term; choose width, depth or data")
    exponents = {}
    for text in fixed:
        name, _, value = text.partition("=")
        try:
            exponents[name] = float(value)
        except ValueError:
            raise ValueError(f"--fix {text!r} must be an exponent and its value, such as a_l=1") from None
    return Law(terms=tuple(term for term in TERMS if term.name not in without), fixed=exponents)


@option.command
def fit(
    given: FitOptions,
    format: TextFormat = "table",
) -> None:
    """Fit L = c_m m^-a_m + c_l l^-a_l + c_D D^-a_D + E: width m, depth l, training tokens D."""
    from sparsedepth.scaling.report import as_object, parameter_table
    from sparsedepth.words.scaling import law_closing, law_heading

    if format not in FORMATS:
        raise ValueError(f"--format {format!r} is not one of {commas(FORMATS)}")
    report = given.compute()
    if format == "json":
        print(json.dumps(as_object(report), indent=1, allow_nan=False))
        return
    aside = sys.stdout if format == "table" else sys.stderr  # stdout carries data for programs
    print(wrapped(law_heading(report)), end="", file=aside)
    table = parameter_table(report)
    optional = ("stderr", "bootstrap_lo bootstrap_hi")
    print(fitted_table(table, optional).text if format == "table" else render(table, format))
    print(wrapped(law_closing(report)), end="", file=aside)


@option.command
def plot(
    given: LawPlotOptions,
    out: Annotated[Path, Option("-o", "--out", help="image: .png, .svg or .pdf, its data beside it (.csv)")],
) -> None:
    """Draw each term of the law with the partial residuals of the points, and the residuals."""
    from sparsedepth.plots.scaling import draw_law
    from sparsedepth.words.scaling import law_warnings

    report = given.compute()
    data = draw_law(report.fit, report.boot, out, Path(given.source))
    for warning in law_warnings(report):
        option.aside(f"warning: {warning}")
    print(f"{out} ({out.stat().st_size // 1024} KiB), {data}")


@option.command
def depth(given: FolderOptions, format: Format = None, out: OutFile = None) -> None:
    """Say from which budget each depth is worth its cost: less loss at equal training FLOPs than every shallower one.

    Of a ladder of shapes, one run each of many widths and depths: the best depth per width at each budget. The figure
    is `plot --figure isoflop`."""
    from sparsedepth.scaling.crossover import crossover_table, crossovers
    from sparsedepth.scaling.points import budget_cells
    from sparsedepth.scaling.shapes import shapes_answer
    from sparsedepth.store.setting import pending
    from sparsedepth.words.differences import pending_text
    from sparsedepth.words.scaling import crossover_lines, shapes_lines

    format = choose_format(format, out)
    with given.open() as store:
        shapes = shapes_answer(store)
        found = [] if shapes and shapes.decides else crossovers(budget_cells(store))
        told = pending_text(pending(store))
    lines = [*(shapes_lines(shapes) if shapes else []), *(crossover_lines(found) if found else []), told]
    table = shapes.table if shapes and shapes.decides else crossover_table(found)
    show(table, lines, format, out)


@option.command
def carry(
    given: FolderOptions,
    at: Annotated[list[str], Option(help="shape whose lr is carried: --at n_layers=6; repeatable")],
    format: Format = None,
    out: OutFile = None,
) -> None:
    """Measure what carrying lr from one shape to the others adds to the loss, in runs tuned at every shape."""
    from sparsedepth.config.load import parse_settings
    from sparsedepth.effects.cells import read_runs
    from sparsedepth.scaling.carry import carry_of, carry_table
    from sparsedepth.store.comparable_loss import loss_of
    from sparsedepth.words.scaling import carry_lines

    format = choose_format(format, out)
    shape = parse_settings(at, "--at")
    with given.open() as store:
        runs = read_runs(store, "val_loss")
    found = carry_of(runs, loss_of(runs), shape)
    table = carry_table(found)
    show(table, [fitted_table(table).text, *carry_lines(found, shape)], format, out)


def check(
    file: Annotated[Path, Argument(metavar="RUN.yaml", help="a run at the shape where lr is tuned")],
    vary: Annotated[list[str], Option(help="sizes: --vary n_layers=3,6,12; also d_model; repeatable")],
    set: Annotated[list[str] | None, Option("--set", help="override a field: --set lr=1e-3; repeatable")] = None,
    steps: Annotated[int, Option(min=1, help="training steps of each model")] = 4,
    seeds: Annotated[int, Option(min=1, help="seeds of each size")] = 3,
    out: Annotated[Path | None, Option("-o", "--out", help="figure, with its data beside it (.csv)")] = None,
) -> None:
    """Check whether lr can be carried: train each width and depth for a few steps, and see whether activations and
    updates stay as large. Exit code 3 where one does not: lr is not to be carried over that size."""
    import tempfile

    import pandas as pd

    from sparsedepth.cli.input_file import run_config
    from sparsedepth.config.load import parse_lists
    from sparsedepth.data.sequences import open_source
    from sparsedepth.plots.coordinates import coordinates_drawing
    from sparsedepth.plots.page import check_path, write as draw
    from sparsedepth.train.coordinates import coordinates, slopes
    from sparsedepth.words.scaling import check_lines

    if out is not None:
        check_path(out)
    config, sizes = run_config(file, set), parse_lists(vary)
    enough = config.batch_tokens * (steps + 2)
    with tempfile.TemporaryDirectory() as folder:
        short = config.model_copy(
            update={"max_corpus_tokens": min(config.max_corpus_tokens or 20 * enough, 20 * enough)}
        )
        found = [*coordinates(config, sizes, open_source(short, Path(folder)).batch, steps, seeds)]
    measured = slopes(found)
    print(wrapped(lines := [*check_lines(measured, config.parametrisation)]), end="")
    if out is not None:
        draw(coordinates_drawing(pd.DataFrame(found), "\n".join(lines)), out)
    if not all(one.is_flat for one in measured):
        raise Exit(3)
