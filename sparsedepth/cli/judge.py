"""`sparsedepth judge`: the verdict on each variant of a table of anyone's runs. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from sparsedepth.cli import option
from sparsedepth.cli.query import write
from sparsedepth.store.render import choose_format, encode
from sparsedepth.store.terminal import wrapped


def judge(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="table with one run per row: .csv, .tsv, .json, .jsonl, .parquet")
    ],
    baseline: Annotated[
        str | None, typer.Option(help="variant to compare with; default the one called so, or with the most runs")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="only this variant; all of them stay in the correction")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="a column that is not guessed: --column loss=val_bpb; also variant, seed, budget, throughput"
        ),
    ] = None,
    format: option.Format = None,
    out: option.OutFile = None,
) -> None:
    """Say of each variant in a table of runs whether it is better than the baseline, or a lucky seed.

    Exit code 0: better, 3: not shown, 4: worse (of several variants the best one counts).
    """
    from sparsedepth.recipe.judge import EXIT_CODES, lines_of
    from sparsedepth.recipe.judge import judge as judgement_of

    format = choose_format(format, out)
    pairs = [text.partition("=") for text in column or []]
    if wrong := [name for name, equals, value in pairs if not (name and value)]:
        raise ValueError(f"--column {wrong[0]!r} must be WHAT=COLUMN, such as --column loss=val_bpb")
    found = judgement_of(table, {name: value for name, _, value in pairs}, baseline, variant)
    if format != "table":
        write(encode(found.table, format), out)
    else:
        write(wrapped(lines_of(found)).encode(), out)
    raise typer.Exit(EXIT_CODES[found.verdict])
