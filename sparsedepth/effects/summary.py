"""Effects, depth slopes and links of the chain as tables for a terminal: the default output of `sparsedepth effects`.

`text_report` has the same in sentences, with the full evidence (--detail).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.causal_evidence import LinkEvidence, chain_evidence
from sparsedepth.effects.chain import MIN_UNITS, cautions
from sparsedepth.effects.intervals import ALPHA, POWER, Judged
from sparsedepth.effects.sentences import UNEVEN
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


def effect_cells(judged: Judged) -> tuple[float | None, ...]:
    """Mean, ends of the interval, and the detectable effect; ratios for differences of logarithms."""
    effect, unit = judged.effect, judged.unit
    return tuple(display_value(value, unit) for value in (effect.mean, effect.lo, effect.hi, judged.detectable))


def display_value(value: float | None, unit: str) -> float | None:
    """The difference; for a difference of logarithms, the ratio."""
    return math.exp(value) if value is not None and _is_ratio(unit) else value


def minus(unit: str) -> str:
    """How a table's head relates setting and baseline: 'minus', or 'over' for ratios."""
    return "over" if _is_ratio(unit) else "minus"


def _is_ratio(unit: str) -> bool:
    return unit.startswith("ln ratio")
