"""Effects and the chain in sentences, as `sparsedepth effects` prints them."""

from collections.abc import Iterator, Sequence

import pandas as pd

from sparsedepth.effects.causal_evidence import Evidence, Intervention, Skill, weigh
from sparsedepth.effects.contrast import BASES, Contrast
from sparsedepth.effects.depth_slope import depth_slopes, slope_sentence
from sparsedepth.effects.knobs import Knob, find_knobs
from sparsedepth.effects.mediation import Mediation, mediations
from sparsedepth.effects.report import ALPHA, Effect, corrected, measure_effects, measure_interactions, needed
from sparsedepth.effects.sentences import (
    basis_text,
    counted,
    effect_text,
    estimate_text,
    interaction_sentence,
    link_sentence,
)
from sparsedepth.store.query_result import QueryResult

EXPLAINED = (
    "Pairs of runs that differ in the knob alone, at one depth and seed; 95% intervals are Student's, over pairs (a "
    "bootstrap of so few seeds covers too seldom). 'lower' and 'higher' need an interval without 0, more than the "
    f"noise floor of seeds, and Holm's p of at most {ALPHA} over all contrasts on the basis."
)

CHAIN_EXPLAINED = (
    "The chain, link by link. 'associated': the rank correlation within depth excludes 0 (95% bootstrap over "
    "configurations); 'predicts': held-out depths, too; 'causes': an intervention moved the cause alone, and the "
    "effect with it."
)


def knob_lines(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> Iterator[str]:
    """Effects by knob and depth on every basis, their interaction with depth, and the slopes in depth."""
    effects = measure_effects(runs, outcome, knob)
    yield EXPLAINED
    for each in {one.knob.name: one.knob for one in effects}.values():
        mine = [one for one in effects if one.knob.name == each.name]
        yield ""
        together = f" (with {', '.join(each.fields[1:])}: no effect can be ascribed to one of them)"
        yield f"{each.name}{'' if each.is_pure or each.name == 'n_layers' else together}"
        for place in dict.fromkeys((one.n_layers, one.setting) for one in mine):
            yield from _place_lines([one for one in mine if (one.n_layers, one.setting) == place])
    yield from _interaction_lines(runs, outcome, knob, sorted({one.knob.name for one in effects}))


def _place_lines(effects: Sequence[Effect]) -> Iterator[str]:
    """One setting at one depth: bases that have the same pairs share a line."""
    first = effects[0]
    depth = "" if first.n_layers is None else f"n_layers={first.n_layers}, "
    yield f"  {depth}{first.setting} vs {first.knob.baseline}"
    by_runs: dict[tuple[str, ...], list[Effect]] = {}
    for one in effects:
        by_runs.setdefault(one.contrast.run_ids if one.contrast else (), []).append(one)
    for same in by_runs.values():
        bases = ", ".join(f"equal {one.basis}" for one in same)
        found = same[0].contrast
        yield f"    {bases}: {'no matched runs' if found is None else _told(found, same[0])}"


def _told(found: Contrast, effect: Effect) -> str:
    text = effect_text(found)
    p = "" if effect.p_holm is None else f", Holm p {effect.p_holm:.2g}"
    if effect.verdict != found.verdict:
        text = text.replace(
            f"{found.outcome} {found.verdict}:", f"{found.outcome} not distinguishable among so many:", 1
        )
    unmatched = [basis for basis in BASES if not found.matches(basis)]
    return f"{text}{p}{f'. {basis_text(found)}' if unmatched else ''}"


def _interaction_lines(runs: pd.DataFrame, outcome: str, knob: str | None, names: Sequence[str]) -> Iterator[str]:
    found = measure_interactions(runs, outcome, knob)
    if found:
        yield f"\nDo effects on {outcome} change with depth? (Holm over {counted(len(found), 'interaction')})"
    for one in found:
        p = "" if one.p_holm is None else f", Holm p {one.p_holm:.2g}"
        chance = "; not distinguishable among so many" if one.verdict != one.interaction.verdict else ""
        yield f"  {interaction_sentence(one.interaction)}{p}{chance}"
    cut = needed(runs, outcome)
    slopes = [slope for each in find_knobs(cut) if each.name in names for slope in depth_slopes(cut, each, outcome)]
    adjusted = corrected([slope.difference.p for slope in slopes])
    if slopes:
        yield f"\nDoes {outcome} run differently with depth? (Holm over {counted(len(slopes), 'slope')})"
    for slope, p in zip(slopes, adjusted, strict=True):
        yield f"  {slope_sentence(slope)}{'' if p is None else f'; Holm p {p:.2g}'}"


# The chain


def chain_lines(runs: pd.DataFrame, knobs: Sequence[Knob]) -> Iterator[str]:
    """Every link with its word and all that the word rests on; then what passes through mediators, by knob."""
    evidence = weigh(runs)
    if not evidence:
        yield "no two quantities of the chain were measured in the same runs"
    for one in evidence:
        yield f"{one.within.cause} -> {one.within.effect}: {one.word}"
        yield from (f"  {line}" for line in evidence_lines(one))
    found = [one for knob in knobs for one in mediations(runs, knob)]
    known = [one for one in found if one.share is not None]
    if found:
        yield "\nHow much of a knob's effect passes through a mediator? (b mean(d_m) / mean(d_y); contexts resampled)"
    yield from (f"  {_mediation_text(one)}" for one in known)
    if len(found) > len(known):
        yield f"  no total effect to share out, or no spread: {counted(len(found) - len(known), 'path')}"


def evidence_lines(one: Evidence) -> Iterator[str]:
    """All that the word of a link rests on."""
    yield from (_short(link_sentence(each)) for each in one.links)
    yield _skill_text(one.skill)
    yield from (_intervention_text(each) for each in one.interventions)
    if not one.interventions:
        yield "no intervention moved this cause by itself in these runs"


def _short(sentence: str) -> str:
    """A link's sentence without its two names, which stand above it."""
    return sentence.partition(", ")[2]


def _skill_text(skill: Skill) -> str:
    depths = ", ".join(map(str, skill.depths)) or "none"
    if skill.value is None:
        return f"held-out depths: no skill known (needs two depths and six configurations; depths here: {depths})"
    interval = "" if skill.lo is None or skill.hi is None else f" (95% interval {skill.lo:+.2f} to {skill.hi:+.2f})"
    return f"held-out depths, each of {depths} predicted by the others: skill {skill.value:+.2f}{interval}"


def _intervention_text(one: Intervention) -> str:
    alone = "alone" if one.is_alone else "not shown to be alone"
    left = "; ".join(f"{each.outcome} {estimate_text(each.effect, each.unit)}" for each in one.left)
    return (
        f"intervention {one.moved.setting}: {one.moved.outcome} {one.moved.verdict} {alone} "
        f"({estimate_text(one.moved.effect, one.moved.unit)}{f'; {left}' if left else ''}); "
        f"{effect_text(one.effect)}"
    )


def _mediation_text(one: Mediation) -> str:
    interval = "no interval from so few configurations"
    if one.lo is not None and one.hi is not None:
        interval = f"95% interval {one.lo:.2f} to {one.hi:.2f}"
    return (
        f"{one.setting} vs {one.baseline} -> {one.mediator} -> {one.outcome}: share {one.share:.2f} ({interval}); "
        f"{counted(one.total.n, 'pair')} in {counted(one.n_contexts, 'context')}"
    )


def chain_table(evidence: Sequence[Evidence]) -> QueryResult:
    """One row per link and scope, with the link's word."""
    columns = ("cause", "effect", "word", "scope", "rho", "lo", "hi", "runs", "cells", "missing", "diverged")
    rows = []
    for one in evidence:
        for link in one.links:
            counts = (link.n_runs, link.n_cells, link.n_missing, link.n_diverged)
            rows.append((link.cause, link.effect, one.word, link.scope, link.rho, link.lo, link.hi, *counts))
        skill, counts = one.skill, (one.within.n_runs, one.within.n_cells, one.within.n_missing, one.within.n_diverged)
        names = (one.within.cause, one.within.effect, one.word, "held-out skill")
        rows.append((*names, skill.value, skill.lo, skill.hi, *counts))
    return QueryResult(columns=columns, rows=tuple(rows))
