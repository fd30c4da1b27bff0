"""Effects, depth slopes and links of the chain as tables for a terminal: the default output of `sparsedepth effects`.

`text_report` has the same in sentences, with the full evidence (--detail).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.plain_text import counted
from sparsedepth.effects.all_effects import measure_effects, measure_slopes, relevant_columns
from sparsedepth.effects.causal_evidence import LinkEvidence, chain_evidence
from sparsedepth.effects.chain import MIN_UNITS, cautions
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.depth_slope import SlopeContrast
from sparsedepth.effects.intervals import ALPHA, POWER, Judged
from sparsedepth.effects.pairs import EQUAL_LR
from sparsedepth.effects.sentences import UNEVEN, ratio_text, size_text
from sparsedepth.effects.setting_interactions import SettingInteraction, setting_interactions
from sparsedepth.effects.tuning_error import LOSSES
from sparsedepth.store import terminal
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows

SIZE = ("effect", "lo", "hi", "detectable")

CONFOUNDED = "; intervention 'confounded': not shown to move only the cause"

LEGEND = {
    "lo": "lo, hi: 95% interval over seeds",
    "verdict": "verdict '-': not significant, since the interval contains 0, or the effect is within seed noise ('- "
    f"noise'), or it does not survive Holm's correction at {ALPHA} ('- Holm')",
    "detectable": f"detectable: the effect that such a sweep detects with {POWER:.0%} power",
}
"""Column -> its explanation, for a table that has it."""
NO_INTERVAL = {"few seeds": "too few for an interval", "no spread": "equal in every seed, so without an interval"}
"""Verdict -> its explanation."""
RATIO_NOTE = " (a ratio above it, or below its inverse)"


def knob_lines(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> Iterator[str]:
    """The tables of effects, of interactions between settings, and of depth slopes, where there are any."""
    yield effects_text(measure_effects(runs, outcome, knob))
    interactions = setting_interactions(relevant_columns(runs, outcome), outcome, knob)
    if interactions:
        yield f"\n{interactions_text(interactions)}"
    slopes = measure_slopes(runs, outcome, knob)
    if slopes:
        yield f"\n{slopes_text(slopes)}"


def effects_text(effects: Sequence[Contrast], width: int | None = None, every_basis: bool = False) -> str:
    """A row per setting and depth, on the first basis that has pairs (equal tokens first); with `every_basis` one per
    set of pairs. Below it, the verdicts that uneven tuning withholds, with the reason."""
    by_setting: dict[tuple[int | None, str], dict[tuple[str, ...], Contrast]] = {}
    for contrast in effects:
        if contrast.has_pairs:
            by_setting.setdefault(contrast.key, {}).setdefault(contrast.run_ids, contrast)
    if not by_setting:
        return "no two runs match on any basis"
    contrasts = [c for by_runs in by_setting.values() for c in list(by_runs.values())[: None if every_basis else 1]]
    contrasts.sort(key=lambda contrast: contrast.n_layers or math.inf)  # the effect of depth itself comes last
    first, bases = contrasts[0], {contrast.basis for contrast in contrasts}
    names = ("n_layers", *SIZE, "equal", "seeds", "diverged", "flops", "verdict", "setting")
    rows = [
        (
            contrast.n_layers or "all",
            *effect_cells(contrast),
            contrast.basis if len(bases) > 1 else None,
            contrast.n_seeds,
            contrast.n_diverged or None,
            ratio_cell(contrast.ratios["flops"]),
            verdict_cell(contrast),
            short_setting(contrast.setting),
        )
        for contrast in contrasts
    ]
    matched = f"in pairs {f'at equal {first.basis}' if first.basis else 'with all else equal'}"
    if len(bases) > 1:
        matched = "matched on the quantity in column 'equal'"
    tuned = tuned_text(contrasts)
    if tuned and first.outcome not in LOSSES:
        tuned += f", so it includes the effect of lr on {first.outcome} (at equal lr: --detail)"
    accuracy = " (accuracy: --by val_accuracy)" if first.unit == "nat/image" else ""
    head = (
        f"{title(first.outcome, first.unit)}{accuracy}; effect: setting {minus(first.unit)} baseline, "
        f"{matched}{averaging_text(contrasts)}{tuned}",
        baselines_text(contrasts),
    )
    legend = LEGEND | {"flops": "flops: training FLOPs relative to the baseline"}
    if _is_ratio(first.unit):
        legend["detectable"] += RATIO_NOTE
    cells = {verdict_cell(contrast) for contrast in contrasts}
    legend["verdict"] += "".join(f"; '{cell}': {text}" for cell, text in NO_INTERVAL.items() if cell in cells)
    notes = tuning_notes((f"{c.setting}{f' at n_layers={c.n_layers}' if c.n_layers else ''}", c) for c in contrasts)
    notes += _equal_lr_notes(contrasts, effects)
    return table_page(head, names, rows, ("seeds", "equal", "flops", "detectable"), notes, width, legend)


def _equal_lr_notes(contrasts: Iterable[Contrast], effects: Iterable[Contrast]) -> list[str]:
    """A line with the settings that are 'lower' or 'higher' at the baseline's lr but not at tuned values."""
    at_equal_lr = {c.key: c for c in effects if c.basis == EQUAL_LR}
    by_setting: dict[str, list[str]] = {}
    for contrast in contrasts:
        other = at_equal_lr.get(contrast.key)
        if other and other.verdict not in (contrast.verdict, "not distinguishable"):
            size = size_text(other.effect.mean or 0.0, other.unit, "+")
            depth = f" at n_layers={contrast.n_layers}" if contrast.n_layers else ""
            by_setting.setdefault(contrast.setting, []).append(f"{other.verdict} ({size}){depth}")
    verdicts = "; ".join(f"{setting} {', '.join(texts)}" for setting, texts in by_setting.items())
    head = "different verdicts with both sides at the baseline's lr, without the error of choosing it "
    head += "(intervals: --detail)"
    return [f"{head}: {verdicts}"] if verdicts else []


def interactions_text(interactions: Sequence[SettingInteraction]) -> str:
    """A row per depth and combination: the setting's effect combined with the others minus its effect alone."""
    names = ("n_layers", "difference", *SIZE[1:], "seeds", "verdict", "setting")
    rows = [
        (
            interaction.n_layers,
            *effect_cells(interaction),
            len(interaction.by_seed),
            verdict_cell(interaction),
            interaction.text,
        )
        for interaction in interactions
    ]
    head = (
        f"Does an effect on {interactions[0].outcome} depend on the other settings? difference: a setting's effect "
        f"combined with other settings {minus(interactions[0].unit)} its effect alone, over the seeds that have both; "
        "both effects: --detail",
    )
    notes = tuning_notes(
        (f"{interaction.text} at n_layers={interaction.n_layers}", interaction) for interaction in interactions
    )
    return table_page(head, names, rows, ("seeds", "detectable"), notes)


def slopes_text(slopes: Sequence[SlopeContrast]) -> str:
    """A row per setting: the outcome's slope in depth at the setting, at the baseline, and their difference."""
    change = "ratio" if _is_ratio(slopes[0].unit) else "difference"
    names = ("slope", "baseline", change, *SIZE[1:], "seeds", "verdict", "setting")
    rows = [
        (
            display_value(slope.at_setting.slope.mean, slope.unit),
            display_value(slope.at_baseline.slope.mean, slope.unit),
            *effect_cells(slope),
            slope.n_seeds,
            verdict_cell(slope),
            short_setting(slope.at_setting.setting),
        )
        for slope in slopes
    ]
    head = (
        f"Does {slopes[0].outcome} change differently with depth? slope: change per doubling of n_layers; {change}: "
        f"setting {minus(slopes[0].unit)} baseline",
    )
    notes = tuning_notes((slope.at_setting.setting, slope) for slope in slopes)
    return table_page(head, names, rows, ("seeds", "detectable", "slope baseline"), notes)


def chain_lines(runs: pd.DataFrame) -> Iterator[str]:
    """A row per link from sparsity to loss: correlation within depth, skill at held-out depths, the result of
    interventions, and the verdict."""
    chain = chain_evidence(runs)
    if not chain:
        yield "no two quantities of the chain were measured in the same runs"
        return
    names = ("cause", "effect", "rho", "lo", "hi", "skill", "intervention", "verdict")
    rows = []
    for link in chain:
        within, skill = link.within, link.skill
        insignificant = "too few" if within.lo is None else "-"
        verdict = insignificant if link.verdict == "not distinguishable" else link.verdict
        row = (link.cause, link.effect, within.rho, within.lo, within.hi, skill.value)
        rows.append((*row, _intervention_cell(link), verdict))
    n_units = chain[0].within.n_units
    interval = f"no interval: {n_units} combinations of settings, {MIN_UNITS} are needed"
    if any(link.within.lo is not None for link in chain):
        interval = "lo, hi: 95% interval over combinations of settings"
    is_confounded = any(_intervention_cell(link) == "confounded" for link in chain)
    few = ", 'too few' no interval" if any(row[-1] == "too few" for row in rows) else ""
    head = (
        f"The chain from sparsity to loss: {counted(chain[0].within.n_runs, 'run')} of "
        f"{counted(n_units, 'combination')} of settings, each with all its depths and seeds",
        f"rho: rank correlation within depth ({interval}); skill: prediction of held-out depths, 1 perfect, 0 no "
        f"better than their mean{CONFOUNDED if is_confounded else ''}; verdict: associated (rho significant after "
        "Holm's correction), predicts (and skill above 0), causes (an intervention that moved only the cause moved the "
        f"effect), '-' not distinguishable from 0{few}",
    )
    yield table_page(head, names, rows, ("skill",), cautions(result_rows(runs)))


def _intervention_cell(link: LinkEvidence) -> str:
    if not link.interventions:
        return "none"
    if any(intervention.confirms for intervention in link.interventions):
        return "confirms"
    return "no effect" if any(intervention.is_alone for intervention in link.interventions) else "confounded"


def table_page(
    head: Iterable[str],
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    optional: Sequence[str],
    notes: Iterable[str],
    width: int | None = None,
    legend: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Head, legend, table and notes. A narrow terminal drops `optional` columns, and their lines in the legend."""
    table = terminal.fit(QueryResult(columns=tuple(names), rows=tuple(rows)), optional, width)
    explained = "; ".join(text for column, text in legend.items() if column in table.columns)
    above = terminal.wrapped([*head, *([explained] if explained else [])], width)
    return f"{above}{table.text}\n{terminal.wrapped(notes, width)}".rstrip("\n")


def tuning_notes(effects: Iterable[tuple[str, Judged]]) -> list[str]:
    """'uneven tuning, verdict withheld (n_kv_heads=1 at n_layers=24): the reason', a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, judged in effects:
        if judged.verdict_blocked_by:
            by_reason.setdefault(judged.verdict_blocked_by, []).append(name)
    return [f"{UNEVEN}, verdict withheld ({'; '.join(names)}): {reason}" for reason, names in by_reason.items()]


def verdict_cell(judged: Judged) -> str:
    """The verdict, '-' where it is not significant (with the rule, where the interval is beside 0), or why there is
    none."""
    mean, lo, hi = judged.effect.mean, judged.effect.lo, judged.effect.hi
    if mean is None:
        return "unmeasured"
    if lo is None or hi is None:
        return "no spread" if judged.effect.lacks_spread else "few seeds"
    # even where the effect would not be significant: it compares sides that were tuned differently
    if judged.verdict_blocked_by:
        return UNEVEN
    if judged.verdict != "not distinguishable":
        return judged.verdict
    if lo <= 0 <= hi:
        return "-"
    return "- noise" if judged.verdict_uncorrected == "not distinguishable" else "- Holm"


def baselines_text(contrasts: Iterable[Contrast]) -> str:
    """'baseline of each setting: n_kv_heads=2; depth_scale=none': the values that settings replace, one at a time."""
    baselines = dict.fromkeys(contrast.baseline for contrast in contrasts)
    return f"baseline{' of each setting' * (len(baselines) > 1)}: {'; '.join(baselines)}"


def averaging_text(contrasts: Iterable[Contrast]) -> str:
    """', averaged over the other settings', where a seed has several pairs."""
    return ", averaged over the other settings" if any(c.effect.n > c.n_seeds > 0 for c in contrasts) else ""


def tuned_text(contrasts: Iterable[Contrast]) -> str:
    """', each side at its own tuned value', where any was tuned."""
    return ", each side at its own tuned value" if any(c.tuned.startswith("each") for c in contrasts) else ""


def short_setting(setting: str) -> str:
    """'task_group=A5, seq_len=8, 5 more fields', where more than three fields move together."""
    parts = setting.split(", ")
    return setting if len(parts) < 4 else f"{', '.join(parts[:2])}, {len(parts) - 2} more fields"


def effect_cells(judged: Judged) -> tuple[float | None, ...]:
    """Mean, ends of the interval, and the detectable effect; ratios for differences of logarithms."""
    effect, unit = judged.effect, judged.unit
    return tuple(display_value(value, unit) for value in (effect.mean, effect.lo, effect.hi, judged.detectable))


def display_value(value: float | None, unit: str) -> float | None:
    """The difference; for a difference of logarithms, the ratio."""
    return math.exp(value) if value is not None and _is_ratio(unit) else value


def ratio_cell(ends: tuple[float, float] | None) -> float | str | None:
    """One number where the pairs' ratios are within 5%; else smallest and largest."""
    if ends is None:
        return None
    return sum(ends) / 2 if ends[1] < 1.05 * ends[0] else ratio_text(ends)


def minus(unit: str) -> str:
    """How a table's head relates setting and baseline: 'minus', or 'over' for ratios."""
    return "over" if _is_ratio(unit) else "minus"


def _is_ratio(unit: str) -> bool:
    return unit.startswith("ln ratio")


def title(outcome: str, unit: str) -> str:
    """'val_loss [nat/token], lower is better'."""
    better = quantities.IN_RUNS[outcome].better
    bracket = "" if unit in ("", "1") else f" [{'ratio' if _is_ratio(unit) else unit}]"
    return f"{outcome}{bracket}{f', {better}er is better' if better in ('low', 'high') else ''}"
