"""Paired contrasts: what one knob does to an outcome, over runs that differ in nothing else.

A pair is two runs with the same seed, the same depth and the same value of every other field, one at the knob's
baseline and one at another setting. With d_i = outcome(setting) - outcome(baseline) of pair i = 1..n:

    effect = mean(d)                 95% interval: Student's, over pairs (see `intervals`)
    noise  = sqrt(sum over cells of sum_s (y_cs - mean_c)^2 / sum over cells of (S_c - 1)),  S_c seeds in cell c
    floor  = t(df, 0.975) noise sqrt(2 / n):  the smallest difference of two means of n runs that seeds do not explain

An effect is called 'lower' or 'higher' only if its interval excludes 0 *and* it exceeds the floor. Diverged runs are
counted and never averaged. Variances are compared as ratios: their difference is taken between natural logarithms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from sparsedepth import glossary
from sparsedepth.effects.intervals import Estimate, estimate, t_critical
from sparsedepth.effects.knobs import Knob, chosen_fields, depth_knob, keys, labels, trained

Verdict = Literal["lower", "higher", "not distinguishable"]

LOGGED = ("residual_variance_last", "residual_variance_growth")
"""Positive outcomes that range over orders of magnitude."""

BASES = {
    "tokens": "tokens_trained",
    "params_total": "params_total",
    "params_active": "params_active",
    "flops": "train_flops",
}
"""What two runs can have in common, by the name that a sweep's `matched` uses -> the column that tells."""
MATCH_TOLERANCE = 0.01
"""A basis counts as matched if every pair agrees to 1%."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One setting of a knob against its baseline at one depth (all depths where depth itself is the knob)."""

    knob: str
    setting: str
    baseline: str
    n_layers: int | None
    outcome: str
    unit: str
    """Of `effect` and `floor`; 'ln ratio' where the outcome is compared on a log scale."""
    baseline_mean: float | None
    """Over the same pairs, in the outcome's own unit (the geometric mean on a log scale)."""
    effect: Estimate
    noise: float | None
    """Standard deviation over seeds, pooled over the cells of these pairs; None without two seeds in any cell."""
    noise_df: int
    floor: float | None
    n_seeds: int
    n_diverged: int
    """Matched pairs of which the setting's run diverged."""
    n_baseline_diverged: int
    n_missing: int
    """Pairs of finished runs without the outcome (not measured, or not positive on a log scale)."""
    ratios: dict[str, tuple[float, float] | None]
    """Smallest and largest setting / baseline over these pairs, by basis; None where a run does not say."""
    run_ids: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        mean = self.effect.mean
        if mean is None or self.floor is None or not self.effect.excludes_zero or abs(mean) <= self.floor:
            return "not distinguishable"
        return "higher" if mean > 0 else "lower"

    def costs_no_more(self, basis: str) -> bool:
        """Whether no pair spends more of a basis at the setting than at the baseline, to 1%."""
        ratio = self.ratios[basis]
        return ratio is not None and ratio[1] <= 1 + MATCH_TOLERANCE

    def matches(self, basis: str) -> bool:
        """Whether every pair agrees on a basis to 1%."""
        ratio = self.ratios[basis]
        return ratio is not None and max(abs(ratio[0] - 1), abs(ratio[1] - 1)) <= MATCH_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """What depth does to an effect: effect(deep) - effect(shallow), paired by seed and everything else."""

    knob: str
    setting: str
    baseline: str
    shallow: int
    deep: int
    outcome: str
    unit: str
    difference: Estimate

    @property
    def verdict(self) -> Verdict:
        if self.difference.mean is None or not self.difference.excludes_zero:
            return "not distinguishable"
        return "higher" if self.difference.mean > 0 else "lower"


def unit_of(outcome: str) -> str:
    """The unit of a difference in this outcome. Raises ValueError for a name that is no number of `runs`."""
    quantity = glossary.run_quantity(outcome)
    if quantity is None or quantity.sql_type == "VARCHAR":
        numbers = [one.name for one in glossary.RUNS if one.sql_type == "DOUBLE"]
        known = ", ".join(name for name in numbers if not name.endswith(("_lo", "_hi")))
        raise ValueError(f"outcome {outcome!r} is not a measured number of a run; choose one of: {known}")
    return "ln ratio" if outcome in LOGGED else quantity.unit


def values_of(runs: pd.DataFrame, outcome: str) -> pd.Series:
    """The outcome on the scale on which it is compared; NaN where it is missing or the run diverged."""
    values = pd.to_numeric(runs[outcome], errors="coerce").astype(float)
    if outcome in LOGGED:
        values = np.log(values.where(values > 0))
    return values.where(runs["outcome"] == "ok")


def noise(runs: pd.DataFrame, outcome: str) -> tuple[float | None, int]:
    """Standard deviation over seeds within a cell, pooled over cells and depths, and its degrees of freedom."""
    frame = pd.DataFrame({"cell": runs["cell_id"], "value": values_of(runs, outcome)}).dropna()
    within = frame["value"] - frame.groupby("cell")["value"].transform("mean")
    df = len(frame) - frame["cell"].nunique()
    return (math.sqrt(float((within**2).sum()) / df), df) if df else (None, 0)


def pairs(runs: pd.DataFrame, knob: Knob, outcome: str) -> pd.DataFrame:
    """Every matched pair of a knob, one row each.

    Columns: setting, n_layers, seed, match (everything else but depth, as a key), run_id, baseline and difference (on
    the compared scale), diverged, n_layers_baseline, run_id_baseline, diverged_baseline, and one ratio per basis.
    """
    unit_of(outcome)
    runs = trained(runs)
    depth = depth_knob(runs)
    at_depth = {"n_layers", *(depth.fields if depth else ())}
    others = [name for name in chosen_fields(runs) if name not in knob.fields]
    side = pd.DataFrame(
        {
            "setting": labels(runs, knob),
            "context": keys(runs, others),
            "match": keys(runs, [name for name in others if name not in at_depth]),
            "n_layers": runs["n_layers"].astype(int),
            "seed": runs["seed"],
            "run_id": runs["run_id"],
            "value": values_of(runs, outcome),
            "diverged": runs["outcome"] == "diverged",
            **{basis: pd.to_numeric(runs[column], errors="coerce") for basis, column in BASES.items()},
        }
    ).drop_duplicates(["context", "setting"])
    base = side[side["setting"] == knob.baseline].drop(columns=["setting", "match", "seed"])
    rest = side[side["setting"] != knob.baseline]
    found = rest.merge(base, on="context", suffixes=("", "_baseline"))
    for basis in BASES:
        found[basis] = found[basis] / found[f"{basis}_baseline"]
    found["difference"] = found["value"] - found["value_baseline"]
    kept = ["setting", "n_layers", "n_layers_baseline", "seed", "match", "run_id", "run_id_baseline", "value_baseline"]
    found = found[[*kept, "difference", "diverged", "diverged_baseline", *BASES]]
    return found.rename(columns={"value_baseline": "baseline"})


def contrasts(runs: pd.DataFrame, knob: Knob, outcome: str) -> list[Contrast]:
    """Every setting against the baseline, at every depth, settings in the knob's order.

    Raises ValueError for an outcome that is no number of `runs`.
    """
    found = pairs(runs, knob, outcome)
    at = sorted(set(map(int, trained(runs)["n_layers"])))
    depths: Sequence[int | None] = [None] if "n_layers" in knob.fields else at
    results = []
    for depth in depths:
        there = found if depth is None else found[found["n_layers"] == depth]
        for setting in list(knob.settings)[1:]:
            rows = there[there["setting"] == setting]
            if len(rows):
                results.append(_contrast(runs, rows, knob, setting, outcome, depth))
    return results


def compare(runs: pd.DataFrame, knob: Knob, setting: str, outcome: str) -> Contrast | None:
    """One setting against the baseline over all the runs given; None if no two runs differ in the knob alone."""
    rows = pairs(runs, knob, outcome)
    rows = rows[rows["setting"] == setting]
    return _contrast(runs, rows, knob, setting, outcome, None) if len(rows) else None


def interactions(runs: pd.DataFrame, knob: Knob, outcome: str) -> list[Interaction]:
    """Whether each setting's effect differs between the shallowest and the deepest depth at which it was run."""
    if "n_layers" in knob.fields:
        return []
    found = pairs(runs, knob, outcome).dropna(subset=["difference"])
    results = []
    for setting in list(knob.settings)[1:]:
        rows = found[found["setting"] == setting]
        depths = sorted(set(map(int, rows["n_layers"])))
        if len(depths) < 2:
            continue
        shallow, deep = depths[0], depths[-1]
        at_shallow, at_deep = (rows[rows["n_layers"] == depth] for depth in (shallow, deep))
        both = at_deep.merge(at_shallow, on="match", suffixes=("", "_shallow"))
        least_sd = _rounding_sd(outcome, shallow, shallow, deep, deep)
        difference = estimate((both["difference"] - both["difference_shallow"]).to_numpy(), least_sd)
        results.append(
            Interaction(
                knob=knob.name,
                setting=setting,
                baseline=knob.baseline,
                shallow=shallow,
                deep=deep,
                outcome=outcome,
                unit=unit_of(outcome),
                difference=difference,
            )
        )
    return results


def _contrast(
    runs: pd.DataFrame, rows: pd.DataFrame, knob: Knob, setting: str, outcome: str, depth: int | None
) -> Contrast:
    usable = rows.dropna(subset=["difference"])
    run_ids = {*usable["run_id"], *usable["run_id_baseline"]}
    diverged, baseline_diverged = rows["diverged"], rows["diverged_baseline"]
    least_sd = _rounding_sd(outcome, rows["n_layers"].min(), rows["n_layers_baseline"].min())
    effect = estimate(usable["difference"].to_numpy(), least_sd)
    spread, df = noise(runs[runs["run_id"].isin(run_ids)], outcome)
    floor = None
    if spread is not None:
        floor = t_critical(df) * max(spread * math.sqrt(2), least_sd) / math.sqrt(effect.n)
    baseline = float(usable["baseline"].mean()) if effect.n else None
    return Contrast(
        knob=knob.name,
        setting=setting,
        baseline=knob.baseline,
        n_layers=depth,
        outcome=outcome,
        unit=unit_of(outcome),
        baseline_mean=math.exp(baseline) if baseline is not None and outcome in LOGGED else baseline,
        effect=effect,
        noise=spread,
        noise_df=df,
        floor=floor,
        n_seeds=int(usable["seed"].nunique()),
        n_diverged=int(diverged.sum()),
        n_baseline_diverged=int(baseline_diverged.sum()),
        n_missing=int((rows["difference"].isna() & ~diverged & ~baseline_diverged).sum()),
        ratios={basis: _range(usable[basis]) for basis in BASES},
        run_ids=tuple(sorted(run_ids)),
    )


def _rounding_sd(outcome: str, *depths: int) -> float:
    """Standard deviation that rounding alone gives a difference of runs at these depths: usefulness counts layers, so
    it moves in steps h of 1/n_layers, and seeds may agree by chance. A rounding error has variance h^2 / 12."""
    steps = {"usefulness": [1 / depth for depth in depths], "effective_layers": [1.0 for _ in depths]}.get(outcome, [])
    return math.sqrt(sum(step**2 for step in steps) / 12)


def _range(ratios: pd.Series) -> tuple[float, float] | None:
    return (float(ratios.min()), float(ratios.max())) if len(ratios) and ratios.notna().all() else None
