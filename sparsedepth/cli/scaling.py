"""`sparsedepth scaling`: fit the depth law, plot it, and find the best width and depth. Imports no torch."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from sparsedepth.store.render import FORMATS, render
from sparsedepth.store.terminal import fit as fit_table
from sparsedepth.store.terminal import wrapped

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.scaling.fit import Fit
    from sparsedepth.scaling.tables import Report
    from sparsedepth.scaling.uncertainty import Bootstrap

COLUMNS = "model_size, num_tokens, d_model, n_layers, loss"
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help=f"results folder, or CSV with columns {COLUMNS}")]
MinusLayers = Annotated[float, typer.Option(help="layers to subtract: 2 fits (l - 2)^-a_l")]
Fixed = Annotated[list[str] | None, typer.Option("--fix", help="fix an exponent: --fix a_l=1; repeatable")]
Without = Annotated[list[str] | None, typer.Option(help="omit a term: width, depth or data; repeatable")]
Exclude = Annotated[int, typer.Option(min=0, help="exclude this many of the highest losses, with ties")]
Where = Annotated[str | None, typer.Option(help="for a folder: only runs that satisfy this SQL condition")]
Replicates = Annotated[int, typer.Option("--bootstrap", min=0, help="bootstrap refits; 0 for none")]
Seed = Annotated[int, typer.Option(min=0, help="random seed of starts, bootstrap and folds")]
Cluster = Annotated[
    str | None,
    typer.Option(help="columns that define a cluster, resampled together, with a random effect: run; d_model,n_layers"),
]
Format = Annotated[str, typer.Option(help="table, csv, json, markdown or latex")]


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
    bootstrap: Replicates = 1000,
    folds: Annotated[int, typer.Option(min=0, help="cross-validation folds; 0 for none")] = 10,
    scan: Annotated[bool, typer.Option("--scan", help="refit without the 0, 1, 10, .. 100 highest losses")] = False,
    starts: Annotated[int, typer.Option(min=1, help="random starts")] = 60,
    seed: Seed = 0,
    format: Format = "table",
) -> None:
    """Fit L = c_m m^-a_m + c_l l^-a_l + c_D D^-a_D + E: width m, depth l, training tokens D."""
    from sparsedepth.scaling import uncertainty
    from sparsedepth.scaling.tables import Report

    _check_format(format)
    law_fit, boot, points = _fitted(
        source, minus_layers, fixed, without, exclude_highest, where, cluster, bootstrap, seed, starts
    )
    free = [name for name in law_fit.law.names if name.startswith("a_") and name not in law_fit.law.fixed]
    report = Report(
        source=str(source),
        fit=law_fit,
        n_excluded=exclude_highest,
        boot=boot,
        profiles={name: uncertainty.profile(law_fit, name) for name in free},
        held_out=uncertainty.held_out(law_fit, min(folds, law_fit.plan.n_units), seed) if folds else None,
        scan=uncertainty.exclusion_scan(points, law_fit.law) if scan else (),
    )
    _print_report(report, format)


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

    law_fit, boot, _ = _fitted(source, minus_layers, fixed, without, exclude_highest, where, cluster, bootstrap, seed)
    data = draw_law(law_fit, boot, out)
    for warning in law_fit.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{out} ({out.stat().st_size // 1024} KiB), {data}")


def optimum(
    source: Source,
    params: Annotated[float, typer.Option(help="parameter budget, embeddings included: 1e8")],
    tokens: Annotated[float | None, typer.Option(help="training tokens, to predict the loss")] = None,
    minus_layers: MinusLayers = 0.0,
    fixed: Fixed = None,
    without: Without = None,
    exclude_highest: Exclude = 0,
    where: Where = None,
    cluster: Cluster = None,
    bootstrap: Replicates = 1000,
    seed: Seed = 0,
    format: Format = "table",
) -> None:
    """Find the width and depth with the lowest predicted loss at a parameter budget."""
    from sparsedepth.scaling.optimum import optimum as best_shape
    from sparsedepth.scaling.tables import optimum_table

    _check_format(format)
    law_fit, boot, _ = _fitted(source, minus_layers, fixed, without, exclude_highest, where, cluster, bootstrap, seed)
    shape = best_shape(law_fit, boot, params, tokens)
    aside, sizes = _aside(format), shape.sizes
    print(
        f"{law_fit.law.text()}\nat {params:.4g} parameters = {sizes.block:.3g} d_model^2 n_layers + "
        f"{sizes.table:.4g} d_model (fitted to the points, largest error {sizes.worst:.1%})",
        file=aside,
    )
    print(render(optimum_table(shape), format))
    if shape.loss is None:
        print("loss: give --tokens, since the law has a data term", file=aside)
    if shape.n_at_edge:
        print(f"{shape.n_at_edge} bootstrap refits have no optimum; the intervals count them at the edge", file=aside)
    for warning in (*shape.warnings, *law_fit.warnings):
        print(f"warning: {warning}", file=aside)


def _fitted(
    source: Path,
    minus_layers: float,
    fixed: list[str] | None,
    without: list[str] | None,
    n_excluded: int,
    where: str | None,
    cluster: str | None,
    n_replicates: int,
    seed: int,
    starts: int = 60,
) -> "tuple[Fit, Bootstrap | None, pd.DataFrame]":
    """The law, its bootstrap, and all points, also the excluded ones."""
    from sparsedepth.scaling.fit import fit as fit_law
    from sparsedepth.scaling.law import TERMS, Law
    from sparsedepth.scaling.points import exclude_highest, other_differences, read_points
    from sparsedepth.scaling.uncertainty import bootstrap

    omitted = set(without or ())
    if unknown := omitted - {term.name for term in TERMS}:
        raise ValueError(f"--without {sorted(unknown)[0]!r} is not a term; choose width, depth or data")
    law = Law(
        terms=tuple(term for term in TERMS if term.name not in omitted),
        fixed=_exponents(fixed or []),
        minus_layers=minus_layers,
    )
    points = read_points(source, where, cluster)
    law_fit = fit_law(exclude_highest(points, n_excluded), law, starts, seed)
    if source.is_dir() and (names := other_differences(source, where)):
        warning = f"runs also differ in {', '.join(names)}, which the law ignores; filter with --where"
        law_fit = replace(law_fit, warnings=(*law_fit.warnings, warning))
    return law_fit, bootstrap(law_fit, n_replicates, seed) if n_replicates else None, points


def _exponents(texts: list[str]) -> dict[str, float]:
    """'a_l=1' -> {'a_l': 1.0}. Raises ValueError."""
    from sparsedepth.effects.scale_text import named_number

    values = {}
    for text in texts:
        name, value = named_number(text)
        if value is None:
            raise ValueError(f"--fix {text!r} must be an exponent and its value, such as a_l=1")
        values[name] = value
    return values


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"--format {format!r} is not one of {', '.join(FORMATS)}")


def _print_report(report: "Report", format: str) -> None:
    from sparsedepth.scaling.tables import as_object, closing, heading, parameter_table, scan_table

    if format == "json":
        print(json.dumps(as_object(report), indent=1, allow_nan=False))
        return
    aside = _aside(format)
    print(wrapped(heading(report)), end="", file=aside)
    table = parameter_table(report)
    print(
        fit_table(table, ("stderr", "profile_lo profile_hi", "bootstrap_lo bootstrap_hi")).text
        if format == "table"
        else render(table, format)
    )
    if report.scan:
        print(f"\n{render(scan_table(report.scan), format)}")
    print(wrapped(closing(report)), end="", file=aside)


def _aside(format: str) -> TextIO:
    """Stream for remarks: stderr if stdout carries data for programs."""
    return sys.stdout if format == "table" else sys.stderr
