"""Commands that ask the store: query, best and compare. None of them imports torch.

What a user asks in SQL runs in a process of its own (`store.sandbox`); our own questions need no fence.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="results folders, or run folders")]
Format = Annotated[
    str | None,
    typer.Option(help="table, csv, json, markdown, latex or parquet; default by the ending of -o, else table"),
]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="write the answer here")]
Objective = Annotated[
    str, typer.Option("--objective", "--by", help="what to improve: loss (that which compares the runs), ...")
]
SkipDamaged = Annotated[bool, typer.Option("--skip-damaged", help="leave damaged runs out, and say how many")]

LIST = "list"
"""What `--ask` without a name asks for."""
EFFECTS_ASK = "what does each setting of each knob do to the loss at each depth, on four bases (`sparsedepth effects`)?"


class QueryCommand(TyperCommand):
    """`--ask` without a name, at the end or before another option, lists the questions, and so does `--list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = ["--ask" if word == "--list" else word for word in args]
        after = args.index("--ask") + 1 if "--ask" in args else None
        if after and (after == len(args) or args[after].startswith("-")):
            args = [*args[:after], LIST, *args[after:]]
        return super().parse_args(ctx, args)


def query(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR... [SQL]",
            help="results or run folders; then a SELECT over runs, curves, layers, heads, pairs, tokens, difficulty, "
            "toys, evals",
        ),
    ] = None,
    ask: Annotated[
        str | None, typer.Option(help="answer a saved question; without a name (or --list), list them")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="list every column with its unit and meaning (... | grep WORD)")
    ] = False,
    format: Format = None,
    out: Out = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds that a SELECT may take")] = 60.0,
    skip_damaged: SkipDamaged = False,
) -> None:
    """Ask the complete runs anything, in read-only SQL, or one of the saved questions."""
    from sparsedepth.store import sandbox
    from sparsedepth.store.render import choose_format

    sql = words[-1] if words and _is_sql(words[-1]) else None
    folders = (words or [])[: None if sql is None else -1]
    if not folders and ask != LIST:
        raise ValueError("name a results folder, before a query: sparsedepth query DIR SQL")
    if (sql is not None) + (ask is not None) + schema != 1:
        raise ValueError('give one of: a query, such as "select * from runs"; --ask NAME (--ask alone lists); --schema')
    chosen = choose_format(format, out)
    if sql is not None:
        content = sandbox.ask(folders, {"sql": sql}, chosen, timeout, skip_damaged)
    else:
        content = _ours(folders, None if schema else ask, chosen, skip_damaged)
    show(content, out)


def _is_sql(word: str) -> bool:
    """Whether a word is a query: it is no path that exists, and holds a blank (or nothing)."""
    return not os.path.exists(word) and (not word or any(character.isspace() for character in word))


def _ours(folders: list[str], ask: str | None, format: str, skip_damaged: bool) -> bytes:
    """The schema, the list of questions, or the answer to one."""
    from sparsedepth.store import questions
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.query_result import QueryResult
    from sparsedepth.store.render import encode

    if ask == LIST:
        asks = {question.name: question.asks for question in questions.QUESTIONS.values()}
        asks[questions.EFFECTS] = EFFECTS_ASK
        if format != "table":
            return encode(QueryResult(columns=("name", "question"), rows=tuple(asks.items())), format)
        return "".join(f"{name}: {text}\n" for name, text in asks.items()).encode()
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        if ask == questions.EFFECTS:
            from sparsedepth.effects.all_effects import effects_table, measure_effects
            from sparsedepth.effects.summary import effects_text
            from sparsedepth.store.comparable_loss import loss_of

            runs = store.frame("select * from runs")
            effects = measure_effects(runs, loss_of(runs))
            if format == "table":
                return f"{effects_text(effects, every_basis=True)}\n".encode()
            return encode(effects_table(effects), format)
        if ask is not None:
            if format == "table":
                return f"{questions.text(store, ask)}\n".encode()
            return encode(questions.ask(store, ask), format)
        answer = store.schema()
    if format != "table":
        return encode(answer, format)
    return "".join(  # meanings are sentences: a line each, whole
        f"{view}.{name} {sql_type}{f' [{unit}]' if unit not in ('', '1') else ''}: {meaning}\n"
        for view, name, sql_type, unit, meaning in answer.rows
    ).encode()


def best(
    folders: Folders,
    by: Annotated[
        str | None,
        typer.Option("--by", "--objective", help="what ranks: loss (that which compares the runs, the default), ..."),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="only runs of this n_layers")] = None,
    where: Annotated[
        str | None, typer.Option(help='only runs that meet this SQL condition: "params_active < 5e7"')
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="how many configurations")] = 5,
    again: Annotated[
        Path | None, typer.Option(help="of a search: write the sweep of the --top with new seeds into this YAML file")
    ] = None,
    skip_damaged: SkipDamaged = False,
    format: Format = None,
    out: Out = None,
) -> None:
    """Rank configurations by their mean over seeds, with interval, the baseline beside them; of a search, its front."""
    from sparsedepth.store import sandbox
    from sparsedepth.store.render import choose_format

    options = {"by": None if by == "loss" else by, "depth": depth, "where": where, "top": top}
    if again is not None:
        write_again(folders, options, again, skip_damaged)
        return
    chosen = choose_format(format, out)
    show(sandbox.ask(folders, {"best": options}, chosen, skip_damaged=skip_damaged), out)
    if chosen == "table" and out is None:
        print_trials(folders)


def write_again(folders: list[Path], options: dict[str, Any], out: Path, skip_damaged: bool) -> None:
    """Write the sweep that runs the best proposals of a search again. Raises ValueError for another folder."""
    from sparsedepth.store.best import best as rank
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.search import rerun_definition

    with open_store(*folders, skip_damaged=skip_damaged) as store:
        ranking = rank(store, **options)
    if ranking.search is None:
        raise ValueError("--again is for one folder that a sampler filled; a grid has its seeds in its definition")
    definition = rerun_definition(ranking.search, ranking.knobs[: options["top"]], out)
    print(f"{out}: {len(definition.cells)} configurations, seeds {', '.join(map(str, definition.seeds))}")


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="a results folder")],
    second: Annotated[Path, typer.Argument(metavar="B", help="another")],
    by: Annotated[str, typer.Option("--by", "--objective", help="what is compared: loss (the default), ...")] = "loss",
    skip_damaged: SkipDamaged = False,
    format: Format = None,
    out: Out = None,
) -> None:
    """Lay two results folders side by side: the same configurations' differences, and what only one has."""
    from sparsedepth import quantities
    from sparsedepth.store.comparable_loss import unit_for_stores
    from sparsedepth.store.compare import compare as lay_beside
    from sparsedepth.store.compare import counts, disjoint_fields
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.render import choose_format, columns_of, compact, encode, wrapped

    chosen = choose_format(format, out)
    with open_store(first, skip_damaged=skip_damaged) as left, open_store(second, skip_damaged=skip_damaged) as right:
        quantity, table = lay_beside(left, right, None if by == "loss" else by)
        unit = unit_for_stores(quantities.rankable(quantity).unit, left, right)
    if chosen != "table":
        show(encode(table, chosen), out)
        return
    both, only_first, only_second, differ = counts(table)
    fields = {"found_in", "n_layers", "pairs", "first", "second", "difference", "lo", "hi", "setting"}
    head = (
        f"{quantity}{f' [{unit}]' if unit not in ('', '1') else ''}: {second} (second) less {first} (first), with its "
        "95% interval, over the pairs of one seed if there are any",
        f"{both} configurations in both, {differ} of them with an interval without 0 (by chance alone one in 20); "
        f"{only_first} in the first alone, {only_second} in the second alone",
        *(f"the folders have no {text}" for text in disjoint_fields(table)),
    )
    show(f"{wrapped(head)}{compact(columns_of(table, fields), ('found_in',))}\n".encode(), out)
    if out is None:
        print_trials([first, second])


def print_trials(folders: list[Path]) -> None:
    """What trials beside these folders found of their recipes."""
    if not any(any(folder.resolve().parent.glob("*/*.card.json")) for folder in folders):
        return  # most have none: pandas and the card's schema need not be imported
    from sparsedepth.recipe.card_text import trial_text
    from sparsedepth.recipe.trial import trials_of

    for folder, card in trials_of(folders):
        print(f"\n{trial_text(folder, card)}")


def print_best(folders: list[Path], by: str, top: int) -> None:
    """The ranking at the end of a sweep."""
    from sparsedepth.store.best import best as rank
    from sparsedepth.store.best import heading, text
    from sparsedepth.store.connection import open_store

    with open_store(*folders) as store:
        ranking = rank(store, by, top=top)
    print(f"{heading(ranking)}\n{text(ranking)}")


def show(content: bytes, out: Path | None) -> None:
    if out is None:
        print(content.decode(), end="")
        return
    from sparsedepth.files import write_bytes

    write_bytes(out, content)
    print(f"{out} ({max(1, len(content) // 1024)} KiB)")
