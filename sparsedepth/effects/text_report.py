"""Effects and the chain in sentences, with the full evidence: `sparsedepth effects --detail`."""

from collections.abc import Iterator, Sequence

import pandas as pd

from sparsedepth.effects.causal_evidence import InterventionEffect, LinkEvidence, Skill, chain_evidence
from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.chain import cautions
from sparsedepth.effects.sentences import (
    effect_text,
    estimate_text,
    link_text,
    verdict_text,
)
from sparsedepth.store.degeneracy import score_rows, usable_form
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows

CHAIN_EXPLAINED = (
    "The links of the chain. 'associated': the 95% interval of the rank correlation within depth excludes 0 (jackknife "
    "over combinations of settings, each with all its depths and seeds; Holm-corrected over the links of a scope). "
    "'predicts': the cause also predicts the effect at held-out depths. 'causes': an intervention that moved the cause "
    "and no other measured cause moved the effect; other paths (a direct effect, another tuned lr) are not excluded. "
    "Skill: 1 is perfect prediction, 0 no better than the mean."
)


def judged_outcome(runs: pd.DataFrame, outcome: str) -> tuple[str, str]:
    """The outcome, or the sound form of a degenerate score; and a warning, or ''. Raises ValueError for an outcome that
    is no number of `runs`."""
    unit_of(outcome)
    return usable_form(outcome, score_rows(result_rows(runs), outcome), "the effects are on")


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
