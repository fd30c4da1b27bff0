"""`sparsedepth effects`: what each knob does, and how the chain from sparsity to loss hangs together. No torch."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from sparsedepth.cli.query import Folders, Format, Out, SkipDamaged, show


def effects(
    folders: Folders,
    by: Annotated[
        str | None,
        typer.Option("--by", "--objective", help="the outcome: loss (that which compares the runs, the default), ..."),
    ] = None,
    knob: Annotated[str | None, typer.Option(help="only this knob")] = None,
    part: Annotated[
        Literal["all", "knobs", "chain", "lr", "scale"],
        typer.Option(
            help="knobs (the default without --detail): effects by knob and depth; chain: links from sparsity to loss; "
            "lr: do effects run with the learning rate; scale: do effects persist over widths and budgets"
        ),
    ] = "all",
    at: Annotated[
        list[str] | None, typer.Option(help="with --part scale, predict there: parameters=1e9, tokens=2e10; repeatable")
    ] = None,
    detail: Annotated[
        bool,
        typer.Option(
            "--detail",
            help="in sentences, with all that a verdict rests on: every basis, interactions with depth, correlations "
            "by knob, interventions, mediators",
        ),
    ] = False,
    skip_damaged: SkipDamaged = False,
    format: Format = None,
    out: Out = None,
) -> None:
    """Paired effects of every knob at every depth, how they run with depth, and the chain from sparsity to loss.

    Of a folder that a sampler filled: each axis's importance and partial dependence, with the surrogate's error.
    """
    from sparsedepth.effects import (
        all_effects,
        causal_evidence,
        lr_slope,
        scale,
        scale_text,
        search_text,
        summary,
        text_report,
    )
    from sparsedepth.store.best import no_runs
    from sparsedepth.store.comparable_loss import loss_of
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.render import choose_format, encode
    from sparsedepth.store.search import search_of

    chosen = choose_format(format, out)
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        runs = store.frame("select * from runs")
        search = search_of(store.roots)
        if runs.empty:
            raise ValueError(no_runs(store))
    if search is not None and part in ("all", "knobs") and knob is None:
        lines = search_text.search_lines(runs, search, by) if chosen == "table" else ()
        table = None if chosen == "table" else search_text.search_table(runs, search, by)
        show(encode(table, chosen) if table else _lines(lines, out), out)
        return
    by = loss_of(runs) if by in (None, "loss") else by
    sizes = scale_text.wanted(at or [])
    if part != "scale" and at:
        raise ValueError("--at asks about widths and budgets; add --part scale")
    if chosen != "table":
        if part == "scale":
            table = scale_text.scale_table(scale.trends(runs, by, knob, sizes))
        elif part == "lr":
            table = lr_slope.lr_table(lr_slope.lr_slopes(runs, by, knob))
        elif part == "chain":
            table = text_report.chain_table(causal_evidence.weigh(runs))
        else:
            table = all_effects.effects_table(all_effects.measure_effects(runs, by, knob))
        show(encode(table, chosen), out)
        return
    text: list[str] = []
    if part in ("all", "knobs", "lr"):
        text += text_report.knob_cautions(runs, by)
    if part in ("all", "knobs"):
        text += (text_report if detail else summary).knob_lines(runs, by, knob)
    if part == "scale":
        text += scale_text.scale_lines(runs, by, knob, sizes)
    if part == "lr":
        text += lr_slope.lr_lines(runs, by, knob)
    if part == "chain" or (part == "all" and knob is None and detail):
        text += [*([""] if text else []), *(text_report if detail else summary).chain_lines(runs)]
    is_summary = part != "scale" and not detail
    if is_summary and part != "lr":
        links = "" if part == "chain" or knob else "; the chain from sparsity to loss: --part chain"
        text += ["", f"The same in sentences, with all that it rests on: --detail{links}"]
    show(_lines(text, out, is_summary), out)


def _lines(lines: Iterable[str], out: Path | None, is_folded: bool = False) -> bytes:
    """Folded at a terminal, and a summary everywhere; sentences in a pipe or a file are a line each, so that `grep`
    finds whole ones."""
    from sparsedepth.store.render import wrapped

    is_folded = is_folded or (out is None and sys.stdout.isatty())
    return (wrapped(lines) if is_folded else "".join(f"{line}\n" for line in lines)).encode()
