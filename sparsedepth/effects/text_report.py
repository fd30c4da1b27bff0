"""Effects and the chain in sentences, as `sparsedepth effects` prints them."""

from collections.abc import Iterator, Sequence

import pandas as pd

from sparsedepth.effects.all_effects import (
    all_knobs,
    choose,
    measure_effects,
    measure_slopes,
    relevant_columns,
)
from sparsedepth.effects.causal_evidence import InterventionEffect, LinkEvidence, Skill, weigh
from sparsedepth.effects.chain import cautions
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.depth_slope import slope_sentence
from sparsedepth.effects.intervals import ALPHA
from sparsedepth.effects.knobs import find_knobs
from sparsedepth.effects.mediation import Mediation, mediations
from sparsedepth.effects.pairs import BASES, unit_of
from sparsedepth.effects.sentences import (
    basis_text,
    counted,
    effect_text,
    estimate_text,
    link_text,
    setting_interaction_sentence,
    verdict_text,
)
from sparsedepth.effects.setting_interactions import setting_interactions
from sparsedepth.store.degeneracy import degeneracy_note, score_rows
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows

EXPLAINED = (
    "Pairs of runs that differ in the knob alone, at one depth and seed; 95% intervals are Student's, over seeds (the "
    "pairs of a seed count once together), of a variance that borrows degrees of freedom (df) from other contrasts. "
    "'lower' and 'higher' need an interval without 0, more than the noise floor of seeds, and Holm's p of at most "
    f"{ALPHA} over the contrasts at that depth on the basis."
)

CHAIN_EXPLAINED = (
    "The chain, link by link. 'associated': the rank correlation within depth excludes 0 (95%, jackknife over "
    "combinations of settings, each with all its depths and seeds; Holm over the links of a scope); 'predicts': "
    "held-out depths, too; 'causes': an intervention moved the cause alone, and the effect with it. Skill: 1 is a "
    "perfect prediction, 0 no better than the mean."
)


def knob_lines(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> Iterator[str]:
    """Effects by knob and depth on every basis, their interactions, and the slopes in depth."""
    effects = measure_effects(runs, outcome, knob)
    yield EXPLAINED
    for each in choose(all_knobs(relevant_columns(runs, outcome)), knob):
        of_knob = [contrast for contrast in effects if contrast.knob == each.name]
        together = f" (with {', '.join(each.fields[1:])}: no effect can be ascribed to one of them)"
        yield f"\n{each.name}{'' if each.is_pure or each.name == 'n_layers' else together}"
        for place in dict.fromkeys((contrast.n_layers, contrast.setting) for contrast in of_knob):
            yield from _place_lines([c for c in of_knob if (c.n_layers, c.setting) == place])
    yield from _depth_lines(runs, outcome, knob)


def knob_cautions(runs: pd.DataFrame, outcome: str) -> Iterator[str]:
    """What to know of the outcome before its effects are believed; and what a contrast at one depth is a mean over,
    where that is more than one width or budget. Raises ValueError for an outcome that is no number of `runs`."""
    unit_of(outcome)
    runs = result_rows(runs)
    if caution := degeneracy_note(outcome, score_rows(runs, outcome)):
        yield caution
    words = {"d_model": "widths", "train_tokens": "numbers of tokens"}
    pooled = [
        f"{n} {word}" for name, word in words.items() if (n := runs.groupby("n_layers")[name].nunique().max()) > 1
    ]
    if pooled:
        yield f"Each contrast is a mean over up to {' and '.join(pooled)}; --part scale tells them apart."


def _place_lines(contrasts: Sequence[Contrast]) -> Iterator[str]:
    """One setting at one depth: bases that have the same pairs share a line."""
    first = contrasts[0]
    depth = "" if first.n_layers is None else f"n_layers={first.n_layers}, "
    yield f"  {depth}{first.setting} vs {first.baseline}"
    by_runs: dict[tuple[str, ...], list[Contrast]] = {}
    for contrast in contrasts:
        by_runs.setdefault(contrast.run_ids, []).append(contrast)
    for same in by_runs.values():
        bases = ", ".join(f"equal {contrast.basis}" for contrast in same)
        yield f"    {bases}: {_basis_text(same[0]) if same[0].has_pairs else 'no matched runs'}"


def _basis_text(contrast: Contrast) -> str:
    matched = all(contrast.matches(basis) for basis in BASES)
    return f"{effect_text(contrast)}{'' if matched else f'. {basis_text(contrast)}'}"


def _depth_lines(runs: pd.DataFrame, outcome: str, knob: str | None) -> Iterator[str]:
    crossed = setting_interactions(relevant_columns(runs, outcome), outcome, knob)
    if crossed:
        tested = counted(len(crossed), "interaction")
        yield f"\nDo effects on {outcome} depend on what else is set? (Holm over {tested})"
    yield from (f"  {setting_interaction_sentence(each)}" for each in crossed)
    slopes = measure_slopes(runs, outcome, knob)
    if slopes:
        yield f"\nDoes {outcome} run differently with depth? (Holm over {counted(len(slopes), 'slope')})"
    for slope in slopes:
        yield f"  {slope_sentence(slope)}"


# The chain


def chain_lines(runs: pd.DataFrame) -> Iterator[str]:
    """Every link with its word and all that the word rests on; then what passes through mediators, by knob."""
    chain, knobs = weigh(runs), [knob for knob in find_knobs(runs) if knob.is_pure]
    yield from (CHAIN_EXPLAINED, "", *cautions(result_rows(runs)))
    if not chain:
        yield "no two quantities of the chain were measured in the same runs"
    for link in chain:
        yield heading_of(link)
        yield from (f"  {line}" for line in evidence_lines(link))
    paths = [path for knob in knobs for path in mediations(runs, knob)]
    shared = [path for path in paths if path.share is not None]
    if paths:
        yield (
            "\nHow much of a knob's effect passes through a mediator? (the mediator's change x the outcome's slope on "
            "it / the outcome's change; intervals resample the contexts)"
        )
    yield from (f"  {_mediation_text(path)}" for path in shared)
    if len(paths) > len(shared):
        unknown = counted(len(paths) - len(shared), "more path")
        yield f"  {unknown}: the outcome did not change, or the mediator does not vary, so that there is no share"


def heading_of(link: LinkEvidence) -> str:
    return f"{link.cause} -> {link.effect}: {link.word}"


def evidence_lines(link: LinkEvidence) -> Iterator[str]:
    """All that the word of a link rests on."""
    yield from map(link_text, link.links)
    yield _skill_text(link.skill)
    yield from map(_intervention_text, link.interventions)
    if not link.interventions:
        yield "no intervention moved this cause by itself in these runs"


def _skill_text(skill: Skill) -> str:
    depths = ", ".join(map(str, skill.depths)) or "none"
    if skill.value is None:
        return f"held-out depths: no skill known (needs two depths; depths here: {depths})"
    interval = "" if skill.lo is None or skill.hi is None else f" (95% interval {skill.lo:+.2f} to {skill.hi:+.2f})"
    return f"held-out depths, each of {depths} predicted by the others: skill {skill.value:+.2f}{interval}"


def _intervention_text(tried: InterventionEffect) -> str:
    alone = "and nothing else" if tried.is_alone else "not shown to be alone"
    moved, left = tried.moved, [f"{c.outcome} {estimate_text(c.effect, c.unit)}" for c in tried.left]
    return (
        f"intervention {moved.setting}: {moved.outcome} {verdict_text(moved)}: "
        f"{estimate_text(moved.effect, moved.unit)}, {alone} ({'; '.join(left)}); {effect_text(tried.effect)}"
    )


def _mediation_text(path: Mediation) -> str:
    interval = "no interval from so few contexts"
    if path.lo is not None and path.hi is not None:
        interval = f"95% interval {path.lo:.2f} to {path.hi:.2f}"
    return (
        f"{path.setting} vs {path.baseline} -> {path.mediator} -> {path.outcome}: share {path.share:.2f} ({interval}); "
        f"{counted(path.total.n, 'pair')} in {counted(path.n_contexts, 'context')}"
    )


def chain_table(chain: Sequence[LinkEvidence]) -> QueryResult:
    """One row per link and scope, with the link's word."""
    columns = ("cause", "effect", "word", "scope", "rho", "lo", "hi", "p_holm", "runs", "units")
    columns += ("missing", "diverged")
    rows = []
    for evidence in chain:
        head, skill = (evidence.cause, evidence.effect, evidence.word), evidence.skill
        scopes = [(link.scope, link.rho, link.lo, link.hi, link.p_holm, link) for link in evidence.links]
        for *numbers, link in [*scopes, ("held-out skill", skill.value, skill.lo, skill.hi, None, evidence.within)]:
            rows.append((*head, *numbers, link.n_runs, link.n_units, link.n_missing, link.n_diverged))
    return QueryResult(columns=columns, rows=tuple(rows))
