"""Words of effects: sizes with their units and intervals, settings, verdicts that were withheld, and the table."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparsedepth import quantities
from sparsedepth.words.plain_text import counted

if TYPE_CHECKING:
    from sparsedepth.effects.cells import Cells
    from sparsedepth.effects.verdict import Side


# A row


def size_text(value: float, unit: str, sign: str = "", times: str = "×") -> str:
    """A difference to three digits, or the ratio whose logarithm it is."""
    return f"{times}{math.exp(value):.3g}" if unit == "ln ratio" else f"{value:{sign}.3g}"


def unit_text(unit: str) -> str:
    """' nat/token'; '' of a number without a unit."""
    return "" if unit in ("ln ratio", "1", "") else f" {unit}"


def interval_text(effect: Mapping[str, Any], name: str = "", more: str = "") -> str:
    """'-0.0644 nat/token (-0.0853 to -0.042)': estimate, unit and interval of a row."""
    unit = effect["unit"]
    named = f"{size_text(effect['estimate'], unit, '+')}{unit_text(unit)}"
    if not (_is_known(effect["lo"]) and _is_known(effect["hi"])):
        return f"{named} (no interval)"
    return f"{named} ({name}{size_text(effect['lo'], unit, '+')} to {size_text(effect['hi'], unit, '+')}{more})"


def _is_known(value: float | None) -> bool:
    """Neither NULL nor NaN."""
    return value is not None and value == value


def effect_sentence(row: Mapping[str, Any]) -> str:
    """'n_layers=24, depth_scale=lns: val_loss higher, +0.034 nat/token (95% interval +0.018 to +0.051, 5 seeds)'."""
    size = interval_text(row, "95% interval ", f", {counted(int(row['seeds']), 'seed')}")
    return f"n_layers={int(row['n_layers'])}, {row['setting']}: {row['outcome']} {row['verdict']}, {size}"


def lr_text(row: Mapping[str, Any]) -> str | None:
    """'0.003 -> 0.006', the baseline's first, where the sides differ."""
    known = [f"{row[name]:g}" for name in ("lr_baseline", "lr") if _is_known(row[name])]
    return " -> ".join(dict.fromkeys(known)) or None


def setting_text(row: Mapping[str, Any]) -> str:
    """'depth_scale=lns beside weight_decay=1': the question of a row."""
    setting = row["setting"]
    if row["question"] == "beside":
        return f"{setting} beside {row['context']}"
    if row["question"] == "interaction":
        return f"{setting} with {row['context']}: more than the sum"
    if row["question"].endswith(" slope"):
        others = f" (with {row['context']})" if row["context"] else ""
        return f"{setting}: per doubling of {row['question'].removesuffix(' slope')}{others}"
    return setting


def title(outcome: str, unit: str) -> str:
    """'val_loss [nat/token], lower is better'."""
    better = quantities.IN_RUNS[outcome].better
    bracket = "" if unit in ("", "1") else f" [{'ratio' if unit == 'ln ratio' else unit}]"
    return f"{outcome}{bracket}{f', {better}er is better' if better in ('low', 'high') else ''}"


# Why a verdict, an interval or an effect is missing


def unmeasured(outcome: str) -> str:
    return f"{outcome} was measured in no run of this setting"


def no_baseline(outcome: str, was_run: bool, other_scoring: bool) -> str:
    """Why no run of the baseline is compared at a depth."""
    if was_run:
        return f"the baseline has no {outcome} at this depth"
    if other_scoring:
        return "the baseline was scored in another way than most runs at this depth; name fewer folders"
    return "the baseline was not run at this depth in these folders"


def no_interval(own: int, other: int, common: int, where: str = "") -> str:
    """Why two sides have no interval, from their seeds and those in common; `where`: ' at lr 0.01'."""
    if not own or not other:
        return f"{'the baseline' if own else 'the setting'} was not run{where}, or its runs have no value"
    if not common:
        return f"the setting and the baseline have no seed in common{where}"
    if common == 1:
        return f"one seed in common{where}: no interval without a second"
    return f"the runs of different seeds have equal values{where}: there is no noise to judge by"


def beyond(side: "Side") -> str:
    """Why a side may have lost for its lr alone."""
    if side.edge:
        return f"{side.name}'s {side.lr} is the {side.edge} tried: its optimum may lie beyond"
    return f"{side.name}'s optimum probably lies beyond the values tried"


def more_diverged(winner: "Side", loser: "Side") -> str:
    return f"{winner.diverged} runs of {winner.name} diverged, {loser.diverged} of {loser.name}"


# The cells


def budget_text(cells: "Cells") -> str:
    """Which of several budgets the cells are of, and what was left out; '' where all runs are compared."""
    parts = []
    if cells.is_one_budget:
        parts.append("several train_tokens were run: effects at that of most settings (--as speedup has all)")
    if n := len(cells.other_scoring):
        parts.append(f"{counted(n, 'run')} scored in another way than most are left out")
    return "; ".join(parts)


def nothing_text(cells: "Cells") -> str:
    """Why there is no effect to show."""
    if cells.rows.empty:
        return "no trained run has finished: there is no effect to show"
    if cells.settings is None:
        return f"only tuning runs are complete so far ({cells.n_tuning}): there is no result to compare"
    if not cells.is_measured:
        return f"{cells.outcome} was measured in no finished run"
    left_out = budget_text(cells)
    left_out = f" ({left_out})" if left_out else ""
    return f"all results have one configuration: there is no effect to show{left_out}; run a sweep"
