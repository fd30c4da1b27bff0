"""`sparsedepth effects`: the effect of each knob, and the causal chain from sparsity to loss. Imports no torch."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from sparsedepth.cli import option
from sparsedepth.cli.query import write
from sparsedepth.store.render import choose_format, encode
from sparsedepth.store.terminal import wrapped


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
        Literal["all", "knobs", "chain", "lr", "scale"],
        typer.Option(
            help="all, knobs: effects by setting and depth; chain: links from sparsity to loss; "
            "lr: change of effects with the learning rate; scale: change of effects with width and budget"
        ),
    ] = "all",
    currency: Annotated[
        Literal["loss", "speedup"],
        typer.Option("--as", help="speedup: each effect as the compute that the baseline would need (three budgets)"),
    ] = "loss",
    at: Annotated[
        list[str] | None, typer.Option(help="with --part scale: predict at parameters=1e9, tokens=2e10; repeatable")
    ] = None,
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
    from sparsedepth.effects import causal_evidence, cells, frame, importance, lr_slope, scale, scale_text
    from sparsedepth.effects import text as effects_text
    from sparsedepth.effects import text_report as chain_report
    from sparsedepth.store.best import no_runs
    from sparsedepth.store.comparable_loss import loss_of
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.search import search_of
    from sparsedepth.store.unfinished import only_tuning_text

    format = choose_format(format, out)
    if currency == "speedup":
        if part not in ("all", "knobs") or at:
            raise ValueError("--as speedup is about the effects of settings; leave out --part and --at")
        write(_speedup(folders, None if by == "loss" else by, knob, format, out, skip_damaged), out)
        return
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        runs = store.frame("select * from runs")
        search = search_of(store.roots)
        if reason := no_runs(store) if runs.empty else only_tuning_text(store):
            raise ValueError(reason)
    if search is not None and part in ("all", "knobs") and knob is None:
        if format == "table":
            write(_text(importance.search_lines(runs, search, by), out), out)
        else:
            write(encode(importance.search_table(runs, search, by), format), out)
        return
    by, caution = chain_report.judged_outcome(runs, loss_of(runs) if by in (None, "loss") else by)
    sizes = scale_text.prediction_sizes(at or [])
    if part != "scale" and at:
        raise ValueError("--at predicts for other widths and budgets; add --part scale")
    lines: list[str] = [caution] if caution and part != "chain" else []
    if part in ("all", "knobs"):
        found = cells.cells_of(runs, by)
        effects = effects_text.of_knob(frame.effects_frame(found), knob, found)
        if format != "table":
            write(encode(effects_text.effects_table(effects, found), format), out)
            return
        data = found.settings.data_text if found.settings else ""
        lines += [*filter(None, [data]), effects_text.effects_text(effects, found, detail=detail)]
    elif format != "table":
        if part == "scale":
            table = scale_text.scale_table(scale.trends(runs, by, knob, sizes))
        elif part == "lr":
            table = lr_slope.lr_table(lr_slope.lr_slopes(runs, by, knob))
        else:
            table = chain_report.chain_table(causal_evidence.chain_evidence(runs))
        write(encode(table, format), out)
        return
    elif part == "scale":
        lines += scale_text.scale_lines(runs, by, knob, sizes)
    elif part == "lr":
        lines += lr_slope.lr_lines(runs, by, knob)
    else:
        from sparsedepth.effects import summary

        lines += (chain_report if detail else summary).chain_lines(runs)
    write(_text(lines, out, is_wrapped=part in ("all", "knobs", "lr") or (part == "chain" and not detail)), out)


def _speedup(
    folders: list[Path], by: str | None, knob: str | None, format: str, out: Path | None, skip_damaged: bool
) -> bytes:
    """The compute multiplier of every setting."""
    from sparsedepth.scaling.budget_text import frame_table, speedup_lines
    from sparsedepth.scaling.budgets import budget_rows
    from sparsedepth.scaling.speedup import speedups
    from sparsedepth.store.connection import open_store

    with open_store(*folders, skip_damaged=skip_damaged) as store:
        table = speedups(budget_rows(store, knob, by))
    if format != "table":
        return encode(frame_table(table), format)
    return _text(speedup_lines(table), out, is_wrapped=True)


def _text(lines: Iterable[str], out: Path | None, *, is_wrapped: bool = False) -> bytes:
    """Lines wrapped at a terminal, or anywhere if `is_wrapped`; else one line per sentence, for `grep`."""
    is_wrapped = is_wrapped or (out is None and sys.stdout.isatty())
    return (wrapped(lines) if is_wrapped else "".join(f"{line}\n" for line in lines)).encode()
