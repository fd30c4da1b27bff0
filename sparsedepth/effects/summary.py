"""Effects, slopes in depth and links of the chain as a table each, for a screen: what `sparsedepth effects` opens with.

The sentences that say the same with all that it rests on are in `text_report`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.all_effects import measure_effects, measure_slopes, relevant_columns
from sparsedepth.effects.causal_evidence import LinkEvidence, weigh
from sparsedepth.effects.chain import MIN_UNITS, cautions
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.depth_slope import SlopeContrast
from sparsedepth.effects.intervals import ALPHA, POWER, Judged
from sparsedepth.effects.pairs import EQUAL_LR
from sparsedepth.effects.sentences import counted, ratio_text, size_text
from sparsedepth.effects.setting_interactions import SettingInteraction, setting_interactions
from sparsedepth.effects.tuning_error import LOSSES
from sparsedepth.store import render
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows

SIZE = ("effect", "lo", "hi", "detectable")

UNEVEN = "uneven tuning"
NOT_ALONE = "; intervention 'not alone': it moved other things that bear on the effect as well"

LEGEND = {
    "lo": "lo, hi: 95% interval over seeds",
    "verdict": "verdict '-': measured, not significant (the interval holds 0, the effect is within the noise of "
    f"seeds, or Holm's correction at {ALPHA} takes it)",
    "detectable": f"detectable: the effect that {POWER:.0%} of such sweeps would have told apart",
}
"""Column -> what its numbers say, for a table that has it."""
OF_RATIOS = " (a ratio above it, or below 1 over it)"


def knob_lines(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> Iterator[str]:
    """The table of effects; those of interactions between settings, and of slopes in depth, where there are any."""
    yield effects_text(measure_effects(runs, outcome, knob))
    interactions = setting_interactions(relevant_columns(runs, outcome), outcome, knob)
    if interactions:
        yield f"\n{interactions_text(interactions)}"
    slopes = measure_slopes(runs, outcome, knob)
    if slopes:
        yield f"\n{slopes_text(slopes)}"


def effects_text(effects: Sequence[Contrast], width: int | None = None, every_basis: bool = False) -> str:
    """A line for each setting at each depth, on the first basis that has pairs (of equal tokens first); with
    `every_basis` one for each set of pairs. Under it why tuning bars a verdict."""
    places: dict[tuple[int | None, str], dict[tuple[str, ...], Contrast]] = {}
    for contrast in effects:
        if contrast.has_pairs:
            places.setdefault((contrast.n_layers, contrast.setting), {}).setdefault(contrast.run_ids, contrast)
    if not places:
        return "no two runs match on any basis"
    shown = [c for by_runs in places.values() for c in list(by_runs.values())[: None if every_basis else 1]]
    shown.sort(key=lambda contrast: contrast.n_layers or math.inf)  # depth itself, over all of them, comes last
    bases = {contrast.basis for contrast in shown}
    names = ("n_layers", *SIZE, "equal", "seeds", "diverged", "flops", "verdict", "setting")
    rows = [
        (
            contrast.n_layers or "all",
            *_size(contrast),
            contrast.basis if len(bases) > 1 else None,
            contrast.n_seeds,
            contrast.n_diverged or None,
            one_ratio(contrast.ratios["flops"]),
            verdict_word(contrast),
            shown_setting(contrast.setting),
        )
        for contrast in shown
    ]
    only = shown[0].basis and f"at equal {shown[0].basis}"
    at = "both sides equal in what 'equal' names" if len(bases) > 1 else only or "all else equal"
    own = ", each at its own tuned value" if any(contrast.tuned.startswith("each") for contrast in shown) else ""
    outcome = shown[0].outcome
    if own and outcome not in LOSSES:
        own += f", so that what lr does to {outcome} is in it (at equal lr: --detail)"
    accuracy = " (accuracy: --by val_accuracy)" if shown[0].unit == "nat/image" else ""
    head = (
        f"{title(outcome, shown[0].unit)}{accuracy}; effect: setting {against(shown[0].unit)} baseline, "
        f"{at}{pooled(shown)}{own}",
        f"baseline: {', '.join(dict.fromkeys(contrast.baseline for contrast in shown))}",
    )
    legend = LEGEND | {"flops": "flops: of training, over the baseline's"}
    if _is_ratio(shown[0].unit):
        legend["detectable"] += OF_RATIOS
    notes = uneven_notes((f"{c.setting}{f' at n_layers={c.n_layers}' if c.n_layers else ''}", c) for c in shown)
    notes += _at_equal_lr(shown, effects)
    return laid_out(head, names, rows, ("seeds", "equal", "flops", "detectable"), notes, width, legend)


def _at_equal_lr(shown: Iterable[Contrast], effects: Iterable[Contrast]) -> list[str]:
    """One line that names the settings of which runs at one lr say 'lower' or 'higher', and those at tuned ones not."""
    at_one = {(c.n_layers, c.setting): c for c in effects if c.basis == EQUAL_LR}
    by_setting: dict[str, list[str]] = {}
    for contrast in shown:
        other = at_one.get((contrast.n_layers, contrast.setting))
        if other and other.verdict not in (contrast.verdict, "not distinguishable"):
            size = size_text(other.effect.mean or 0.0, other.unit, "+")
            where = f" at n_layers={contrast.n_layers}" if contrast.n_layers else ""
            by_setting.setdefault(contrast.setting, []).append(f"{other.verdict} ({size}){where}")
    words = "; ".join(f"{setting} {', '.join(each)}" for setting, each in by_setting.items())
    head = "with the baseline's lr on both sides the verdict is another (intervals: --detail)"
    return [f"{head}: {words}"] if words else []


def interactions_text(interactions: Sequence[SettingInteraction], width: int | None = None) -> str:
    """A line for each setting, depth and what it was run beside: its effect alone, beside, and their difference."""
    names = ("n_layers", "alone", "beside", "difference", *SIZE[1:], "seeds", "verdict", "setting")
    rows = [
        (
            each.n_layers,
            shown_value(each.alone.effect.mean, each.unit),
            shown_value(each.beside.effect.mean, each.unit),
            *_size(each),
            len(each.by_seed),
            verdict_word(each),
            each.text,
        )
        for each in interactions
    ]
    head = (
        f"Does an effect on {interactions[0].outcome} depend on what else is set? A setting's effect beside other "
        f"settings {against(interactions[0].unit)} its effect alone, of the seeds that have both (above, all seeds)",
    )
    notes = uneven_notes((f"{each.text} at n_layers={each.n_layers}", each) for each in interactions)
    return laid_out(head, names, rows, ("seeds", "detectable", "alone beside"), notes, width)


def slopes_text(slopes: Sequence[SlopeContrast], width: int | None = None) -> str:
    """A line for each setting: how the outcome runs with depth there, at its baseline, and their difference."""
    names = ("of_setting", "of_baseline", "difference", *SIZE[1:], "seeds", "verdict", "setting")
    rows = [
        (
            shown_value(slope.at_setting.slope.mean, slope.unit),
            shown_value(slope.at_baseline.slope.mean, slope.unit),
            *_size(slope),
            slope.n_seeds,
            verdict_word(slope),
            shown_setting(slope.at_setting.setting),
        )
        for slope in slopes
    ]
    head = (
        f"Does {slopes[0].outcome} run differently with depth? Its change per doubling of n_layers: setting "
        f"{against(slopes[0].unit)} baseline",
    )
    notes = uneven_notes((slope.at_setting.setting, slope) for slope in slopes)
    return laid_out(head, names, rows, ("seeds", "detectable", "of_setting of_baseline"), notes, width)


def chain_lines(runs: pd.DataFrame) -> Iterator[str]:
    """A line for each link from sparsity to loss: the correlation within depth, the skill at held-out depths, what an
    intervention showed, and the word for it."""
    chain = weigh(runs)
    if not chain:
        yield "no two quantities of the chain were measured in the same runs"
        return
    names = ("cause", "effect", "rho", "lo", "hi", "skill", "intervention", "verdict")
    rows = []
    for link in chain:
        within, skill = link.within, link.skill
        unknown = "too few" if within.lo is None else "-"
        word = unknown if link.word == "not distinguishable" else link.word
        size = (within.rho, within.lo, within.hi, skill.value)
        rows.append((link.cause, link.effect, *size, _tried(link), word))
    n_units = chain[0].within.n_units
    interval = f"no interval of {n_units} combinations, {MIN_UNITS} are needed"
    if any(link.within.lo is not None for link in chain):
        interval = "lo, hi: its 95% interval over combinations"
    tried = {_tried(link) for link in chain}
    head = (
        f"The chain from sparsity to loss, over {counted(chain[0].within.n_runs, 'run')} of "
        f"{counted(n_units, 'combination')} of settings, each with all its depths and seeds",
        f"rho: rank correlation within depth ({interval}); skill at depths held out: 1 is perfect, 0 no better than "
        f"the mean{NOT_ALONE if 'not alone' in tried else ''}; verdict: associated (rho excludes 0 after Holm), "
        "predicts (skill, too), causes (an intervention moved the cause alone, and the effect), "
        "'-' not distinguishable",
    )
    yield laid_out(head, names, rows, ("skill",), cautions(result_rows(runs)))


def _tried(link: LinkEvidence) -> str:
    """What the interventions on a link showed, in a word."""
    if not link.interventions:
        return "none"
    if any(tried.shows for tried in link.interventions):
        return "shows it"
    return "shows nothing" if any(tried.is_alone for tried in link.interventions) else "not alone"


def laid_out(
    head: Iterable[str],
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    optional: Sequence[str],
    notes: Iterable[str],
    width: int | None = None,
    legend: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Head, table and notes; of the legend (column -> words) what is said of columns that the width leaves."""
    table = render.compact(QueryResult(columns=tuple(names), rows=tuple(rows)), optional, width)
    columns = set(table.split())
    words = "; ".join(meaning for column, meaning in legend.items() if column in columns)
    above = render.wrapped([*head, *([words] if words else [])], width)
    return f"{above}{table}\n{render.wrapped(notes, width)}".rstrip("\n")


def uneven_notes(places: Iterable[tuple[str, Judged]]) -> list[str]:
    """'uneven tuning, so no verdict (n_kv_heads=1 at n_layers=24): the reason', a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for place, judged in places:
        if judged.verdict_blocked_by:
            by_reason.setdefault(judged.verdict_blocked_by, []).append(place)
    return [f"{UNEVEN}, so no verdict ({'; '.join(places)}): {reason}" for reason, places in by_reason.items()]


def verdict_word(judged: Judged) -> str:
    """'-' where it was measured and cannot be told apart; why nothing can be said where that is the reason."""
    if judged.effect.mean is None:
        return "unmeasured"
    if judged.effect.lo is None:
        return "few seeds"
    # also where there would be none without it: the effect is not that of two sides tuned alike
    if judged.verdict_blocked_by:
        return UNEVEN
    return "-" if judged.verdict == "not distinguishable" else judged.verdict


def pooled(contrasts: Iterable[Contrast]) -> str:
    """', averaged over what else was set', where a seed has several pairs: runs beside other settings as well."""
    return ", averaged over what else was set" if any(c.effect.n > c.n_seeds > 0 for c in contrasts) else ""


def shown_setting(setting: str, most: int = 3) -> str:
    """'task_group=A5, seq_len=8, 5 more fields', where so many move together that no line holds them."""
    parts = setting.split(", ")
    left = len(parts) - most + 1
    return setting if left < 2 else f"{', '.join(parts[: most - 1])}, {left} more fields"


def _size(judged: Judged) -> tuple[float | None, ...]:
    effect, unit = judged.effect, judged.unit
    return tuple(shown_value(value, unit) for value in (effect.mean, effect.lo, effect.hi, judged.detectable))


def shown_value(value: float | None, unit: str) -> float | None:
    """A difference, or the ratio whose logarithm it is."""
    return math.exp(value) if value is not None and _is_ratio(unit) else value


def one_ratio(ends: tuple[float, float] | None) -> float | str | None:
    """One number, where the pairs' ratios are within 5%; else both ends."""
    if ends is None:
        return None
    return sum(ends) / 2 if ends[1] < 1.05 * ends[0] else ratio_text(ends)


def against(unit: str) -> str:
    return "over" if _is_ratio(unit) else "less"


def _is_ratio(unit: str) -> bool:
    return unit.startswith("ln ratio")


def title(outcome: str, unit: str) -> str:
    """'val_loss [nat/token], low is better'."""
    quantity = quantities.IN_RUNS[outcome]
    shown = "" if unit in ("", "1") else f" [{'ratio' if _is_ratio(unit) else unit}]"
    return f"{outcome}{shown}{f', {quantity.better} is better' if quantity.better in ('low', 'high') else ''}"
