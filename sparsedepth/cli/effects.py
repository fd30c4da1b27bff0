"""`sparsedepth effects`: the effect of each knob, and the causal chain from sparsity to loss. Imports no torch."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparsedepth.cli import option
from sparsedepth.cli.query import write
from sparsedepth.store.render import choose_format, encode
from sparsedepth.store.terminal import wrapped

if TYPE_CHECKING:
    import pandas as pd


def effects(
    folders: option.Folders,
    by: Annotated[
        str | None,
        typer.Option(
            "--by", "--objective", help="outcome; default val_loss, or val_loss_common if runs differ in seq_len"
        ),
    ] = None,
    knob: Annotated[str | None, typer.Option(help="only this knob")] = None,
    part: Annotated[
        Literal["all", "chain"],
        typer.Option(help="all: effects by setting and depth, and their change; chain: links from sparsity to loss"),
    ] = "all",
    currency: Annotated[
        Literal["loss", "speedup"],
        typer.Option("--as", help="speedup: each effect as the compute that the baseline would need (three budgets)"),
    ] = "loss",
    detail: Annotated[
        bool,
        typer.Option(
            "--detail",
            help="the parts of each interval, p and degrees of freedom; of the chain, its evidence in sentences",
        ),
    ] = False,
    skip_damaged: option.SkipDamaged = False,
    format: option.Format = None,
    out: option.OutFile = None,
) -> None:
    """Show the effect of every setting at every depth, with its interval (--part chain: links to the loss).

    For a search: the importance of each axis to each objective, and its values among the best proposals.
    """
    from sparsedepth.effects import importance
    from sparsedepth.effects.cells import read_runs
    from sparsedepth.store.comparable_loss import loss_in
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.search import search_of
    from sparsedepth.store.setting import only_tuning_text

    format = choose_format(format, out)
    if currency == "speedup":
        if part != "all":
            raise ValueError("--as speedup is about the effects of settings; leave out --part")
        write(_speedup(folders, None if by == "loss" else by, knob, format, out, skip_damaged), out)
        return
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        search = search_of(store.roots)
        outcome = loss_in(store) if by in (None, "loss") else by
        is_whole = part == "chain" or search is not None
        runs = store.frame("select * from runs") if is_whole else read_runs(store, outcome)
        if runs.empty:
            from sparsedepth.store.find import no_run_text

            raise ValueError(no_run_text(store.roots))
        if reason := only_tuning_text(store):
            raise ValueError(reason)
    if part == "chain":
        write(_chain(runs, format, detail, out), out)
        return
    if search is not None and knob is None:
        if format == "table":
            write(_text(importance.search_lines(runs, search, by), out), out)
        else:
            write(encode(importance.search_table(runs, search, by), format), out)
        return
    write(_of_settings(runs, outcome, knob, format, detail, out), out)


def _of_settings(
    runs: "pd.DataFrame", outcome: str, knob: str | None, format: str, detail: bool, out: Path | None
) -> bytes:
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
    return _text([*lines, *equal_loss_lines(found, runs)], out, is_wrapped=True)


def _chain(runs: "pd.DataFrame", format: str, detail: bool, out: Path | None) -> bytes:
    from sparsedepth.effects import causal_evidence, chain_text

    if format != "table":
        return encode(chain_text.chain_table(causal_evidence.chain_evidence(runs)), format)
    return _text(chain_text.chain_lines(runs, detail), out, is_wrapped=not detail)


def _speedup(
    folders: list[Path], by: str | None, knob: str | None, format: str, out: Path | None, skip_damaged: bool
) -> bytes:
    """The compute multiplier of every setting."""
    from sparsedepth.scaling.budget_text import speedup_lines
    from sparsedepth.scaling.budgets import budget_rows
    from sparsedepth.scaling.speedup import speedups
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.query_result import QueryResult

    with open_store(*folders, skip_damaged=skip_damaged) as store:
        table = speedups(budget_rows(store, knob, by))
    if format != "table":
        return encode(QueryResult.of_frame(table), format)
    return _text(speedup_lines(table), out, is_wrapped=True)


def _text(lines: Iterable[str], out: Path | None, *, is_wrapped: bool = False) -> bytes:
    """Lines wrapped at a terminal, or anywhere if `is_wrapped`; else one line per sentence, for `grep`."""
    is_wrapped = is_wrapped or (out is None and sys.stdout.isatty())
    return (wrapped(lines) if is_wrapped else "".join(f"{line}\n" for line in lines)).encode()
