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
            help="knobs: effects by knob and depth; chain: links from sparsity to loss; "
            "lr: change of effects with the learning rate; scale: change of effects with width and budget; all: knobs, "
            "with --detail also chain"
        ),
    ] = "all",
    at: Annotated[
        list[str] | None, typer.Option(help="with --part scale: predict at parameters=1e9, tokens=2e10; repeatable")
    ] = None,
    detail: Annotated[
        bool,
        typer.Option(
            "--detail",
            help="full evidence in sentences: pairs at equal tokens, FLOPs, parameters or lr, interactions with depth, "
            "correlations by knob, interventions",
        ),
    ] = False,
    skip_damaged: option.SkipDamaged = False,
    format: option.Format = None,
    out: option.OutFile = None,
) -> None:
    """Show paired effects of every knob at every depth, and their change with depth (--part chain: links to the loss).

    For a search: importance and partial dependence of each axis, with the error of the surrogate model.
    """
    from sparsedepth.effects import (
        all_effects,
        causal_evidence,
        lr_slope,
        scale,
        scale_text,
        summary,
        surrogate,
        text_report,
    )
    from sparsedepth.store.best import no_runs
    from sparsedepth.store.comparable_loss import loss_of
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.search import search_of
    from sparsedepth.store.setting import read_settings

    format = choose_format(format, out)
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        runs = store.frame("select * from runs")
        search = search_of(store.roots)
        if runs.empty:
            raise ValueError(no_runs(store))
        settings = read_settings(store)
    if search is not None and part in ("all", "knobs") and knob is None:
        if format == "table":
            write(_text(surrogate.search_lines(runs, search, by), out), out)
        else:
            write(encode(surrogate.search_table(runs, search, by), format), out)
        return
    by, caution = text_report.judged_outcome(runs, loss_of(runs) if by in (None, "loss") else by)
    sizes = scale_text.prediction_sizes(at or [])
    if part != "scale" and at:
        raise ValueError("--at predicts for other widths and budgets; add --part scale")
    if format != "table":
        if part == "scale":
            table = scale_text.scale_table(scale.trends(runs, by, knob, sizes))
        elif part == "lr":
            table = lr_slope.lr_table(lr_slope.lr_slopes(runs, by, knob))
        elif part == "chain":
            table = text_report.chain_table(causal_evidence.chain_evidence(runs))
        else:
            table = all_effects.effects_table(all_effects.measure_effects(runs, by, knob))
        write(encode(table, format), out)
        return
    lines: list[str] = []
    if part != "chain":
        data = settings.data_text if settings else ""
        lines += filter(None, (caution, data, text_report.pooling_caution(runs)))
    if part in ("all", "knobs"):
        lines += (text_report if detail else summary).knob_lines(runs, by, knob)
    if part == "scale":
        lines += scale_text.scale_lines(runs, by, knob, sizes)
    if part == "lr":
        lines += lr_slope.lr_lines(runs, by, knob)
    if part == "chain" or (part == "all" and knob is None and detail):
        lines += [*([""] if lines else []), *(text_report if detail else summary).chain_lines(runs)]
    is_summary = part != "scale" and not detail
    if is_summary and part != "lr":
        chain = "" if part == "chain" or knob else "; the chain from sparsity to loss: --part chain"
        lines += ["", f"Full evidence in sentences: --detail{chain}"]
    write(_text(lines, out, is_wrapped=is_summary), out)


def _text(lines: Iterable[str], out: Path | None, *, is_wrapped: bool = False) -> bytes:
    """Lines wrapped at a terminal, or anywhere if `is_wrapped`; else one line per sentence, for `grep`."""
    is_wrapped = is_wrapped or (out is None and sys.stdout.isatty())
    return (wrapped(lines) if is_wrapped else "".join(f"{line}\n" for line in lines)).encode()
