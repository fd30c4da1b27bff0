"""Words of the chain from sparsity to loss: its table, and the evidence for each link."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparsedepth.words.effects import size_text
from sparsedepth.words.plain_text import commas, counted, interval, wrapped
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.effects.chain import Chain, Intervention, Link, LinkEvidence, Skill
    from sparsedepth.effects.effect import Effect

EXPLAINED = (
    "rho: rank correlation within depth (lo, hi: 95% interval over settings, each with all its runs); "
    "skill: prediction of held-out depths, 1 perfect, 0 no better than their mean; intervention "
    "'confounded': not shown to move only the cause; verdict: associated (rho significant, adjusted over the links), "
    "predicts (and skill above 0), causes (an intervention that moved only the cause moved the effect; other paths, "
    "such as another tuned lr, are not excluded), '-' not distinguishable from 0, 'too few': {} settings are needed "
    "for an interval"
)


def chain_lines(chain: "Chain", detail: bool = False) -> Iterator[str]:
    """A row for each link; with `detail` its evidence in sentences too."""
    if not chain.links:
        yield "no two quantities of the chain were measured in the same runs"
        return
    head = wrapped([f"The chain from sparsity to loss: {_counts_text(chain.links[0].within)}"])
    notes = wrapped([EXPLAINED.format(chain.min_settings), *chain.cautions])
    yield f"{head}{fitted_table(chain.table, ('skill',)).text}\n{notes}".rstrip("\n")
    for evidence in chain.links if detail else ():
        yield link_heading(evidence)
        yield from (f"  {line}" for line in evidence_lines(evidence))


def _counts_text(link: "Link") -> str:
    return f"{counted(link.n_runs, 'run')} of {counted(link.n_settings, 'setting')}"


def link_heading(evidence: "LinkEvidence") -> str:
    return f"{evidence.within.cause} -> {evidence.within.effect}: {evidence.verdict}"


def evidence_lines(evidence: "LinkEvidence") -> Iterator[str]:
    yield from map(_link_text, evidence.links)
    yield _skill_text(evidence.skill)
    yield from map(_intervention_text, evidence.interventions)
    if not evidence.interventions:
        yield "no intervention on this cause in these runs"


def _link_text(link: "Link") -> str:
    """'within depth: associated: rho -0.61 (...), adjusted p 0.02; 24 runs of 8 settings'."""
    verdict = "associated" if link.is_associated else "not distinguishable"
    rho = "rho undefined (too few runs, or one side is constant)"
    if link.rho is not None:
        ends = interval(link.lo, link.hi, "+.2f", "95% interval ")
        p = f", adjusted p {link.p_adjusted:.2g}" if ends and link.p_adjusted is not None else ""
        rho = f"rho {link.rho:+.2f}{ends or ' (too few settings for an interval)'}{p}"
    left_out = f"; excluded: {link.n_missing} not measured, {link.n_diverged} diverged"
    left_out = left_out if link.n_missing or link.n_diverged else ""
    return f"{link.scope}: {verdict}: {rho}; {_counts_text(link)}{left_out}"


def _skill_text(skill: "Skill") -> str:
    depths = commas(skill.depths) or "none"
    if skill.value is None:
        return f"held-out depths: skill unknown (two depths are needed; these runs have: {depths})"
    value = f"{skill.value:+.2f}{interval(skill.lo, skill.hi, '+.2f', '95% interval ')}"
    return f"held-out depths, each of {depths} predicted from the others: skill {value}"


def _intervention_text(tried: "Intervention") -> str:
    controls = "; ".join(map(_effect_text, filter(None, tried.controls)))
    alone = "other causes unchanged" if tried.is_alone else "not shown to move this cause alone"
    alone += f" ({controls})" if controls else ""
    return (
        f"intervention {tried.moved.setting}, n_layers={tried.moved.n_layers}: {_effect_text(tried.moved)}; "
        f"{alone}; {_effect_text(tried.effect)}"
    )


def _effect_text(effect: "Effect") -> str:
    if effect.estimate is None:
        return f"{effect.outcome} unknown"
    size, lo, hi = (
        "" if end is None else size_text(end, effect.unit, "+", "x") for end in (effect.estimate, effect.lo, effect.hi)
    )
    interval = f" ({lo} to {hi})" if lo and hi else ""
    return f"{effect.outcome} {effect.verdict}, {size}{interval}"
