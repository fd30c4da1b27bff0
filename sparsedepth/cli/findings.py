"""Commands that read results: query, best, recipe, plot. None of them imports torch."""

from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="results folders, or run folders")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="results folder, or run folder")]


def register(app: typer.Typer) -> None:
    app.command()(query)
    app.command()(best)
    app.command()(recipe)
    app.command()(plot)


def query(
    folder: Folder,
    sql: Annotated[
        str | None, typer.Argument(metavar="SQL", help="a SELECT over runs, curves, layers, heads, pairs")
    ] = None,
    also: Annotated[list[Path] | None, typer.Option(help="further results folders; repeatable")] = None,
    format: Annotated[str, typer.Option(help="table, csv, json, markdown or latex")] = "table",
    schema: Annotated[bool, typer.Option("--schema", help="list every column with its unit and meaning")] = False,
) -> None:
    """Ask the complete runs anything, in read-only SQL."""
    from sparsedepth.store.open import open_store
    from sparsedepth.store.render import FORMATS, render

    if format not in FORMATS:
        raise ValueError(f"--format {format!r} is not one of {', '.join(FORMATS)}")
    if (sql is None) != schema:
        raise ValueError('give either a query, such as "select * from runs", or --schema')
    with open_store(folder, *(also or [])) as store:
        answer = store.schema() if sql is None else store.sql(sql)
    if sql is None and format == "table":  # meanings are sentences: a line each, whole
        for view, name, sql_type, unit, meaning in answer.rows:
            print(f"{view}.{name} {sql_type}{f' [{unit}]' if unit not in ('', '1') else ''}: {meaning}")
    else:
        print(render(answer, format))


def best(
    folders: Folders,
    by: Annotated[str, typer.Option(help="the quantity that ranks: val_loss, usefulness, ...")] = "val_loss",
    depth: Annotated[int | None, typer.Option(help="only runs of this n_layers")] = None,
    where: Annotated[
        str | None, typer.Option(help='only runs that meet this SQL condition: "params_active < 5e7"')
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="how many configurations")] = 5,
    format: Annotated[str, typer.Option(help="table, csv, json, markdown or latex")] = "table",
) -> None:
    """Rank configurations by their mean over seeds."""
    print_best(folders, by, depth, where, top, format)


def print_best(
    folders: list[Path],
    by: str,
    depth: int | None = None,
    where: str | None = None,
    top: int = 5,
    format: str = "table",
) -> None:
    """The ranking that `best` prints, also at the end of a sweep."""
    from sparsedepth.store.best import best as rank
    from sparsedepth.store.open import open_store
    from sparsedepth.store.render import render

    with open_store(*folders) as store:
        ranking = rank(store, by, depth, top, where)
    unit = f" [{ranking.unit}]" if ranking.unit not in ("", "1") else ""
    diverged = f", {ranking.n_diverged} of them diverged" if ranking.n_diverged else ""
    if format == "table":
        print(
            f"{by}{unit}, {ranking.better} is better: {ranking.n_cells} configurations, {ranking.n_runs} runs{diverged}"
        )
    print(render(ranking.table, format))


def recipe(
    folders: Folders,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="write the RunConfig here (YAML)")] = None,
    depth: Annotated[int | None, typer.Option(help="n_layers to advise on; default the deepest")] = None,
    objective: Annotated[str, typer.Option(help="the quantity to improve")] = "val_loss",
    matched: Annotated[str, typer.Option(help="a setting may spend no more of this than its baseline")] = "tokens",
) -> None:
    """Derive a configuration from paired effects, with its evidence; or abstain and say why."""
    from sparsedepth.recipe import derive, evidence, write
    from sparsedepth.store.open import open_store

    with open_store(*folders) as store:
        runs = store.frame("select * from runs")
    found = derive(runs, depth, objective, matched)
    for line in evidence(found):
        print(line)
    if out is not None:
        write(found, out)
        kind = "the baseline" if found.abstained else "the recipe"
        print(f"\n{kind} is in {out}: sparsedepth train {out} --out {folders[0]}")


def plot(
    folders: Folders,
    out: Annotated[Path, typer.Option("-o", "--out", help="picture: .png, .svg or .pdf")],
    figure: Annotated[str, typer.Option(help="chain, profiles, all (both), or card")] = "all",
    run: Annotated[
        str | None, typer.Option(help="run_id of the card; default the lowest val_loss at the deepest depth")
    ] = None,
) -> None:
    """Draw how sparsity, variance and effectiveness move together, and profiles by depth; or a card of one run."""
    from sparsedepth.plots.draw import draw
    from sparsedepth.store.open import open_store

    with open_store(*folders) as store:
        draw(store, figure, out, run)
    print(f"{out} ({out.stat().st_size // 1024} KiB)")
