"""Words of a judgement on a table of runs: what was read and used, and the answer in a sentence or two."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparsedepth.quantities.quantity import Row
from sparsedepth.words.plain_text import counted
from sparsedepth.words.scaling import multiplier_text
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.recipe.judge import Judgement

OPTIONAL = ("p_adjusted", "multiplier_lo multiplier_hi", "diverged", "detectable")
"""Columns that a narrow terminal has no room for, the first to go first."""


def judgement_lines(found: "Judgement") -> list[str]:
    """What was read, the table, and the answer."""
    records = found.table.records()
    read = ", ".join(f"{name} {column!r}" for name, column in found.columns.items())
    by = "paired by seed" if found.is_paired else "seeds taken as independent"
    empty = {"baseline", *([] if any(record["diverged"] for record in records) else ["diverged"])}
    lines = [
        f"read: {read}; baseline: {found.baseline!r}",
        f"used: {found.used}",
        f"lower is better; effect: variant minus baseline, with its 95% interval, {by}",
        fitted_table(found.table.of_columns({*found.table.columns} - empty), OPTIONAL).text,
    ]
    if found.luck and found.luck[0] > 1:
        lines.append(
            f"The lowest of {found.luck[0]} equal variants would seem better by {found.luck[1]:.2g}, by luck alone."
        )
    better, worse = ([each for each in records if each["verdict"] == word] for word in ("better", "worse"))
    if better:
        others = f", and {counted(len(better) - 1, 'other')}" if len(better) > 1 else ""
        return [*lines, f"Better: {_gain(better[0])}{others}."]
    if worse:
        rest = "; not shown: the others" if len(worse) < len(records) else ""
        return [*lines, f"Worse: {', '.join(repr(record['variant']) for record in worse)}{rest}."]
    return [*lines, f"Not shown: no variant is better than {found.baseline!r} beyond luck{_advice(records)}."]


def _gain(record: Row) -> str:
    text = f"{record['variant']!r} by {-record['effect']:.3g} ({-record['hi']:.3g} to {-record['lo']:.3g})"
    if record["multiplier"] is not None:
        ends = record["multiplier_lo"], record["multiplier_hi"]
        text += f", worth {multiplier_text(record['multiplier'], *ends, ' times the compute')}"
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


def used_text(n_used: int, n_runs: int, rest: Mapping[str, int], is_ladder: bool, notes: Sequence[str]) -> str:
    """'10 of 12 runs, 2 without a loss'. `rest`: why -> how many others; `notes`: what was done to names and values."""
    parts = [f"{n_used} of {counted(n_runs, 'run')}", *(f"{n} {why}" for why, n in rest.items() if n)]
    ladder = (
        ["a ladder: each row is taken as a run of its own, as the model grows with the budget"] if is_ladder else []
    )
    return "; ".join([", ".join(parts), *ladder, *notes])
