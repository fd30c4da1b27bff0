"""Effects and the chain in sentences, with the full evidence: `sparsedepth effects --detail`."""

from collections.abc import Iterator, Sequence

import pandas as pd

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.all_effects import (
    all_knobs,
    choose,
    measure_effects,
    measure_slopes,
    relevant_columns,
)
from sparsedepth.effects.causal_evidence import InterventionEffect, LinkEvidence, Skill, chain_evidence
from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.chain import cautions
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.depth_slope import slope_sentence
from sparsedepth.effects.intervals import ALPHA
from sparsedepth.effects.pairs import BASES
from sparsedepth.effects.sentences import (
    basis_text,
    effect_text,
    estimate_text,
    link_text,
    setting_interaction_sentence,
    verdict_text,
)
from sparsedepth.effects.setting_interactions import setting_interactions
from sparsedepth.store.degeneracy import score_rows, usable_form
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows

EXPLAINED = (
    "Each effect compares pairs of runs with the same depth and seed that differ in one knob only. 95% intervals: "
    "Student's t over seeds (pairs of one seed are averaged first), with variances moderated across contrasts, which "
    "adds degrees of freedom (df). 'lower' and 'higher' require an interval that excludes 0, an effect above the noise "
    f"floor of seeds, and a Holm-corrected p of at most {ALPHA} over the contrasts at that depth on that basis."
)

CHAIN_EXPLAINED = (
    "The links of the chain. 'associated': the 95% interval of the rank correlation within depth excludes 0 (jackknife "
    "over combinations of settings, each with all its depths and seeds; Holm-corrected over the links of a scope). "
    "'predicts': the cause also predicts the effect at held-out depths. 'causes': an intervention that moved the cause "
    "and no other measured cause moved the effect; other paths (a direct effect, another tuned lr) are not excluded. "
    "Skill: 1 is perfect prediction, 0 no better than the mean."
)


def knob_lines(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> Iterator[str]:
    """Effects by knob and depth on every basis, their interactions, and the slopes in depth."""
    effects = measure_effects(runs, outcome, knob)
    yield EXPLAINED
    for each in choose(all_knobs(relevant_columns(runs, outcome)), knob):
        of_knob = [contrast for contrast in effects if contrast.knob == each.name]
        joint = f" (changes together with {', '.join(each.fields[1:])}: effects cannot be attributed to one of them)"
        yield f"\n{each.name}{'' if each.is_pure or each.name == 'n_layers' else joint}"
        for key in dict.fromkeys(contrast.key for contrast in of_knob):
            yield from _setting_lines([contrast for contrast in of_knob if contrast.key == key])
    yield from _interaction_and_slope_lines(runs, outcome, knob)


def judged_outcome(runs: pd.DataFrame, outcome: str) -> tuple[str, str]:
    """The outcome, or the sound form of a degenerate score; and a warning, or ''. Raises ValueError for an outcome that
    is no number of `runs`."""
    unit_of(outcome)
    return usable_form(outcome, score_rows(result_rows(runs), outcome), "the effects are on")


def pooling_caution(runs: pd.DataFrame) -> str:
    """A warning about contrasts that pool several widths or token budgets, or ''."""
    by_depth = result_rows(runs).groupby("n_layers")
    nouns = {"d_model": "widths", "train_tokens": "token budgets"}
    pooled = [f"{n} {noun}" for name, noun in nouns.items() if (n := by_depth[name].nunique().max()) > 1]
    text = f"Each contrast is a mean over up to {' and '.join(pooled)}; --part scale separates them."
    return text if pooled else ""


def _setting_lines(contrasts: Sequence[Contrast]) -> Iterator[str]:
    """One setting at one depth: bases that have the same pairs share a line."""
    first = contrasts[0]
    depth = "" if first.n_layers is None else f"n_layers={first.n_layers}, "
    yield f"  {depth}{first.setting} vs {first.baseline}"
    by_runs: dict[tuple[str, ...], list[Contrast]] = {}
    for contrast in contrasts:
        by_runs.setdefault(contrast.run_ids, []).append(contrast)
    for same_runs in by_runs.values():
        contrast = same_runs[0]
        text = effect_text(contrast) if contrast.has_pairs else "no matched runs"
        if contrast.has_pairs and not all(contrast.matches(basis) for basis in BASES):
            text += f". {basis_text(contrast)}"
        yield f"    {', '.join(f'equal {other.basis}' for other in same_runs)}: {text}"


def _interaction_and_slope_lines(runs: pd.DataFrame, outcome: str, knob: str | None) -> Iterator[str]:
    interactions = setting_interactions(relevant_columns(runs, outcome), outcome, knob)
    if interactions:
        tested = counted(len(interactions), "interaction")
        yield f"\nDo effects on {outcome} depend on the other settings? (Holm-corrected over {tested})"
    yield from (f"  {setting_interaction_sentence(interaction)}" for interaction in interactions)
    slopes = measure_slopes(runs, outcome, knob)
    if slopes:
        yield f"\nDoes {outcome} change differently with depth? (Holm-corrected over {counted(len(slopes), 'slope')})"
    yield from (f"  {slope_sentence(slope)}" for slope in slopes)


# The chain


def chain_lines(runs: pd.DataFrame) -> Iterator[str]:
    """Every link with its verdict and evidence."""
    chain = chain_evidence(runs)
    yield from (CHAIN_EXPLAINED, "", *cautions(result_rows(runs)))
    if not chain:
        yield "no two quantities of the chain were measured in the same runs"
    for link in chain:
        yield link_heading(link)
        yield from (f"  {line}" for line in evidence_lines(link))


def link_heading(link: LinkEvidence) -> str:
    return f"{link.cause} -> {link.effect}: {link.verdict}"


def evidence_lines(link: LinkEvidence) -> Iterator[str]:
    """The evidence behind a link's verdict."""
    yield from map(link_text, link.links)
    yield _skill_text(link.skill)
    yield from map(_intervention_text, link.interventions)
    if not link.interventions:
        yield "no intervention on this cause in these runs"


def _skill_text(skill: Skill) -> str:
    depths = ", ".join(map(str, skill.depths)) or "none"
    if skill.value is None:
        return f"held-out depths: skill unknown (two depths are needed; these runs have: {depths})"
    interval = "" if skill.lo is None or skill.hi is None else f" (95% interval {skill.lo:+.2f} to {skill.hi:+.2f})"
    return f"held-out depths, each of {depths} predicted from the others: skill {skill.value:+.2f}{interval}"


def _intervention_text(intervention: InterventionEffect) -> str:
    controls = "; ".join(f"{c.outcome} {estimate_text(c.effect, c.unit)}" for c in intervention.controls)
    alone = "other causes unchanged" if intervention.is_alone else "not shown to move this cause alone"
    moved = intervention.moved
    return (
        f"intervention {moved.setting}: {moved.outcome} {verdict_text(moved)}: "
        f"{estimate_text(moved.effect, moved.unit)}; {alone} ({controls}); {effect_text(intervention.effect)}"
    )


def chain_table(chain: Sequence[LinkEvidence]) -> QueryResult:
    """One row per link and scope; `word` is the link's verdict."""
    columns = ("cause", "effect", "word", "scope", "rho", "lo", "hi", "p_holm", "runs", "units")
    columns += ("missing", "diverged")
    rows = []
    for evidence in chain:
        head, skill = (evidence.cause, evidence.effect, evidence.verdict), evidence.skill
        scopes = [(link.scope, link.rho, link.lo, link.hi, link.p_holm, link) for link in evidence.links]
        for *numbers, link in [*scopes, ("held-out skill", skill.value, skill.lo, skill.hi, None, evidence.within)]:
            rows.append((*head, *numbers, link.n_runs, link.n_units, link.n_missing, link.n_diverged))
    return QueryResult(columns=columns, rows=tuple(rows))
