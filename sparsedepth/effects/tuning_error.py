"""How tuning bears on a contrast: the tuned values of both sides, the error that choosing them adds, uneven tuning.

A side's mean over n pairs has cells with shares w_c of them; each was run at its own tuned value, whose choice adds
(`store.tuning_curve`)

    sum over c of w_c^2 variance_c      for the setting, and the same for the baseline

to the variance of the effect, which the seeds of the results, all at one value, do not show. How far the values are
expected to lie above their best, setting minus baseline, is the effect's *expected regret*: a verdict that depends on
it is withheld (`intervals.Judged`). Both are known for the objective of tuning, and for either loss if that is one.

Runs of both sides at one lr bound the effect of sides at their best, L_s and L_b: with lr_s and lr_b those chosen

    L_s(lr_s) - L_b(lr_s)  <=  L_s(best) - L_b(best)  <=  L_s(lr_b) - L_b(lr_b)       (as far as these are the best)

so that 'lower' is contradicted by runs of both at lr_s, 'higher' by runs of both at lr_b, where these show no such
effect and exclude the one measured.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.intervals import ExtraVariance
from sparsedepth.store.comparable_loss import COMMON, OWN
from sparsedepth.store.tuning_roles import parse_tuned_fields

NUMBERS = ("tuning_variance", "tuning_df", "tuning_excess")
SIDE = ("tuned_fields", "tuned_at", "tuned_values", "tuned_rivals", "tuning_n_seeds", *NUMBERS)
"""Tuning columns of each side of a pair."""
LOSSES = {OWN, COMMON}


def tuned_side(runs: pd.DataFrame, outcome: str) -> pd.DataFrame:
    """The columns of SIDE, a row per run: `tuned_at` is the value as text, the variance that of the outcome."""
    side = pd.DataFrame(None, index=runs.index, columns=[*SIDE], dtype=object)
    if "tuned_fields" not in runs.columns:
        return side
    side["tuned_fields"] = runs["tuned_fields"]
    for text in runs["tuned_fields"].dropna().unique():
        rows = runs[runs["tuned_fields"] == text]
        names = list(parse_tuned_fields(text))
        values = rows[names].itertuples(index=False)
        side.loc[rows.index, "tuned_at"] = [" and ".join(f"{value:g}" for value in row) for row in values]
    if "tuning_variance" in runs.columns:
        is_tuned_outcome = (runs["tuned_by"] == outcome) | (runs["tuned_by"].isin(LOSSES) & (outcome in LOSSES))
        for name in ("tuned_values", "tuned_rivals", "tuning_n_seeds"):
            side[name] = runs[name]
        for name in NUMBERS:
            side[name] = pd.to_numeric(runs[name]).where(is_tuned_outcome)
    return side


@dataclass(frozen=True, kw_only=True)
class TuningUncertainty:
    """How tuning bears on an effect: the fields of `intervals.Judged` for it."""

    extra_variances: tuple[ExtraVariance, ...] = ()
    expected_regret: float = 0.0
    tuning_flaw: str = ""
    tuning_ambiguity: str = ""

    def minus(self, other: "TuningUncertainty") -> "TuningUncertainty":
        """For the difference of two effects."""
        return TuningUncertainty(
            extra_variances=(*self.extra_variances, *other.extra_variances),
            expected_regret=self.expected_regret - other.expected_regret,
            tuning_flaw=self.tuning_flaw or other.tuning_flaw,
            tuning_ambiguity=self.tuning_ambiguity or other.tuning_ambiguity,
        )


def tuning_of(rows: pd.DataFrame, weights: pd.Series | None = None) -> TuningUncertainty:
    """How tuning bears on the mean difference of these pairs, or on their sum with other `weights`."""
    if at_equal_lr(rows) or all(rows[f"tuned_fields{end}"].isna().all() for end in ("", "_baseline")):
        return TuningUncertainty()
    weights = pd.Series(1 / len(rows), rows.index) if weights is None else weights
    sides = {end: rows[f"tuning_excess{end}"].astype(float) for end in ("", "_baseline")}
    regret = float((weights * (sides[""] - sides["_baseline"])).sum())
    end = "" if regret > 0 else "_baseline"
    ambiguity = _ambiguity(rows.loc[sides[end].idxmax()], end) if sides[end].notna().any() else ""
    return TuningUncertainty(
        extra_variances=choice_variances(rows, weights),
        expected_regret=regret,
        tuning_flaw=_flaw_of(rows),
        tuning_ambiguity=ambiguity,
    )


def _ambiguity(pair: pd.Series, end: str) -> str:
    """'the baseline's lr 0.006 was chosen with 2 seeds, which cannot distinguish it from 0.0015 or 0.003'."""
    side, rivals, n_seeds = "baseline" if end else "setting", pair[f"tuned_rivals{end}"], pair[f"tuning_n_seeds{end}"]
    field = " and ".join(parse_tuned_fields(pair[f"tuned_fields{end}"]))
    value = f"the {side}'s {field} {pair[f'tuned_at{end}']}"
    if isinstance(rivals, str) and rivals:
        seeds = counted(int(n_seeds), "seed")
        return f"{value} was chosen with {seeds}, which cannot distinguish it from {' or '.join(rivals.split(','))}"
    return f"{value} is not at the optimum that the losses of the other values suggest"


def choice_variances(rows: pd.DataFrame, weights: pd.Series) -> tuple[ExtraVariance, ...]:
    """The variances that choosing tuned values adds to the sum of these pairs with `weights`, one per side."""
    extra: list[ExtraVariance] = []
    for end in ("", "_baseline") if rows["tuning_variance"].notna().any() else ():
        tuned = rows[rows[f"tuning_variance{end}"].notna()]
        weight_C = weights[tuned.index].groupby(tuned[f"cell_id{end}"]).sum()
        variance_C = tuned.groupby(f"cell_id{end}")[f"tuning_variance{end}"].first().astype(float)
        variance = float((weight_C**2 * variance_C).sum())
        if variance > 0:
            cells = tuple(weight_C.index) if end else ()
            extra.append(ExtraVariance(variance=variance, df=float(tuned[f"tuning_df{end}"].min()), baseline=cells))
    return tuple(extra)


def values_text(rows: pd.DataFrame) -> str:
    """'each at its own tuned lr (0.0015 -> 0.006)', baseline first, or 'both at lr 0.0015'; '' without tuning."""
    fields = {*rows["tuned_fields"].dropna()} & {*rows["tuned_fields_baseline"].dropna()}
    if len(fields) != 1:
        return ""
    field = " and ".join(parse_tuned_fields(fields.pop()))
    before, after = (_distinct(rows[f"tuned_at{end}"].dropna()) for end in ("_baseline", ""))
    return f"both at {field} {before}" if at_equal_lr(rows) else f"each at its own tuned {field} ({before} -> {after})"


def at_equal_lr(rows: pd.DataFrame) -> bool:
    """Whether both sides of these pairs have the same lr, instead of their tuned values."""
    return "matched_lr" in rows.columns and bool(rows["matched_lr"].any())


def _distinct(values: Iterable[str]) -> str:
    return " or ".join(sorted({*values}, key=lambda text: [float(part) for part in text.split(" and ")]))


def _flaw_of(rows: pd.DataFrame) -> str:
    """Why the two sides of these pairs were not tuned alike; '' where they were."""
    names = [f"{name}{end}" for end in ("", "_baseline") for name in ("tuned_fields", "tuned_at", "tuned_values")]
    choices = rows[names].dropna().drop_duplicates().itertuples(index=False, name=None)
    return next(filter(None, (_flaw(*choice) for choice in choices)), "")


def _flaw(field: str, at: str, values: str, field_baseline: str, at_baseline: str, values_baseline: str) -> str:
    if field != field_baseline:
        return f"the setting's {field} was tuned, and the baseline's {field_baseline}"
    sides = {"setting": (float(at), _numbers(values)), "baseline": (float(at_baseline), _numbers(values_baseline))}
    for side, (value, tried) in sides.items():
        if value in (tried[0], tried[-1]):
            end = "lowest" if value == tried[0] else "highest"
            return f"the {side}'s best {field} is the {end} tried ({value:g}): a better one may lie beyond it"
    step = max(_step(*choice) for choice in sides.values())
    near, near_baseline = (_count(*choice, step) for choice in sides.values())
    if near != near_baseline:
        return f"{near} values of {field} were tried around the setting's best, {near_baseline} around the baseline's"
    return ""


def _numbers(values: str) -> list[float]:
    return [float(value) for value in values.split(",")]


def _step(value: float, tried: list[float]) -> float:
    """The larger ratio to a neighbour of an inner value, as a logarithm."""
    i = tried.index(value)
    return max(math.log(tried[i + 1] / value), math.log(value / tried[i - 1]))


def _count(value: float, tried: list[float], step: float) -> int:
    return sum(abs(math.log(other / value)) <= 1.01 * step for other in tried)
