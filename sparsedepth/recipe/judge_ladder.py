"""The verdict on each variant of a ladder: one run at each of several budgets (`scaling.multiplier`).

What decides is ln m, the compute that a variant is worth: at every budget, or at the largest where it drifts. The
variants are one family (Dunnett, as each has the baseline's part of the noise); with three or more of them the noise of
each is drawn to that of the others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import BASELINE
from sparsedepth.effects.verdict import Distribution, adjusted, level_of
from sparsedepth.quantities.levels import ALPHA, POWER
from sparsedepth.quantities.quantity import Named
from sparsedepth.scaling.multiplier import BEYOND, SHARED, MultiplierLaw, laws_of
from sparsedepth.scaling.speedup import FARTHEST, Losses, Speedup as Worth, check_baseline, ladders_of, with_times
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.scaling import beyond_law

COLUMNS = (
    *("variant", "multiplier", "lo", "hi", "p_adjusted", "detectable", "verdict", "budgets", "effect", "p_drift"),
    *("smallest_budget", "at_smallest", "at_smallest_lo", "at_smallest_hi"),
    *("largest_budget", "at_largest", "at_largest_lo", "at_largest_hi"),
    *("beyond_budget", "beyond", "beyond_lo", "beyond_hi", "time_multiplier", "time_lo", "time_hi"),
    *("reason", "time_reason", "baseline"),
)


@dataclass(frozen=True, kw_only=True)
class JudgedLadder:
    table: QueryResult
    """A row for each variant, that worth most first."""
    laws: Mapping[str, MultiplierLaw]


def judge_ladder(
    losses: Mapping[str, Losses], baseline: str, log_speeds: Mapping[str, np.ndarray], asymptote: float | None = None
) -> JudgedLadder:
    """Of variant -> budget [FLOPs] -> run -> loss. `log_speeds`: variant -> ln of its speed over the baseline's, at the
    budgets where both are known. Raises ValueError where the baseline has no law, or the asymptote is not below it."""
    check_baseline(losses[baseline])
    laws = laws_of(losses, baseline, asymptote)
    judged_by = {name: found for name, law in laws.items() if (found := law.judged_by) is not None}
    p_J = np.array([laws[name].p() for name in judged_by])
    shared_J = np.full(len(p_J), SHARED)
    p_adjusted = dict(zip(judged_by, adjusted(p_J, shared_J).tolist(), strict=True)) if judged_by else {}
    level = level_of(shared_J) if judged_by else ALPHA
    rows = []
    for name in losses:
        if name == baseline:
            continue
        row = dict.fromkeys(COLUMNS) | {"variant": name, "baseline": baseline, "verdict": "not shown"}
        row["budgets"] = len(losses[name])
        if name not in laws:
            row["reason"] = "none of its runs has a loss"
        elif name not in judged_by:
            row["reason"] = "one budget beside the baseline's leaves no noise to judge by; run it at three or more"
            row["multiplier"] = _times(laws[name].log_m)
        else:
            row |= _row(laws[name], judged_by[name], p_adjusted[name], level, log_speeds.get(name, np.array([])))
        rows.append(row)
    rows.sort(key=lambda row: -math.inf if row["multiplier"] is None else row["multiplier"], reverse=True)
    return JudgedLadder(table=QueryResult.of_records(rows, COLUMNS), laws=laws)


def judge_ladders(rows: pd.DataFrame) -> QueryResult:
    """Of rows by budget, at each depth. Raises ValueError as `ladders_of`."""
    found = {
        n_layers: judge_ladder(of.losses, BASELINE, of.log_speeds).table for n_layers, of in ladders_of(rows).items()
    }
    judged = [(n_layers, *row) for n_layers, table in found.items() for row in table.rows]
    return QueryResult(columns=("n_layers", *COLUMNS), rows=tuple(judged))


def _row(law: MultiplierLaw, found: Distribution, p: float, level: float, log_speed_B: np.ndarray) -> Named:
    """The fields of a variant: its worth at all budgets, at both ends and beyond, and in time."""
    lo, hi, above = found.quantiles([ALPHA / 2, 1 - ALPHA / 2, POWER])
    detectable = law.least_shown(level) + above - found.estimate
    multiplier, lo, hi = map(_times, (found.estimate, lo, hi))
    if max(multiplier, 1 / multiplier) > FARTHEST:
        return {"reason": beyond_law(FARTHEST)}
    C_B = law.ladder.C_N[law.ladder.is_setting_N]
    largest = C_B.max()
    row: Named = {
        "p_drift": None if law.drift is None else law.drift.p,
        "effect": law.difference(found.estimate, largest),
    }
    places = {"smallest": C_B.min(), "largest": largest, "beyond": BEYOND * largest}
    for place, C in places.items():
        row[f"{place}_budget"] = C
        if (at := law.worth_at(C)) is not None:
            key = place if place == "beyond" else f"at_{place}"
            row |= dict(zip((key, f"{key}_lo", f"{key}_hi"), map(_times, (at.estimate, *at.interval)), strict=True))
    row |= with_times(Worth(multiplier=multiplier, lo=lo, hi=hi), log_speed_B)
    row |= {"p_adjusted": p, "detectable": _times(detectable)}
    return row | {"verdict": "not shown" if not p < ALPHA else "better" if multiplier > 1 else "worse"}


def _times(log: float) -> float:
    return math.exp(min(max(log, -50.0), 50.0))
