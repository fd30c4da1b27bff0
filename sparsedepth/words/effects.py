"""Words of effects: sizes with their units and intervals, settings, verdicts that were withheld, and the table."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sparsedepth import quantities
from sparsedepth.quantities.levels import ALPHA, POWER
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.differences import baseline_text
from sparsedepth.words.plain_text import commas, counted, wrapped
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.effects.cells import Cells
    from sparsedepth.effects.equal_loss import AtEqualLoss
    from sparsedepth.effects.listing import Listing
    from sparsedepth.effects.verdict import Side

OPTIONAL = ("diverged", "basis", "seeds", "flops", "lr", "detectable")
"""Columns that a narrow terminal has no room for, the first to go first."""
REASONS_SHOWN = 6

# A row


def size_text(value: float, unit: str, sign: str = "", times: str = "×") -> str:
    """A difference to three digits, or the ratio whose logarithm it is."""
    return f"{times}{math.exp(value):.3g}" if unit == "ln ratio" else f"{value:{sign}.3g}"


def unit_text(unit: str) -> str:
    """' nat/token'; '' of a number without a unit."""
    return "" if unit in ("ln ratio", "1", "") else f" {unit}"


def in_brackets(unit: str) -> str:
    """' [nat/token]'; '' of a number without a unit."""
    return "" if unit in ("1", "") else f" [{unit}]"


def interval_text(effect: Row, name: str = "", more: str = "") -> str:
    """'-0.0644 nat/token (-0.0853 to -0.042)': estimate, unit and interval of a row."""
    unit = effect["unit"]
    named = f"{size_text(effect['estimate'], unit, '+')}{unit_text(unit)}"
    if not (_is_known(effect["lo"]) and _is_known(effect["hi"])):
        return f"{named} (no interval)"
    return f"{named} ({name}{size_text(effect['lo'], unit, '+')} to {size_text(effect['hi'], unit, '+')}{more})"


def fitted_text(value: float | None, unit: str) -> str | None:
    """A fitted value to four digits, from its logarithm where the unit is that of ratios."""
    if value is None or math.isnan(value):
        return None
    return f"{math.exp(value) if unit == 'ln ratio' else value:.4g}"


def _is_known(value: float | None) -> bool:
    """Neither NULL nor NaN."""
    return value is not None and value == value


def effect_sentence(row: Row) -> str:
    """'n_layers=24, depth_scale=lns: val_loss higher, +0.034 nat/token (95% interval +0.018 to +0.051, 5 seeds)'."""
    size = interval_text(row, "95% interval ", f", {counted(int(row['seeds']), 'seed')}")
    return f"n_layers={int(row['n_layers'])}, {row['setting']}: {row['outcome']} {row['verdict']}, {size}"


def second_look_lines(row: Row) -> Iterator[str]:
    """'second look: n_experts=8 at n_layers=24 is -0.069 without seed 5 (fewer runs: lower; with it -0.0944, lower)';
    and runs that were added after a look."""
    if row.get("without"):
        without, size = (size_text(row[name], row["unit"], "+", "x") for name in ("estimate_without", "estimate"))
        told = f"(fewer runs: {row['verdict_without']}; with it {size}, {row['verdict']})"
        yield f"second look: {_place(row)} is {without} without {row['without']} {told}"
    if row.get("later"):
        added = f"{counted(int(row['later']), 'run')} of {_place(row)} or of what it is compared with"
        yield f"second look: {added} began after all others had ended: added or re-tuned after a look, or after a pause"


def lr_text(row: Row) -> str | None:
    """'0.003 -> 0.006', the baseline's first, where the sides differ."""
    known = [f"{row[name]:g}" for name in ("lr_baseline", "lr") if _is_known(row[name])]
    return " -> ".join(dict.fromkeys(known)) or None


def setting_text(row: Row) -> str:
    """'depth_scale=lns beside weight_decay=1': the question of a row."""
    setting = row["setting"]
    if row["question"] == "beside":
        return f"{setting} beside {row['context']}"
    if row["question"] == "interaction":
        return f"{setting} with {row['context']}, minus their sum"
    if row["question"].endswith(" slope"):
        others = f" (with {row['context']})" if row["context"] else ""
        return f"{setting}: per doubling of {row['question'].removesuffix(' slope')}{others}"
    return setting


def title(outcome: str, unit: str) -> str:
    """'val_loss [nat/token], lower is better'."""
    better = quantities.IN_RUNS[outcome].better
    bracket = in_brackets("ratio" if unit == "ln ratio" else unit)
    return f"{outcome}{bracket}{f', {better}er is better' if better else ''}"


def compared_at(field: str, at_equal_lr: bool, single: bool = False) -> str:
    """', each at its own tuned lr', or ', both at equal lr'; '' where nothing was tuned. `single`: some were run at
    one lr alone."""
    if not field:
        return ""
    if at_equal_lr:
        return f", both at equal {field} (a verdict holds at that of each side)"
    return f", each at its own tuned {field}{', or both at the one that was run' if single else ''}"


def own_lr_line(row: Row) -> str:
    """'depth_scale=lns at n_layers=12: x2.82 with each side at its own lr (0.003 -> 0.012)', of another sign there."""
    size = size_text(row["estimate_own_lr"], row["unit"], "+", "x")
    return f"{row['setting']} at n_layers={row['n_layers']}: {size} with each side at its own lr ({lr_text(row)})"


def carried_line(field: str, shapes: Sequence[str], regrets: Sequence[str]) -> str:
    """Where a carried value was chosen, and whether the error of carrying it is in the intervals."""
    where = f"{field} was chosen at {'; '.join(shapes)} and carried to the other shapes"
    if not regrets:
        return f"{where}: intervals there lack the error of carrying, which no sweep has measured (`scaling carry`)"
    size = " or ".join(f"{float(regret):g}" for regret in regrets)
    return f"{where}: intervals there have the regret that a sweep has measured, {size} nat/token a side"


# Why a verdict, an interval or an effect is missing


def unmeasured(outcome: str) -> str:
    return f"{outcome} was measured in no run of this setting"


def all_diverged(n_runs: int) -> str:
    """Why a sweep has no answer, and what gives one."""
    return f"all {counted(n_runs, 'complete run')} diverged: run them again with a lower lr"


def measured_nowhere(outcome: str) -> str:
    """'val_loss was measured in no finished run (measure: loss)'."""
    measure = quantities.IN_RUNS[outcome].measure if outcome in quantities.IN_RUNS else ""
    return f"{outcome} was measured in no finished run{f' (measure: {measure})' * bool(measure)}"


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
        or_budgets = "" if where else ", or three budgets (effects --as speedup)"
        return f"only one seed in common{where}: an interval needs two{or_budgets}"
    return f"the runs of different seeds have equal values{where}: there is no noise to judge by"


def untuned_line(lr: float | None) -> str:
    """'' where lr was tuned, or differs."""
    if lr is None:
        return ""
    return f"the lr was not tuned: all runs used {lr:g}, and what needs another looks worse than it is"


def no_equal_lr(field: str, any_value: bool) -> str:
    """Why two sides are not compared at equal lr."""
    return f"no seed was run on both sides at one {field}" if any_value else f"no {field} was run on both sides"


def at_lrs(effects: Sequence[float], at: Sequence[str], unit: str) -> str:
    """'at lr 0.001 the effect is x1.49, at lr 0.004 x0.67': why lr decides."""
    sizes = [f"at {where} {size_text(effect, unit, '+', 'x')}" for effect, where in zip(effects, at, strict=True)]
    return commas(sizes).replace(f"at {at[0]} ", f"at {at[0]} the effect is ", 1)


def beyond(side: "Side") -> str:
    """Why a side may have lost for its lr alone."""
    of = f"{side.name}'" if side.name.endswith("s") else f"{side.name}'s"
    if side.edge:
        return f"{of} {side.edge} tried: its optimum may lie beyond"
    return f"{of} optimum probably lies beyond the values tried"


def more_diverged(winner: "Side", loser: "Side") -> str:
    return f"{winner.diverged} runs of {winner.name} diverged, {loser.diverged} of {loser.name}"


# The cells


def budget_text(cells: "Cells") -> str:
    """Which of several budgets the cells are of, or mix, and what was left out; '' where equal runs are compared."""
    n_left_out = len(cells.other_scoring)
    parts = {
        "several train_tokens were run: effects at that of most settings "
        "(effects --as speedup has all)": cells.is_one_budget,
        "runs of a setting differ in train_flops, and are averaged, as they have no train_tokens: import train_tokens, "
        "or one budget (map key where)": cells.mixes_budgets,
        f"{counted(n_left_out, 'run')} scored in another way than most are left out": n_left_out,
    }
    return "; ".join(text for text, is_so in parts.items() if is_so)


def nothing_text(cells: "Cells") -> str:
    """Why there is no effect to show."""
    if cells.rows.empty:
        return "no trained run has finished: there is no effect to show"
    if cells.settings is None:
        return f"only tuning runs are complete so far ({cells.n_tuning}): there is no result to compare"
    if cells.rows["diverged"].all():
        return all_diverged(len(cells.rows))
    if not cells.is_measured:
        return measured_nowhere(cells.outcome)
    left_out = budget_text(cells)
    left_out = f" ({left_out})" if left_out else ""
    if cells.rows["n_layers"].nunique() > 1:
        return f"complete runs differ in depth alone, which query --ask depth compares: no setting was varied{left_out}"
    return f"all complete runs have one configuration: there is nothing to compare{left_out}"


# The table


def effects_text(listed: "Listing") -> str:
    """The effects of a frame for a terminal: a table, what its columns mean, and what was withheld."""
    cells = listed.cells
    if not listed.table.rows and not listed.n_hidden:
        return nothing_text(cells)
    over = "over" if cells.unit == "ln ratio" else "minus"
    compared = compared_at(cells.field, cells.at_equal_lr, listed.is_one_lr_compared)
    head = [f"{title(cells.outcome, cells.unit)}; effect: setting {over} baseline, as fitted{compared}"]
    head += [baseline_text(cells.settings) if cells.settings else "", budget_text(cells)]
    optional = [cells.field or name if name == "lr" else name for name in OPTIONAL]
    table = fitted_table(listed.table, optional).text
    return f"{wrapped(filter(None, head))}{table}\n{wrapped(_notes(listed))}".rstrip("\n")


def _notes(listed: "Listing") -> Iterator[str]:
    """What the columns mean, what would narrow the intervals, and why verdicts were withheld."""
    cells = listed.cells
    withheld = listed.withheld
    parts = f" of seeds and of the choice of {cells.field}" if cells.is_tuned else " over seeds"
    yield (
        f"lo, hi: 95% interval{parts}; 'lower', 'higher': adjusted p below {ALPHA} over the settings of a depth; "
        f"detectable: the effect that would have been seen ({POWER:.0%} power)"
    )
    if any("preset=" in setting for setting in cells.changes):
        yield "preset: a remedy with its authors' settings; `sparsedepth presets NAME` prints its fields"
    yield from filter(None, [untuned_line(cells.shared_lr)])
    yield from map(own_lr_line, listed.turned)
    if listed.carried_from:
        yield carried_line(cells.field, listed.carried_from, listed.carry_regrets)
    if listed.half_widths:
        halves = (
            f"{depth} layers: seeds ±{seeds:.2g}, choice of {cells.field} ±{lr:.2g} "
            f"({'more tuning_seeds' if lr > seeds else 'more seeds'} narrow it most)"
            for depth, seeds, lr in listed.half_widths
        )
        yield f"half-widths at {'; '.join(halves)}"
    yield from (f"{'; '.join(map(_place, rows))}: {reason}" for reason, rows in [*withheld.items()][:REASONS_SHOWN])
    if len(withheld) > REASONS_SHOWN:
        yield f"{len(withheld) - REASONS_SHOWN} more reasons: column reason of --format csv"
    if len(cells.tuned) > 1:
        also = " and ".join(cells.tuned[1:])
        yield f"the curve and its error are in {cells.field} alone: {also} at the value that tuning chose"
    if listed.n_hidden:
        yield f"{counted(listed.n_hidden, 'effect')} not shown to change with {cells.field}: listed by --detail"


def _place(row: Row) -> str:
    """'depth_scale=lns at n_layers=4'"""
    is_whole = row["n_layers"] is None or row["question"] == "depth"
    return setting_text(row) if is_whole else f"{setting_text(row)} at n_layers={row['n_layers']}"


def equal_loss_line(found: "AtEqualLoss") -> str:
    """'at equal val_loss, 12 layers (within a setting -5.2 layers per nat/token, r -0.71): depth_scale=lns +0.31 (-0.2
    to 0.8)'"""
    effects = [
        f"{setting} {middle:+.2g} ({middle - half:+.2g} to {middle + half:+.2g})"
        for setting, middle, half in found.effects
    ]
    return (
        f"at equal {found.loss}, {found.n_layers} layers (within a setting {found.within.slope:+.2g} layers per "
        f"nat/token, r {found.within.r:+.2f}): {'; '.join(effects)}"
    )


def swaps_line(outcome: str, unlike: Iterable[tuple[int, list[int]]]) -> str:
    """'permutation_score is of 32 and 66 swaps at 12 layers: ...'; '' without depths of `unlike` numbers."""
    where = commas(f"{' and '.join(map(str, numbers))} swaps at {depth} layers" for depth, numbers in unlike)
    return f"{outcome} is of {where}: fewer widen a run's interval, and its noise" if where else ""
