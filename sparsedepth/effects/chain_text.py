"""The links of the chain as a table, and their evidence as sentences: terminal and report."""

from collections.abc import Iterator, Sequence

from sparsedepth.config.plain_text import counted, wrapped
from sparsedepth.effects.cells import Cells
from sparsedepth.effects.chain import MIN_UNITS, Intervention, Link, LinkEvidence, Skill, cautions, chain_evidence
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.text import size_text
from sparsedepth.store.query_result import QueryResult, fit
from sparsedepth.store.tuning_roles import result_rows

EXPLAINED = (
    "rho: rank correlation within depth (lo, hi: 95% interval over settings, each with all its runs); "
    "skill: prediction of held-out depths, 1 perfect, 0 no better than their mean; intervention "
    "'confounded': not shown to move only the cause; verdict: associated (rho significant, adjusted over the links), "
    "predicts (and skill above 0), causes (an intervention that moved only the cause moved the effect; other paths, "
    f"such as another tuned lr, are not excluded), '-' not distinguishable from 0, 'too few': {MIN_UNITS} "
    "settings are needed for an interval"
)


def chain_lines(cells: Cells, detail: bool = False) -> Iterator[str]:
    """A row for each link; with `detail` its evidence in sentences too."""
    chain = chain_evidence(cells)
    if not chain:
        yield "no two quantities of the chain were measured in the same runs"
        return
    names = ("cause", "effect", "rho", "lo", "hi", "skill", "intervention", "verdict")
    table = fit(QueryResult(columns=names, rows=tuple(map(_row, chain))), ("skill",))
    head = wrapped([f"The chain from sparsity to loss: {_counts_text(chain[0].within)}"])
    notes = wrapped([EXPLAINED, *cautions(result_rows(cells.runs))])
    yield f"{head}{table.text}\n{notes}".rstrip("\n")
    for evidence in chain if detail else ():
        yield link_heading(evidence)
        yield from (f"  {line}" for line in evidence_lines(evidence))


def _row(evidence: LinkEvidence) -> tuple[str | float | None, ...]:
    within, verdict, tried = evidence.within, evidence.verdict, evidence.interventions
    shown = verdict if verdict != "not distinguishable" else "too few" if within.lo is None else "-"
    intervention = "confounded" if tried else "none"
    if any(each.is_alone for each in tried):
        intervention = "confirms" if verdict == "causes" else "no effect"
    return within.cause, within.effect, within.rho, within.lo, within.hi, evidence.skill.value, intervention, shown


def _counts_text(link: Link) -> str:
    return f"{counted(link.n_runs, 'run')} of {counted(link.n_settings, 'setting')}"


def link_heading(evidence: LinkEvidence) -> str:
    return f"{evidence.within.cause} -> {evidence.within.effect}: {evidence.verdict}"


def evidence_lines(evidence: LinkEvidence) -> Iterator[str]:
    """The evidence behind a link's verdict."""
    yield from map(_link_text, evidence.links)
    yield _skill_text(evidence.skill)
    yield from map(_intervention_text, evidence.interventions)
    if not evidence.interventions:
        yield "no intervention on this cause in these runs"


def _link_text(link: Link) -> str:
    """'within depth: associated: rho -0.61 (...), adjusted p 0.02; 24 runs of 8 settings'."""
    verdict = "associated" if link.is_associated else "not distinguishable"
    rho = "rho undefined (too few runs, or one side is constant)" if link.rho is None else f"rho {link.rho:+.2f}"
    if link.lo is not None and link.hi is not None:
        p = "" if link.p_adjusted is None else f", adjusted p {link.p_adjusted:.2g}"
        rho += f" (95% interval {link.lo:+.2f} to {link.hi:+.2f}){p}"
    elif link.rho is not None:
        rho += " (too few settings for an interval)"
    left_out = f"; excluded: {link.n_missing} not measured, {link.n_diverged} diverged"
    left_out = left_out if link.n_missing or link.n_diverged else ""
    return f"{link.scope}: {verdict}: {rho}; {_counts_text(link)}{left_out}"


def _skill_text(skill: Skill) -> str:
    depths = ", ".join(map(str, skill.depths)) or "none"
    if skill.value is None:
        return f"held-out depths: skill unknown (two depths are needed; these runs have: {depths})"
    interval = "" if skill.lo is None or skill.hi is None else f" (95% interval {skill.lo:+.2f} to {skill.hi:+.2f})"
    return f"held-out depths, each of {depths} predicted from the others: skill {skill.value:+.2f}{interval}"


def _intervention_text(tried: Intervention) -> str:
    controls = "; ".join(map(_effect_text, filter(None, tried.controls)))
    alone = "other causes unchanged" if tried.is_alone else "not shown to move this cause alone"
    return (
        f"intervention {tried.moved.setting}, n_layers={tried.moved.n_layers}: {_effect_text(tried.moved)}; "
        f"{alone} ({controls}); {_effect_text(tried.effect)}"
    )


def _effect_text(effect: Effect) -> str:
    if effect.estimate is None:
        return f"{effect.outcome} unknown"
    size, lo, hi = (
        "" if end is None else size_text(end, effect.unit, "+", "x") for end in (effect.estimate, effect.lo, effect.hi)
    )
    interval = f" ({lo} to {hi})" if lo and hi else ""
    return f"{effect.outcome} {effect.verdict}, {size}{interval}"


def chain_table(chain: Sequence[LinkEvidence]) -> QueryResult:
    """One row per link and scope, and one for the skill; `word` is the link's verdict."""
    columns = ("cause", "effect", "word", "scope", "rho", "lo", "hi", "p_adjusted", "runs", "settings")
    columns += ("missing", "diverged")
    rows = []
    for evidence in chain:
        head, skill = (evidence.within.cause, evidence.within.effect, evidence.verdict), evidence.skill
        scopes = [(link.scope, link.rho, link.lo, link.hi, link.p_adjusted, link) for link in evidence.links]
        for *numbers, link in [*scopes, ("held-out skill", skill.value, skill.lo, skill.hi, None, evidence.within)]:
            rows.append((*head, *numbers, link.n_runs, link.n_settings, link.n_missing, link.n_diverged))
    return QueryResult(columns=columns, rows=tuple(rows))
