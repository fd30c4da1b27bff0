"""Words of a judgement on a table of runs: what was read and used, and the answer in a sentence or two."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sparsedepth.quantities.levels import ALPHA
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.plain_text import commas, counted
from sparsedepth.words.scaling import at_depth, drift_word, flops_text, multiplier_text
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.recipe.judge import Judgement
    from sparsedepth.recipe.judge_table import TableRuns
    from sparsedepth.recipe.judge_target import TargetJudgement
    from sparsedepth.store.query_result import QueryResult

OPTIONAL = ("p_adjusted", "multiplier_lo multiplier_hi", "diverged", "detectable")
"""Columns that a narrow terminal has no room for, the first to go first."""


def judgement_lines(found: "Judgement") -> Iterator[str]:
    """What was read, the table, and the answer."""
    yield f"{_read(found)}; baseline: {found.baseline!r}"
    yield f"used: {found.used}"
    if found.ladder is not None:
        yield from multiplier_lines(found.table, found.currency)
        return
    records = found.table.records()
    by = "paired by seed" if found.is_paired else "seeds taken as independent"
    yield f"lower is better; effect: variant minus baseline, with its 95% interval, {by}"
    empty = {"baseline"} if any(record["diverged"] for record in records) else {"baseline", "diverged"}
    yield fitted_table(found.table.of_columns({*found.table.columns} - empty), OPTIONAL).text
    if found.luck and found.luck[0] > 1:
        yield f"lo, hi: of each variant by itself; 'better', 'worse': p adjusted over the variants, below {ALPHA}"
        yield "The lowest of {} equal variants would seem better by {:.2g}, by luck alone.".format(*found.luck)
    better, worse = ([each for each in records if each["verdict"] == word] for word in ("better", "worse"))
    if better:
        others = f", and {counted(len(better) - 1, 'other')}" if len(better) > 1 else ""
        yield f"Better: {_gain(better[0], found.currency)}{others}."
    elif worse:
        rest = "; not shown: the others" if len(worse) < len(records) else ""
        yield f"Worse: {commas(repr(record['variant']) for record in worse)}{rest}."
    else:
        yield f"Not shown: no variant is better than {found.baseline!r} beyond luck{_advice(records)}."


def _read(found: "Judgement | TargetJudgement") -> str:
    return f"read: {commas(f'{name} {column!r}' for name, column in found.columns.items())}"


def target_lines(found: "TargetJudgement") -> list[str]:
    """What was read, the table, and the answer for each variant."""
    shown = found.table.of_columns({*found.table.columns} - {"target", "budget"})
    return [
        _read(found),
        f"used: {found.used}",
        f"mean loss below {found.target:g}? one-sided t-test over seeds, shown at p < 0.01, as rules of records ask",
        fitted_table(shown, ("p_adjusted",)).text,
        *(f"{record['variant']!r}: {_target_text(record)}." for record in found.table.records()),
    ]


def _target_text(record: Row) -> str:
    if record["verdict"] == "below":
        return f"below {record['target']:g} (p {record['p_adjusted']:.2g}, {record['seeds']} seeds)"
    if record["p_adjusted"] is None:
        return "not shown: a test needs two seeds or more that differ"
    if record["mean"] >= record["target"]:
        return f"not shown: its mean, {record['mean']:.5g}, is not below {record['target']:g}"
    wanted = f"; {record['seeds_wanted']} seeds would show it" if record["seeds_wanted"] else ""
    return f"not shown (p {record['p_adjusted']:.2g}, {record['seeds']} seeds){wanted}"


LADDER_SHOWN = (
    "n_layers",
    "variant",
    "multiplier",
    "lo",
    "hi",
    "p_adjusted",
    "p_drift",
    "detectable",
    "verdict",
    "budgets",
)


def multiplier_lines(table: "QueryResult", of: str = "compute") -> list[str]:
    """The table of multipliers of a ladder, and the answer for each variant, a sentence each; `of`: of what."""
    records = table.records()
    better = [record["variant"] for record in records if record["verdict"] == "better"]
    answer = "Not shown: no variant is better beyond noise."
    if better:
        answer = f"Better: {commas(map(repr, better))}."
    elif all(record["verdict"] == "worse" for record in records):
        answer = "Worse: every variant."
    return [
        f"multiplier: by what factor the baseline would need more {of} for the same loss, by one law for both at all "
        "budgets; 95% intervals of the runs about that law and of its form; p_adjusted: of worth and drift together, "
        "over variants",
        fitted_table(table.of_columns(LADDER_SHOWN).without_empty(), ("p_drift", "detectable")).text,
        *(f"{at_depth(record)}{record['variant']!r}: {ladder_sentence(record, of)}." for record in records),
        answer,
    ]


def ladder_sentence(record: Row, of: str) -> str:
    """'worth 1.15 times the compute (1.08 to 1.22) at every size; extrapolated: 1.16 (1.02 to 1.31) at 2.6e19'"""
    beyond = f"extrapolated: {place_text(record, 'beyond')}" if record["beyond"] else ""
    return "; ".join(filter(None, (worth_text(record, of), beyond, time_text(record))))


def worth_text(record: Row, of: str = "compute") -> str:
    if record["multiplier"] is None:
        return f"withheld: {record['reason']}"
    if record["lo"] is None:
        return f"about {record['multiplier']:.3g} times the {of}; not shown: {record['reason']}"
    if record["p_drift"] is not None and record["p_drift"] < ALPHA:
        text = f"{drift_word(record['at_smallest'], record['at_largest'])}: {ends_text(record)}"
    else:
        text = multiplier_text(record["multiplier"], record["lo"], record["hi"], f" times the {of}")
        text = f"worth {text} at every size"
    if record["verdict"] == "not shown":
        text = f"not shown: {text}; a gain of {record['detectable']:.3g} times would probably have been seen"
    return text


def time_text(record: Row) -> str:
    if record["time_multiplier"] is None:
        return ""
    return multiplier_text(record["time_multiplier"], record["time_lo"], record["time_hi"], " times the time")


def ends_text(record: Row) -> str:
    return f"{place_text(record, 'at_smallest')}, {place_text(record, 'at_largest')}"


def place_text(record: Row, name: str) -> str:
    """'1.16 (1.02 to 1.31) at 2.6e19'"""
    text = multiplier_text(record[name], record[f"{name}_lo"], record[f"{name}_hi"])
    budget = record[f"{name.removeprefix('at_')}_budget"]
    return f"{text} at {flops_text(budget)}"


def _gain(record: Row, of: str) -> str:
    text = f"{record['variant']!r} by {-record['effect']:.3g} ({-record['hi']:.3g} to {-record['lo']:.3g})"
    if record["multiplier"] is not None:
        ends = record["multiplier_lo"], record["multiplier_hi"]
        text += f", worth {multiplier_text(record['multiplier'], *ends, f' times the {of}')}"
    return text + (f", {record['time_multiplier']:.3g} times the time" if record["time_multiplier"] else "")


def _advice(records: Sequence[Row]) -> str:
    effect, wanted, name = (records[0][column] for column in ("effect", "seeds_wanted", "variant"))
    seen = [record["detectable"] for record in records if record["detectable"] is not None]
    if not seen:
        return f"; run each with {wanted} seeds or more"
    text = f"; a gain smaller than about {max(seen):.2g} would probably not have been seen"
    if effect is None or effect >= 0 or wanted is None:
        return text
    return f"{text}. {wanted} seeds of each would show an effect as large as that of {name!r}"


def where_option(column: str, relation: str, value: str | float) -> str:
    """'--where "name != 'old'"', for a shell."""
    name = column if column.isidentifier() else f"`{column}`"
    literal = "'{}'".format(value.replace("'", "''")) if isinstance(value, str) else repr(value)
    condition = f"{name} {relation} {literal}"
    needs_quotes = re.search(r'[`$"\\]', condition)
    return f"--where {shlex.quote(condition)}" if needs_quotes else f'--where "{condition}"'


def used_text(table: "TableRuns", n_used: int, others: str, is_ladder: bool) -> str:
    """'10 of 12 runs, 2 without a loss', and what was done to names and values. `others`: why some with a loss are not
    used."""
    n_runs, n_known = len(table.runs), int(table.runs["loss"].count())
    without = "without a loss"
    if is_ladder:  # where a law has no point
        lost = table.runs[table.runs["loss"].isna()].head(4)
        at = zip(lost["variant"], lost["budget"], strict=True)
        without += f": {commas(f'{name!r} at {flops_text(C)}' for name, C in at)}"
    rest = {without: n_runs - n_known, others: n_known - n_used}
    parts = [f"{n_used} of {counted(n_runs, 'run')}", *(f"{n} {why}" for why, n in rest.items() if n)]
    ladder = ["a ladder: each row is taken as a run of its own, at its budget"] if is_ladder else []
    return "; ".join([commas(parts), *ladder, *table.notes])
