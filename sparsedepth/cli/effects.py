"""`effects` and `judge`: the effect of each knob, the chain from sparsity to loss, and the verdict on anyone's runs.

Neither imports torch.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparsedepth.cli import option
from sparsedepth.cli.query import write
from sparsedepth.config.plain_text import wrapped
from sparsedepth.store.query_result import choose_format, encode

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.store.connection import Store


def effects(
    folders: option.Folders,
    by: Annotated[str | None, typer.Option("--by", "--objective", help="outcome; default the loss")] = None,
    knob: Annotated[str | None, typer.Option(help="only this knob")] = None,
    part: Annotated[
        Literal["all", "chain"], typer.Option(help="all: effects of settings; chain: links from sparsity to loss")
    ] = "all",
    currency: Annotated[
        Literal["loss", "speedup"], typer.Option("--as", help="speedup: as the compute that the baseline would need")
    ] = "loss",
    detail: Annotated[bool, typer.Option("--detail", help="the parts of each interval, p and evidence")] = False,
    skip_damaged: option.SkipDamaged = False,
    format: option.Format = None,
    out: option.OutFile = None,
) -> None:
    """Show the effect of every setting at every depth, with its interval (--part chain: links to the loss).

    For a search: the importance of each axis to each objective, and its values among the best proposals.
    """
    from sparsedepth.store.connection import open_store

    format = choose_format(format, out)
    if currency == "speedup" and part != "all":
        raise ValueError("--as speedup is about the effects of settings; leave out --part")
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        if currency == "speedup":
            content = _speedups(store, by, knob, format)
        else:
            for_grep = out is not None or not sys.stdout.isatty()
            content = _effects(store, by, knob, part, format, detail, for_grep)
    write(content, out)


def _speedups(store: "Store", by: str | None, knob: str | None, format: str) -> bytes:
    """The compute multiplier of every setting."""
    from sparsedepth.scaling.budgets import budget_rows
    from sparsedepth.scaling.speedup import speedup_lines, speedups
    from sparsedepth.store.query_result import QueryResult

    table = speedups(budget_rows(store, knob, None if by == "loss" else by))
    return _text(speedup_lines(table)) if format == "table" else encode(QueryResult.of_frame(table), format)


def _effects(
    store: "Store", by: str | None, knob: str | None, part: str, format: str, detail: bool, for_grep: bool
) -> bytes:
    """The effects on an outcome, the links to it, or what matters in a search. Raises ValueError without results."""
    from sparsedepth.effects import chain, chain_text, importance
    from sparsedepth.effects.cells import cells_of, read_runs
    from sparsedepth.store.comparable_loss import loss_in
    from sparsedepth.store.records import no_run_text
    from sparsedepth.store.search import search_of
    from sparsedepth.store.setting import only_tuning_text

    search = search_of(store.roots)
    outcome = loss_in(store) if by in (None, "loss") else by
    is_whole = part == "chain" or search is not None
    runs = store.frame("select * from runs") if is_whole else read_runs(store, outcome)
    if runs.empty:
        raise ValueError(no_run_text(store.roots))
    if reason := only_tuning_text(store):
        raise ValueError(reason)
    if part == "chain":
        found = cells_of(runs, outcome)
        if format != "table":
            return encode(chain_text.chain_table(chain.chain_evidence(found)), format)
        return _text(chain_text.chain_lines(found, detail), one_per_line=detail and for_grep)
    if search is None or knob is not None:
        return _of_settings(runs, outcome, knob, format, detail)
    if format != "table":
        return encode(importance.search_table(runs, search, by), format)
    return _text(importance.search_lines(runs, search, by), one_per_line=for_grep)


def _of_settings(runs: "pd.DataFrame", outcome: str, knob: str | None, format: str, detail: bool) -> bytes:
    """The frame of effects, and what the outcome's scores are worth."""
    from sparsedepth.effects import cells, frame, text
    from sparsedepth.effects.equal_loss import equal_loss_lines
    from sparsedepth.store.degeneracy import common_weakness, score_rows, usable_form
    from sparsedepth.store.tuning_roles import result_rows

    cells.unit_of(outcome)
    scores = score_rows(result_rows(runs), outcome)
    outcome, caution = usable_form(outcome, scores, "the effects are on")
    found = cells.cells_of(runs, outcome)
    effects = text.of_knob(frame.effects_frame(found), knob, found)
    if format != "table":
        return encode(text.effects_table(effects, found), format)
    weakness = common_weakness(scores)
    weak = f"no evidence about depth: {weakness}" if weakness else ""
    data = found.settings.data_text if found.settings else ""
    lines = [*filter(None, [weak, caution, data]), text.effects_text(effects, found, detail=detail)]
    return _text([*lines, *equal_loss_lines(found)])


def _text(lines: Iterable[str], *, one_per_line: bool = False) -> bytes:
    """Lines wrapped, or one per sentence, for `grep`."""
    return ("".join(f"{line}\n" for line in lines) if one_per_line else wrapped(lines)).encode()


def judge(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="one run per row: .csv, .tsv, .json, .jsonl, .parquet")
    ],
    baseline: Annotated[str | None, typer.Option(help="variant to compare with; default the one called so")] = None,
    variant: Annotated[str | None, typer.Option(help="only this variant; all of them stay in the correction")] = None,
    column: Annotated[list[str] | None, typer.Option(help="a column that is not guessed: loss=val_bpb")] = None,
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
    write(_text(lines_of(found)) if format == "table" else encode(found.table, format), out)
    raise typer.Exit(EXIT_CODES[found.verdict])
