"""Results of a search, in sentences and as a table: importance and partial dependence of each axis, held-out error."""

from collections.abc import Iterator

import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.surrogate import (
    MIN_PROPOSALS,
    MIN_SKILL,
    Surrogate,
    importances,
    proposals,
    surrogate,
)
from sparsedepth.store.degeneracy import degeneracy, score_rows
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import Search
from sparsedepth.store.tuning_roles import result_rows

EXPLAINED = (
    "No two proposals differ in one field only, so there are no paired effects. Importance (Optuna's): how much of the "
    "objective's variation within the search space an axis explains. Partial dependence: a surrogate's mean prediction "
    "at a value of the axis; it is as reliable as the surrogate's predictions of left-out proposals. An adaptive "
    "sampler favours promising regions: its proposals are not a random sample."
)


def search_lines(runs: pd.DataFrame, search: Search, by: str | None = None) -> Iterator[str]:
    """Importance and partial dependence of every axis, for every objective or for `by`."""
    runs = result_rows(runs)
    frame = proposals(runs, search)
    yield f"{search.text}\n{EXPLAINED}"
    for objective in [by] if by in search.objectives else search.objectives:
        finished = int(frame[objective].notna().sum())
        quantity = quantities.IN_RUNS[objective]
        unit = f" [{quantity.unit}]" if quantity.unit not in ("", "1") else ""
        yield f"\n{objective}{unit}, {quantity.better}er is better: {finished} of {len(frame)} proposals finished"
        if caution := degeneracy(objective, score_rows(runs, objective)).text:
            yield f"  {caution}"
        if finished > 1 and frame[objective].nunique() == 1:
            yield "  no analysis: all values are equal"
            continue
        fitted = surrogate(frame, search, objective)
        if fitted is None:
            yield f"  no analysis: it needs {MIN_PROPOSALS} finished proposals and an axis that varies"
            continue
        yield f"  {_skill_text(fitted)}"
        shares = importances(frame, search, objective)
        for axis in fitted.axes:
            importance = ", ".join(f"{name} {by_axis.get(axis.name, 0.0):.0%}" for name, by_axis in shares.items())
            yield f"  {axis.name}: importance {importance}; {_partial_text(fitted, axis.name)}"


def _skill_text(fitted: Surrogate) -> str:
    doubt = ": hardly better than the mean, so importance may be chance, and partial dependence is not shown"
    poor = "" if fitted.skill >= MIN_SKILL else doubt
    return f"left-out proposals: skill {fitted.skill:+.2f}, error {fitted.error:.3g}{poor}"


def _partial_text(fitted: Surrogate, axis: str) -> str:
    if fitted.skill < MIN_SKILL:
        return "partial dependence unreliable"
    curve = fitted.partial(axis)
    sign = quantities.sign(fitted.objective)
    best = max(curve, key=lambda point: sign * point[1])
    worst = min(curve, key=lambda point: sign * point[1])
    return f"partial dependence best at {_value(best[0])} ({best[1]:.4g}), worst at {_value(worst[0])} ({worst[1]:.4g})"


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def search_table(runs: pd.DataFrame, search: Search, by: str | None = None) -> QueryResult:
    """One row per objective, axis and point of its partial dependence."""
    frame = proposals(result_rows(runs), search)
    columns = ("objective", "axis", "ped_anova", "fanova", "value", "partial_dependence", "skill", "error", "proposals")
    rows = []
    for objective in [by] if by in search.objectives else search.objectives:
        fitted, shares = surrogate(frame, search, objective), importances(frame, search, objective)
        for axis in fitted.axes if fitted else ():
            assert fitted is not None
            importance = [shares.get(name, {}).get(axis.name) for name in ("PED-ANOVA", "fANOVA")]
            for value, mean in fitted.partial(axis.name):
                point = (None if value is None else str(value), mean)
                rows.append((objective, axis.name, *importance, *point, fitted.skill, fitted.error, len(fitted.frame)))
    return QueryResult(columns=columns, rows=tuple(rows))
