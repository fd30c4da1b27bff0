"""`query`, `best` and `effects`: what the runs of results folders say.

None imports torch. While SQL given by the user runs, the process has limits of its own (`store.fences`)."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from typer import Argument, Option
from typer.core import TyperCommand

from sparsedepth.cli import option
from sparsedepth.cli.option import FolderOptions, Format, OutFile, SkipDamaged
from sparsedepth.files import write_bytes
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.degeneracy import caution, weakness_text
from sparsedepth.words.differences import data_text, only_tuning_text, pending_text
from sparsedepth.words.effects import in_brackets
from sparsedepth.words.formats import choose_format, encode
from sparsedepth.words.plain_text import commas, wrapped
from sparsedepth.words.runs import search_text
from sparsedepth.words.saved_queries import answer_text

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.report.answers import Answer
    from sparsedepth.store.best import Ranking
    from sparsedepth.store.connection import Store

Baseline = Annotated[str, Option(help="a setting that stands in its place, by its name: 'depth_scale=lns'")]
LIST = "list"
"""The value of `--ask` without a name."""
UNLIKE_SWAPS = """
select n_layers, list_sort(list(distinct permutation_swaps)) from runs where permutation_swaps is not null
group by all having count(distinct permutation_swaps) > 1 order by all
"""


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
        Argument(
            metavar="DIR... [SQL]",
            help="results or run folders, and a SELECT over runs, curves, layers, heads, pairs, tokens, difficulty, "
            "evals",
        ),
    ] = None,
    ask: Annotated[str | None, Option(help="answer a saved question; without a name, list them")] = None,
    schema: Annotated[bool, Option("--schema", help="list all columns with unit and meaning")] = False,
    format: Format = None,
    out: OutFile = None,
    timeout: Annotated[float, Option(min=0.1, max=86400, help="time limit of a SELECT, in seconds")] = 60.0,
    baseline: Baseline = "",
    skip_damaged: SkipDamaged = False,
) -> None:
    """Query complete runs with read-only SQL, or answer a saved question."""
    folders = list(arguments or [])
    texts = [text for text in folders if not os.path.exists(text) and (not text or any(map(str.isspace, text)))]
    sql = texts[-1] if texts else None  # before or after the folders
    if sql is not None:
        folders.remove(sql)
    if not folders and ask != LIST:
        raise ValueError("give a results folder before the query: sparsedepth query DIR SQL")
    if (sql is not None) + (ask is not None) + schema != 1:
        raise ValueError('give one of: a query, such as "select * from runs"; --ask NAME (--ask alone lists); --schema')
    format = choose_format(format, out)
    if sql is not None:
        _check_baseline(baseline, False)
        content = _answer(folders, sql, format, timeout, skip_damaged)
    else:
        content = _saved_answer(folders, None if schema else ask, format, skip_damaged, baseline)
    write(content, out)


def _answer(folders: list[str], sql: str, format: str, timeout: float, skip_damaged: bool) -> bytes:
    """The result of the user's SELECT, which runs within the limits of `limited`; tables are read outside of them."""
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.fences import limited
    from sparsedepth.store.schema import TABLES
    from sparsedepth.words.formats import FOR_PEOPLE

    with open_store(*folders, time_limit=timeout, skip_damaged=skip_damaged) as store:
        if any(table in sql.lower() for table in TABLES):
            store.read_tables()  # outside of the limits
        with limited(timeout):
            result = store.sql(sql)
            return encode(result.with_decimals() if format in FOR_PEOPLE else result, format)


@dataclass(frozen=True)
class SqlCommand(FolderOptions):
    """The rows of a read-only SELECT over runs, curves, layers, heads, pairs, tokens, difficulty, evals, of which
    `frame()` makes a DataFrame; `sparsedepth query DIR --schema` lists the columns. `timeout` in seconds.

    Raises ValueError for a query that is wrong, forbidden or beyond a limit."""

    sql: str
    _: KW_ONLY
    timeout: float = 60.0

    def compute(self) -> QueryResult:
        with self.open(self.timeout) as store:
            return store.sql(self.sql)


@dataclass(frozen=True)
class AskCommand(FolderOptions):
    """The rows of a saved question's answer, as a QueryResult with `frame()`; those of 'variance' and 'depth' are
    effects. The `sentence` of these two is what `sparsedepth query DIR --ask` begins with.

    Raises ValueError for an unknown question, and where only tuning is complete."""

    question: str
    _: KW_ONLY
    baseline: Baseline = ""

    def compute(self) -> "Answer | QueryResult":
        from sparsedepth.report.answers import answer
        from sparsedepth.store import saved_queries

        _check_baseline(self.baseline, self.question in saved_queries.FROM_EFFECTS)
        with self.open() as store:
            if self.question in saved_queries.FROM_EFFECTS:
                return answer(store, self.question, self.baseline)
            return saved_queries.ask(store, self.question)


def _check_baseline(baseline: str, is_of_effects: bool) -> None:
    """Raises ValueError for a baseline of an answer that compares no settings."""
    if baseline and not is_of_effects:
        raise ValueError(f"--baseline {baseline!r} is of effects, --ask depth and --ask variance; leave it out")


def _saved_answer(folders: list[str], ask: str | None, format: str, skip_damaged: bool, baseline: str) -> bytes:
    """The list of saved questions, the answer to one, or the schema (`ask` None)."""
    from sparsedepth.store import saved_queries
    from sparsedepth.store.connection import open_store

    _check_baseline(baseline, ask in saved_queries.FROM_EFFECTS)
    if ask == LIST:
        texts = saved_queries.sentences() | saved_queries.FROM_EFFECTS
        if format != "table":
            return encode(QueryResult(columns=("name", "question"), rows=tuple(texts.items())), format)
        return "".join(f"{name}: {text}\n" for name, text in texts.items()).encode()
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        if ask in saved_queries.FROM_EFFECTS:
            from sparsedepth.report.answers import answer
            from sparsedepth.words.report import whole_answer

            found = answer(store, ask, baseline)
            return f"{whole_answer(found)}\n".encode() if format == "table" else encode(found.rows, format)
        if ask is not None:
            if format == "table":
                return f"{answer_text(saved_queries.answered(store, ask))}\n".encode()
            return encode(saved_queries.ask(store, ask), format)
        schema = store.schema()
    if format != "table":
        return encode(schema, format)
    return "".join(  # one line per column, for `grep`
        f"{view}.{name} {sql_type}{in_brackets(unit)}: {meaning}\n"
        for view, name, sql_type, unit, meaning in schema.rows
    ).encode()


@dataclass(frozen=True)
class BestCommand(FolderOptions):
    """Configurations ranked by their mean over seeds, with interval and baseline: the table of `store.best.Ranking`
    plus `setting`, the differences from the baseline. `attrs["heading"]` describes the table.

    Raises ValueError for an unknown quantity, a wrong SQL condition, or if no run matches."""

    _: KW_ONLY
    by: Annotated[str | None, Option("--by", "--objective", help="quantity to rank by; default the loss")] = None
    depth: Annotated[int | None, Option(help="only runs with this n_layers")] = None
    where: Annotated[str | None, Option(help='only runs that satisfy this SQL condition: "params_active < 5e7"')] = None
    top: Annotated[int, Option(min=1, help="number of configurations")] = 5

    def ranking(self) -> "Ranking":
        """The configurations, by rank."""
        from sparsedepth.store.best import best as rank

        with self.open() as store:
            return rank(store, None if self.by == "loss" else self.by, self.depth, self.top, self.where)

    def compute(self) -> "pd.DataFrame":
        from sparsedepth.words.best import heading

        ranking = self.ranking()
        table = ranking.table.frame()
        table.insert(1, "setting", [*ranking.settings])
        table.attrs["heading"] = heading(ranking)
        return table


@option.command
def best(
    given: BestCommand,
    again: Annotated[Path | None, Option(help="a search's --top as a sweep with new seeds (YAML)")] = None,
    format: Format = None,
    out: OutFile = None,
) -> None:
    """Rank configurations by their mean over seeds, with interval and baseline; for a search, its Pareto front."""
    from sparsedepth.store.connection import TIME_LIMIT
    from sparsedepth.store.fences import limited
    from sparsedepth.store.search import rerun_definition
    from sparsedepth.words.best import answer

    if again is not None and (out or format):
        raise ValueError(f"--again {again} writes a sweep and no table; leave out -o and --format")
    format = choose_format(format, out)
    with limited(TIME_LIMIT):
        ranking = given.ranking()
    if again is not None:
        if ranking.search is None:
            raise ValueError("--again needs the folder of one search; for a grid, add seeds to its definition")
        definition = rerun_definition(ranking.search, ranking.knobs[: given.top], again)
        print(f"{again}: {len(definition.cells)} configurations, seeds {commas(definition.seeds)}")
        return
    write(answer(ranking).encode() if format == "table" else encode(ranking.table, format), out)
    if format == "table" and out is None:
        _print_verifications(given.paths)


def _print_verifications(folders: list[Path]) -> None:
    """Print the results of `recipe verify` for the recipes of these folders."""
    if not any(any(folder.resolve().parent.glob("*/*.card.json")) for folder in folders):
        return  # most have none: saves importing pandas and the card's schema
    from sparsedepth.recipe.build_card import trials_of
    from sparsedepth.words.recipe import trial_text

    for folder, card in trials_of(folders):
        print(f"\n{trial_text(folder, card)}")


@dataclass(frozen=True)
class EffectsCommand(FolderOptions):
    """The effect of every setting at every depth, with its interval: a QueryResult, of which `frame()` makes a
    DataFrame; `part` 'chain': the links from sparsity to the loss; `currency` 'speedup': compute multipliers.

    Raises ValueError for an unknown outcome or knob, and without results."""

    _: KW_ONLY
    by: Annotated[str | None, Option("--by", "--objective", help="outcome; default the loss")] = None
    knob: Annotated[str | None, Option(help="only this knob")] = None
    part: Annotated[
        Literal["all", "chain"], Option(help="all: effects of settings; chain: links from sparsity to loss")
    ] = "all"
    currency: Annotated[
        Literal["loss", "speedup"], Option("--as", help="speedup: as the compute that the baseline would need")
    ] = "loss"
    detail: Annotated[bool, Option("--detail", help="the parts of each interval, p and evidence")] = False
    baseline: Baseline = ""

    def compute(self) -> QueryResult:
        with self.open() as store:
            return _effects(store, self).rows()


@option.command
def effects(given: EffectsCommand, format: Format = None, out: OutFile = None) -> None:
    """Show the effect of every setting at every depth, with its interval (--part chain: links to the loss).

    For a search: the importance of each axis to each objective, and its values among the best proposals."""
    format = choose_format(format, out)
    with given.open() as store:
        content = _effects(store, given).content(format, out)
    write(content, out)


class Shown(NamedTuple):
    """What a command shows: rows to programs, lines to people; only those that are asked for are computed."""

    rows: Callable[[], QueryResult]
    lines: Callable[[], Iterable[str]]
    has_long_lines: bool = False
    """Which `grep` finds where they are not wrapped."""

    def content(self, format: str, out: Path | None) -> bytes:
        if format != "table":
            return encode(self.rows(), format)
        lines = filter(None, self.lines())
        if self.has_long_lines and (out is not None or not sys.stdout.isatty()):
            return "".join(f"{line}\n" for line in lines).encode()
        return wrapped(lines).encode()


def show(table: QueryResult, lines: Iterable[str], format: str, out: Path | None) -> None:
    """Write a table for programs, or lines for people."""
    write(Shown(lambda: table, lambda: lines).content(format, out), out)


def _multipliers(store: "Store", given: EffectsCommand) -> Shown:
    """What settings are worth: of one run at each budget by `judge`, else by seeds. Raises ValueError without a law."""
    from sparsedepth.recipe.judge_ladder import judge_ladders
    from sparsedepth.scaling.points import budget_rows
    from sparsedepth.scaling.speedup import multipliers, speedups
    from sparsedepth.words.judge import multiplier_lines
    from sparsedepth.words.scaling import speedup_lines

    rows = budget_rows(store, given.knob, None if given.by == "loss" else given.by)
    with contextlib.suppress(ValueError):  # several seeds, or no law
        judged = judge_ladders(rows)
        return Shown(lambda: judged, lambda: multiplier_lines(judged))
    worths = speedups(rows)
    return Shown(lambda: QueryResult.of_frame(worths), lambda: speedup_lines(multipliers(worths)))


def _effects(store: "Store", given: EffectsCommand) -> Shown:
    """The effects on an outcome, the links to it, or what matters in a search. Raises ValueError without results."""
    _check_baseline(given.baseline, given.part == "all" and given.currency == "loss")
    if given.currency == "speedup":
        if given.part != "all" or given.detail:
            raise ValueError("--as speedup is about the effects of settings; leave out --part and --detail")
        return _multipliers(store, given)
    from sparsedepth.effects import chain, importance
    from sparsedepth.effects.cells import cells_of, read_runs
    from sparsedepth.store.comparable_loss import loss_in
    from sparsedepth.store.packs import no_run
    from sparsedepth.store.search import search_of
    from sparsedepth.store.setting import only_tuning
    from sparsedepth.words.chain import chain_lines
    from sparsedepth.words.search import importance_lines

    search = search_of(store.roots)
    outcome = loss_in(store) if given.by in (None, "loss") else given.by
    is_whole = given.part == "chain" or search is not None
    runs = store.frame("select * from runs") if is_whole else read_runs(store, outcome)
    if runs.empty:
        raise no_run(store.roots)
    if reason := only_tuning_text(only_tuning(store)):
        raise ValueError(reason)
    if given.part == "chain":
        if given.knob is not None:
            raise ValueError(f"--knob {given.knob!r} chooses effects of settings; leave it out with --part chain")
        if given.by not in (None, "loss"):
            raise ValueError(f"--by {given.by} is an outcome of settings, and the chain has its own; leave it out")
        found = cells_of(runs, outcome)
        return Shown(
            lambda: chain.chain_table(chain.chain_evidence(found)),
            lambda: chain_lines(chain.chain_of(found), given.detail),
            has_long_lines=given.detail,
        )
    _check_baseline(given.baseline, search is None)
    if search is None or given.knob is not None:
        return _of_settings(store, runs, outcome, given)
    if given.detail:
        raise ValueError("--detail is of effects of settings, which a search has not; leave it out")
    axes = importance.by_objective(runs, search, given.by)
    lines = importance_lines(axes, search_text(search))
    return Shown(lambda: importance.search_table(axes), lambda: lines, has_long_lines=True)


def _of_settings(store: "Store", runs: "pd.DataFrame", outcome: str, given: EffectsCommand) -> Shown:
    """The frame of effects, and what the outcome's scores are worth."""
    from sparsedepth.effects import cells, frame
    from sparsedepth.effects.equal_loss import effects_at_equal_loss
    from sparsedepth.effects.listing import listing, of_knob
    from sparsedepth.effects.second_look import with_second_looks
    from sparsedepth.store.degeneracy import common_weakness, score_rows, usable_form
    from sparsedepth.store.setting import pending
    from sparsedepth.words.effects import effects_text, equal_loss_line, second_look_lines, swaps_line

    found = cells.cells_of(runs, outcome, baseline=cells.changes_of(runs, given.baseline))
    scores = score_rows(frame.compared(found), outcome)
    usable = usable_form(outcome, scores)
    found = found.of_outcome(usable.form)
    effects = with_second_looks(of_knob(frame.effects_frame(found), given.knob, found), found)
    rows = QueryResult.of_frame(effects)

    def lines() -> Iterator[str]:
        if weakness := weakness_text(common_weakness(scores)):
            yield f"no evidence about depth: {weakness}"
        yield caution(usable, "the effects are on")
        if found.settings:
            yield data_text(found.settings)
        yield effects_text(listing(effects, found, given.detail))
        for row in rows.records():
            yield from second_look_lines(row)
        yield from map(equal_loss_line, effects_at_equal_loss(found))
        if outcome.startswith("permutation_score"):
            yield swaps_line(outcome, store.sql(UNLIKE_SWAPS).rows)
        yield pending_text(pending(store))

    return Shown(lambda: rows, lines)


def write(content: bytes, out: Path | None) -> None:
    if out is None:
        print(content.decode(), end="")
        return
    write_bytes(out, content)
    print(f"{out} ({max(1, len(content) // 1024)} KiB)")
