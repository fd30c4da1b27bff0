"""`sparsedepth query`, `best` and `compare`. None of them imports torch.

SQL given by the user runs in a separate, restricted process (`store.sandbox`); saved questions do not.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sparsedepth import quantities
from sparsedepth.cli import option
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.render import choose_format, encode
from sparsedepth.store.terminal import fit, wrapped

LIST = "list"
"""The value of `--ask` without a name."""
EFFECTS_QUESTION = (
    "what does each setting of each knob do to the loss at each depth, on each basis (`sparsedepth effects`)?"
)


class QueryCommand(TyperCommand):
    """`--ask` without a name, and `--list`, list the saved questions."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = ["--ask" if word == "--list" else word for word in args]
        after = args.index("--ask") + 1 if "--ask" in args else None
        if after and (after == len(args) or args[after].startswith("-")):
            args = [*args[:after], LIST, *args[after:]]
        return super().parse_args(ctx, args)


def query(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR... [SQL]",
            help="results or run folders; then a SELECT over runs, curves, layers, heads, pairs, tokens, difficulty, "
            "toys, evals",
        ),
    ] = None,
    ask: Annotated[
        str | None, typer.Option(help="answer a saved question; without a name (or with --list), list them")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="list all columns with unit and meaning (filter with | grep WORD)")
    ] = False,
    format: option.Format = None,
    out: option.OutFile = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=86400, help="time limit of a SELECT, in seconds")] = 60.0,
    skip_damaged: option.SkipDamaged = False,
) -> None:
    """Query complete runs with read-only SQL, or answer a saved question."""
    from sparsedepth.store import sandbox

    sql = arguments[-1] if arguments and _is_sql(arguments[-1]) else None
    folders = (arguments or [])[: None if sql is None else -1]
    if not folders and ask != LIST:
        raise ValueError("give a results folder before the query: sparsedepth query DIR SQL")
    if (sql is not None) + (ask is not None) + schema != 1:
        raise ValueError('give one of: a query, such as "select * from runs"; --ask NAME (--ask alone lists); --schema')
    format = choose_format(format, out)
    if sql is not None:
        content = sandbox.ask(folders, {"sql": sql}, format, timeout, skip_damaged)
    else:
        content = _saved_answer(folders, None if schema else ask, format, skip_damaged)
    write(content, out)


def _is_sql(argument: str) -> bool:
    """Whether an argument is a query: not an existing path, and with a space (or empty)."""
    return not os.path.exists(argument) and (not argument or any(character.isspace() for character in argument))


def _saved_answer(folders: list[str], ask: str | None, format: str, skip_damaged: bool) -> bytes:
    """The list of saved questions, the answer to one, or the schema (`ask` None)."""
    from sparsedepth.store import questions
    from sparsedepth.store.connection import open_store

    if ask == LIST:
        texts = {**questions.sentences(), questions.EFFECTS: EFFECTS_QUESTION}
        if format != "table":
            return encode(QueryResult(columns=("name", "question"), rows=tuple(texts.items())), format)
        return "".join(f"{name}: {text}\n" for name, text in texts.items()).encode()
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        if ask == questions.EFFECTS:
            from sparsedepth.effects.cells import cells_of
            from sparsedepth.effects.frame import effects_frame
            from sparsedepth.effects.text import effects_table, effects_text
            from sparsedepth.store.comparable_loss import loss_of

            runs = store.frame("select * from runs")
            cells = cells_of(runs, loss_of(runs))
            effects = effects_frame(cells)
            if format == "table":
                return f"{effects_text(effects, cells)}\n".encode()
            return encode(effects_table(effects, cells), format)
        if ask is not None:
            if format == "table":
                return f"{questions.text(store, ask)}\n".encode()
            return encode(questions.ask(store, ask), format)
        schema = store.schema()
    if format != "table":
        return encode(schema, format)
    return "".join(  # one line per column, for `grep`
        f"{view}.{name} {sql_type}{f' [{unit}]' if unit not in ('', '1') else ''}: {meaning}\n"
        for view, name, sql_type, unit, meaning in schema.rows
    ).encode()


def best(
    folders: option.Folders,
    by: Annotated[
        str | None,
        typer.Option("--by", "--objective", help="quantity to rank by; default loss (the comparable validation loss)"),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="only runs with this n_layers")] = None,
    where: Annotated[
        str | None, typer.Option(help='only runs that satisfy this SQL condition: "params_active < 5e7"')
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="number of configurations")] = 5,
    again: Annotated[
        Path | None, typer.Option(help="for a search: write a sweep of the --top configurations with new seeds (YAML)")
    ] = None,
    skip_damaged: option.SkipDamaged = False,
    format: option.Format = None,
    out: option.OutFile = None,
) -> None:
    """Rank configurations by their mean over seeds, with interval and baseline; for a search, its Pareto front."""
    from sparsedepth.store import sandbox

    options = {"by": None if by == "loss" else by, "depth": depth, "where": where, "top": top}
    if again is not None:
        write_rerun_sweep(folders, options, again, skip_damaged)
        return
    format = choose_format(format, out)
    write(sandbox.ask(folders, {"best": options}, format, skip_damaged=skip_damaged), out)
    if format == "table" and out is None:
        print_verifications(folders)


def write_rerun_sweep(folders: list[Path], options: dict[str, Any], out: Path, skip_damaged: bool) -> None:
    """Write a sweep that reruns the best proposals of a search. Raises ValueError if the folder is not a search."""
    from sparsedepth.store.best import best as rank
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.search import rerun_definition

    with open_store(*folders, skip_damaged=skip_damaged) as store:
        ranking = rank(store, **options)
    if ranking.search is None:
        raise ValueError("--again needs the folder of one search; for a grid, add seeds to its definition")
    definition = rerun_definition(ranking.search, ranking.knobs[: options["top"]], out)
    print(f"{out}: {len(definition.cells)} configurations, seeds {', '.join(map(str, definition.seeds))}")


def compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="a results folder")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="the results folder to compare with it")],
    by: Annotated[str, typer.Option("--by", "--objective", help="quantity to compare: loss, ...")] = "loss",
    skip_damaged: option.SkipDamaged = False,
    format: option.Format = None,
    out: option.OutFile = None,
) -> None:
    """Compare two results folders: differences between equal configurations, and configurations in only one."""
    from sparsedepth.store.comparable_loss import unit_for_stores
    from sparsedepth.store.compare import NOTES, counts, disjoint_fields
    from sparsedepth.store.compare import compare as compare_folders
    from sparsedepth.store.connection import open_store

    format = choose_format(format, out)
    with open_store(first, skip_damaged=skip_damaged) as left, open_store(second, skip_damaged=skip_damaged) as right:
        quantity, table = compare_folders(left, right, None if by == "loss" else by)
        unit = unit_for_stores(quantities.rankable(quantity).unit, left, right)
    if format != "table":
        write(encode(table, format), out)
        return
    both, only_first, only_second, differ = counts(table)
    fields = {"found_in", "n_layers", "pairs", "first", "second", "difference", "lo", "hi", "setting", *NOTES}
    significant = f", {differ} of them with an interval that excludes 0 (expected by chance: one in 20)" if both else ""
    head = (
        f"{quantity}{f' [{unit}]' if unit not in ('', '1') else ''}: {second} (second) minus {first} (first) with 95% "
        "interval, paired by seed where both have it",
        f"{both} configurations in both{significant}; {only_first} only in the first, {only_second} only in the second",
        f"setting: relative to the baseline of {first}",
        *(["tuned: chosen differently; lo, hi include the error of choosing"] if "tuned" in table.columns else []),
        *(["diverged: left out, which favours the side with more of them"] if {*NOTES[1:]} & {*table.columns} else []),
        *(["Fields that never agree:", *disjoint] if (disjoint := disjoint_fields(table)) else []),
    )
    write(f"{wrapped(head)}{fit(table.of_columns(fields), ('found_in',)).text}\n".encode(), out)
    if out is None:
        print_verifications([first, second])


def print_verifications(folders: list[Path]) -> None:
    """Print the results of `recipe verify` for the recipes of these folders."""
    if not any(any(folder.resolve().parent.glob("*/*.card.json")) for folder in folders):
        return  # most have none: saves importing pandas and the card's schema
    from sparsedepth.recipe.card_text import trial_text
    from sparsedepth.recipe.trial import trials_of

    for folder, card in trials_of(folders):
        print(f"\n{trial_text(folder, card)}")


def print_best(folders: list[Path], by: str, top: int) -> None:
    from sparsedepth.store.best import best as rank
    from sparsedepth.store.best import heading, text
    from sparsedepth.store.connection import open_store

    with open_store(*folders) as store:
        ranking = rank(store, by, top=top)
    print(f"{heading(ranking)}\n{text(ranking)}")


def write(content: bytes, out: Path | None) -> None:
    if out is None:
        print(content.decode(), end="")
        return
    from sparsedepth.files import write_bytes

    write_bytes(out, content)
    print(f"{out} ({max(1, len(content) // 1024)} KiB)")
