"""`sparsedepth query` and `best`. Neither imports torch.

While SQL given by the user runs, the process has limits of its own (`store.fences`).
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sparsedepth.cli import calls, option
from sparsedepth.store.query_result import QueryResult, choose_format, encode

LIST = "list"
"""The value of `--ask` without a name."""


class QueryCommand(TyperCommand):
    """`--ask` without a name lists the saved questions."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
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
            "evals",
        ),
    ] = None,
    ask: Annotated[str | None, typer.Option(help="answer a saved question; without a name, list them")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="list all columns with unit and meaning")] = False,
    format: option.Format = None,
    out: option.OutFile = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=86400, help="time limit of a SELECT, in seconds")] = 60.0,
    skip_damaged: option.SkipDamaged = False,
) -> None:
    """Query complete runs with read-only SQL, or answer a saved question."""
    folders, sql = list(arguments or []), None
    if folders and not os.path.exists(last := folders[-1]) and (not last or any(map(str.isspace, last))):
        sql = folders.pop()
    if not folders and ask != LIST:
        raise ValueError("give a results folder before the query: sparsedepth query DIR SQL")
    if (sql is not None) + (ask is not None) + schema != 1:
        raise ValueError('give one of: a query, such as "select * from runs"; --ask NAME (--ask alone lists); --schema')
    format = choose_format(format, out)
    if sql is not None:
        content = _answer(folders, sql, format, timeout, skip_damaged)
    else:
        content = _saved_answer(folders, None if schema else ask, format, skip_damaged)
    write(content, out)


def _answer(folders: list[str], sql: str, format: str, timeout: float, skip_damaged: bool) -> bytes:
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.fences import limited
    from sparsedepth.store.query_result import FOR_PEOPLE
    from sparsedepth.store.schema import TABLES

    with open_store(*folders, time_limit=timeout, skip_damaged=skip_damaged) as store:
        if any(table in sql.lower() for table in TABLES):
            store.read_tables()  # outside of the limits
        with limited(timeout):
            result = store.sql(sql)
            return encode(result.with_decimals() if format in FOR_PEOPLE else result, format)


def _saved_answer(folders: list[str], ask: str | None, format: str, skip_damaged: bool) -> bytes:
    """The list of saved questions, the answer to one, or the schema (`ask` None)."""
    from sparsedepth.store import questions
    from sparsedepth.store.connection import open_store

    if ask == LIST:
        texts = questions.sentences() | questions.FROM_EFFECTS
        if format != "table":
            return encode(QueryResult(columns=("name", "question"), rows=tuple(texts.items())), format)
        return "".join(f"{name}: {text}\n" for name, text in texts.items()).encode()
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        if ask in questions.FROM_EFFECTS:
            from sparsedepth.report.answers import answer

            found = answer(store, ask)
            return f"{found.text()}\n".encode() if format == "table" else encode(found.rows, format)
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


@option.of_call(calls.best)
def best(
    given: option.Given,
    again: Annotated[Path | None, typer.Option(help="a search's --top as a sweep with new seeds (YAML)")] = None,
    format: option.Format = None,
    out: option.OutFile = None,
) -> None:
    """Rank configurations by their mean over seeds, with interval and baseline; for a search, its Pareto front."""
    from sparsedepth.store.best import answer
    from sparsedepth.store.best import best as rank
    from sparsedepth.store.connection import TIME_LIMIT, open_store
    from sparsedepth.store.fences import limited
    from sparsedepth.store.search import rerun_definition

    by, folders, top = given["by"], given["folders"], given["top"]
    format = choose_format(format, out)
    with open_store(*folders, skip_damaged=given["skip_damaged"]) as store, limited(TIME_LIMIT):
        ranking = rank(store, None if by == "loss" else by, given["depth"], top, given["where"])
    if again is not None:
        if ranking.search is None:
            raise ValueError("--again needs the folder of one search; for a grid, add seeds to its definition")
        definition = rerun_definition(ranking.search, ranking.knobs[:top], again)
        print(f"{again}: {len(definition.cells)} configurations, seeds {', '.join(map(str, definition.seeds))}")
        return
    write(answer(ranking).encode() if format == "table" else encode(ranking.table, format), out)
    if format == "table" and out is None:
        _print_verifications(folders)


def _print_verifications(folders: list[Path]) -> None:
    """Print the results of `recipe verify` for the recipes of these folders."""
    if not any(any(folder.resolve().parent.glob("*/*.card.json")) for folder in folders):
        return  # most have none: saves importing pandas and the card's schema
    from sparsedepth.recipe.build_card import trials_of
    from sparsedepth.recipe.text import trial_text

    for folder, card in trials_of(folders):
        print(f"\n{trial_text(folder, card)}")


def write(content: bytes, out: Path | None) -> None:
    if out is None:
        print(content.decode(), end="")
        return
    from sparsedepth.files import write_bytes

    write_bytes(out, content)
    print(f"{out} ({max(1, len(content) // 1024)} KiB)")
