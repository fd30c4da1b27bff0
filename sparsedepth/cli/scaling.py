"""`sparsedepth scaling`: fit the depth law and plot it. Imports no torch."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sparsedepth.cli import option
from sparsedepth.store.render import FORMATS, choose_format, encode, render
from sparsedepth.store.terminal import fit as fit_table
from sparsedepth.store.terminal import wrapped

if TYPE_CHECKING:
    from sparsedepth.scaling.law import Law
    from sparsedepth.scaling.tables import Report

COLUMNS = "model_size, num_tokens, d_model, n_layers, loss"
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help=f"results folder, or CSV with columns {COLUMNS}")]
MinusLayers = Annotated[float, typer.Option(help="layers to subtract: 2 fits (l - 2)^-a_l")]
Fixed = Annotated[list[str] | None, typer.Option("--fix", help="fix an exponent: --fix a_l=1; repeatable")]
Without = Annotated[list[str] | None, typer.Option(help="omit a term: width, depth or data; repeatable")]
Exclude = Annotated[int, typer.Option(min=0, help="exclude this many of the highest losses, with ties")]
Where = Annotated[str | None, typer.Option(help="for a folder: only runs that satisfy this SQL condition")]
Replicates = Annotated[int, typer.Option("--bootstrap", min=0, help="bootstrap refits; 0 for none")]
Seed = Annotated[int, typer.Option(min=0, help="random seed of starts and bootstrap")]
Cluster = Annotated[
    str | None,
    typer.Option(help="columns that define a cluster, resampled together, with a random effect: run; d_model,n_layers"),
]


class _NamesFit(TyperGroup):
    """Answers a folder in place of a command with the command to give."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and Path(args[0]).exists():
            raise ValueError(
                f"which command for {args[0]!r}? To fit the law: sparsedepth scaling fit {shlex.quote(args[0])}"
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_NamesFit, help="Fit the depth law: how loss falls with width, depth and data.", no_args_is_help=True
)


def fit(
    source: Source,
    minus_layers: MinusLayers = 0.0,
    fixed: Fixed = None,
    without: Without = None,
    exclude_highest: Exclude = 0,
    where: Where = None,
    cluster: Cluster = None,
    bootstrap: Replicates = 500,
    starts: Annotated[int, typer.Option(min=1, help="random starts")] = 20,
    seed: Seed = 0,
    format: Annotated[str, typer.Option(help="table, csv, json, markdown or latex")] = "table",
) -> None:
    """Fit L = c_m m^-a_m + c_l l^-a_l + c_D D^-a_D + E: width m, depth l, training tokens D."""
    if format not in FORMATS:
        raise ValueError(f"--format {format!r} is not one of {', '.join(FORMATS)}")
    law = _law(minus_layers, fixed, without)
    _print_report(_report(source, law, exclude_highest, where, cluster, bootstrap, seed, starts), format)


def plot(
    source: Source,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="image: .png, .svg or .pdf; its data is written next to it (.csv)")
    ],
    minus_layers: MinusLayers = 0.0,
    fixed: Fixed = None,
    without: Without = None,
    exclude_highest: Exclude = 0,
    where: Where = None,
    cluster: Cluster = None,
    bootstrap: Replicates = 200,
    seed: Seed = 0,
) -> None:
    """Draw each term of the law with the partial residuals of the points, and the residuals."""
    from sparsedepth.plots.scaling import draw_law

    report = _report(source, _law(minus_layers, fixed, without), exclude_highest, where, cluster, bootstrap, seed)
    data = draw_law(report.fit, report.boot, out)
    for warning in report.all_warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{out} ({out.stat().st_size // 1024} KiB), {data}")


def depth(
    folders: option.Folders,
    format: option.Format = None,
    out: option.OutFile = None,
    skip_damaged: option.SkipDamaged = False,
) -> None:
    """Say from which budget each depth is worth its cost: less loss at equal training FLOPs than every shallower one.

    The figure is `plot --figure isoflop`.
    """
    from sparsedepth.cli.query import write
    from sparsedepth.scaling.budget_text import crossover_lines, crossover_table
    from sparsedepth.scaling.budgets import budget_rows
    from sparsedepth.scaling.crossover import crossovers
    from sparsedepth.store.connection import open_store

    format = choose_format(format, out)
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        found = crossovers(budget_rows(store))
    text = wrapped(crossover_lines(found)).encode()
    write(text if format == "table" else encode(crossover_table(found), format), out)


def _law(minus_layers: float, fixed: list[str] | None, without: list[str] | None) -> "Law":
    from sparsedepth.config.plain_text import named_number
    from sparsedepth.scaling.law import TERMS, Law

    omitted = set(without or ())
    if unknown := omitted - {term.name for term in TERMS}:
        raise ValueError(f"--without {sorted(unknown)[0]!r} is not a term; choose width, depth or data")
    exponents = {}
    for text in fixed or ():
        name, value = named_number(text)
        if value is None:
            raise ValueError(f"--fix {text!r} must be an exponent and its value, such as a_l=1")
        exponents[name] = value
    terms = tuple(term for term in TERMS if term.name not in omitted)
    return Law(terms=terms, fixed=exponents, minus_layers=minus_layers)


def _report(
    source: Path,
    law: "Law",
    n_excluded: int,
    where: str | None,
    cluster: str | None,
    n_replicates: int,
    seed: int,
    n_starts: int = 20,
) -> "Report":
    from sparsedepth.scaling import uncertainty
    from sparsedepth.scaling.fit import fit as fit_law
    from sparsedepth.scaling.points import exclude_highest, other_differences, read_points
    from sparsedepth.scaling.tables import Report

    points = exclude_highest(read_points(source, where, cluster), n_excluded)
    law_fit = fit_law(points, law, n_starts, seed)
    names = other_differences(source, where) if source.is_dir() else []
    ignored = f"runs also differ in {', '.join(names)}, which the law ignores; filter with --where"
    return Report(
        source=str(source),
        fit=law_fit,
        n_excluded=n_excluded,
        boot=uncertainty.bootstrap(law_fit, n_replicates, seed) if n_replicates else None,
        warnings=(ignored,) if names else (),
    )


def _print_report(report: "Report", format: str) -> None:
    from sparsedepth.scaling.tables import as_object, closing, heading, parameter_table

    if format == "json":
        print(json.dumps(as_object(report), indent=1, allow_nan=False))
        return
    aside = sys.stdout if format == "table" else sys.stderr  # stdout carries data for programs
    print(wrapped(heading(report)), end="", file=aside)
    table = parameter_table(report)
    print(
        fit_table(table, ("stderr", "bootstrap_lo bootstrap_hi")).text if format == "table" else render(table, format)
    )
    print(wrapped(closing(report)), end="", file=aside)
