"""Paired contrasts: what one knob does to an outcome, over runs that differ in nothing else.

A pair is two runs with the same seed, the same depth and the same value of every other field, one at the knob's
baseline and one at another setting. With d_i = outcome(setting) - outcome(baseline) of pair i = 1..n:

    effect = mean(d)                 95% interval: Student's, over pairs (see `intervals`)
    noise  = sqrt(sum over cells of sum_s (y_cs - mean_c)^2 / sum over cells of (S_c - 1)),  S_c seeds in cell c
    floor  = t(df, 0.975) noise sqrt(2 / n):  the smallest difference of two means of n runs that seeds do not explain

An effect is called 'lower' or 'higher' only if its interval excludes 0 *and* it exceeds the floor. Diverged runs are
counted and never averaged. Variances are compared as ratios: their difference is taken between natural logarithms.

On a *basis* (equal tokens, FLOPs, total or active parameters) only pairs that agree in it to 1% count, and the fields
that a sweep moves to get there (COMPENSATES) may differ as well: a setting that costs more per token may stand beside a
baseline that trained longer. Every comparison is between ends of schedules; nothing is interpolated along a curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.intervals import Estimate, estimate, t_critical
from sparsedepth.effects.knobs import Design, Knob, design_of, keys, labels, trained

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
SIZES = ("d_model", "d_ff", "d_expert")
COMPENSATES: dict[str, tuple[str, ...]] = {
    "tokens": (),
    "params_total": SIZES,
    "params_active": SIZES,
    "flops": (*SIZES, "train_tokens"),
}
"""Basis -> what two runs that agree in it may differ in, beside the knob."""


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
    n_at_edge: int
    """Pairs in which a tuned field (lr) stands at the edge of the values tried, in either run."""
    n_missing: int
    """Pairs of finished runs without the outcome (not measured, or not positive on a log scale)."""
    ratios: dict[str, tuple[float, float] | None]
    """Smallest and largest setting / baseline over these pairs, by basis; None where a run does not say."""
    run_ids: tuple[str, ...]
    basis: str | None = None
    """What every pair agrees in; None: the pairs differ in nothing but the knob, whatever that costs."""

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
    quantity = quantities.run_quantity(outcome)
    if quantity is None or quantity.sql_type == "VARCHAR":
        numbers = [one.name for one in quantities.RUNS if one.sql_type == "DOUBLE"]
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
    return _noise(runs["cell_id"].to_numpy(), values_of(runs, outcome).to_numpy())


def _noise(cell_N: np.ndarray, value_N: np.ndarray) -> tuple[float | None, int]:
    known_N = np.isfinite(value_N)
    cell_N, value_N = pd.factorize(cell_N[known_N])[0], value_N[known_N]
    count_C = np.bincount(cell_N)
    within_N = value_N - (np.bincount(cell_N, value_N) / count_C)[cell_N]
    df = len(value_N) - len(count_C)
    return (math.sqrt(float(within_N @ within_N) / df), df) if df else (None, 0)


def pairs(
    runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None = None, design: Design | None = None
) -> pd.DataFrame:
    """Every matched pair of a knob, one row each; on a basis, those that agree in it, every run in one pair at most.
    `design` is that of these runs, where it is known already.

    Columns: setting, n_layers, seed, match (everything else but depth, as a key), run_id, cell_id, value (on the
    compared scale), difference, diverged, at_edge (of either run), one ratio per basis; n_layers_baseline,
    run_id_baseline, cell_id_baseline, baseline (its value), diverged_baseline.
    """
    unit_of(outcome)
    side = _sides(trained(runs), knob, outcome, basis, design or design_of(runs))
    base = side[side["setting"] == knob.baseline].drop(columns=["setting", "match", "seed"])
    rest = side[side["setting"] != knob.baseline]
    found = rest.merge(base, on="context", suffixes=("", "_baseline"))
    for name in BASES:
        found[name] = found[name] / found[f"{name}_baseline"]
    if basis is not None:
        found = _nearest(found, basis)
    found["difference"] = found["value"] - found["value_baseline"]
    found["at_edge"] = found["at_edge"] | found["at_edge_baseline"]
    named = found.rename(columns={"value_baseline": "baseline"})
    kept = ["setting", "n_layers", "n_layers_baseline", "seed", "match", "run_id", "run_id_baseline", "cell_id"]
    kept += ["cell_id_baseline", "value", "baseline", "difference", "diverged", "diverged_baseline", "at_edge"]
    return named[[*kept, *BASES]]


def _sides(runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None, design: Design) -> pd.DataFrame:
    """One row per run that can be half of a pair; two runs of one `context` may be paired."""
    at_depth = {"n_layers", *design.with_depth}
    free = {*knob.fields, *(COMPENSATES[basis] if basis else ())}
    others = [name for name in design.chosen if name not in free]
    side = pd.DataFrame(
        {
            "setting": labels(runs, knob),
            "context": keys(runs, others),
            "match": keys(runs, [name for name in others if name not in at_depth]),
            "size": keys(runs, [name for name in design.chosen if name in free and name not in knob.fields]),
            "n_layers": runs["n_layers"].astype(int),
            "seed": runs["seed"],
            "run_id": runs["run_id"],
            "cell_id": runs["cell_id"],
            "value": values_of(runs, outcome),
            "diverged": runs["outcome"] == "diverged",
            "at_edge": runs["tuning"] == "edge" if "tuning" in runs.columns else False,
            **{name: pd.to_numeric(runs[column], errors="coerce").astype(float) for name, column in BASES.items()},
        }
    )
    return side.drop_duplicates(["context", "setting", "size"])


def _nearest(found: pd.DataFrame, basis: str) -> pd.DataFrame:
    """The pairs that agree in a basis: of those that share a run, the one of equal sizes, else the nearest."""
    gap = (found[basis] - 1).abs()
    found = found.assign(gap=gap, moved=found["size"] != found["size_baseline"])[gap <= MATCH_TOLERANCE]
    found = found.sort_values(["moved", "gap", "run_id", "run_id_baseline"]).drop_duplicates("run_id")
    return found.drop_duplicates(["setting", "run_id_baseline"]).sort_index()


def contrasts(runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None = None) -> list[Contrast]:
    """Every setting against the baseline, at every depth, settings in the knob's order; on one of BASES, or all else
    equal. Those without a pair are absent.

    Raises ValueError for an outcome that is no number of `runs`.
    """
    return _contrasts(pairs(runs, knob, outcome, basis), knob, outcome, basis, {})


def contrasts_on_bases(
    runs: pd.DataFrame, knob: Knob, outcome: str, design: Design | None = None
) -> dict[str | None, list[Contrast]]:
    """The contrasts all else equal (None) and on each of BASES; the same pairs are summarised once."""
    design = design or design_of(runs)
    chosen, known = set(design.chosen) - set(knob.fields), dict[tuple, Contrast]()
    strict = pairs(runs, knob, outcome, design=design)
    results: dict[str | None, list[Contrast]] = {None: _contrasts(strict, knob, outcome, None, known)}
    for basis in BASES:
        moves = chosen & set(COMPENSATES[basis])
        agreeing = (strict[basis] - 1).abs() <= MATCH_TOLERANCE
        if agreeing.all() and not moves:
            results[basis] = [replace(one, basis=basis) for one in results[None]]
            continue
        found = pairs(runs, knob, outcome, basis, design) if moves else strict[agreeing]
        results[basis] = _contrasts(found, knob, outcome, basis, known)
    return results


def _contrasts(
    found: pd.DataFrame, knob: Knob, outcome: str, basis: str | None, known: dict[tuple, Contrast]
) -> list[Contrast]:
    """`known` holds the contrasts of other bases by their pairs, and is added to."""
    if found.empty:
        return []
    at_any = "n_layers" in knob.fields
    by = {key: rows for key, rows in found.groupby("setting" if at_any else ["n_layers", "setting"], sort=False)}
    depths: Sequence[int | None] = [None] if at_any else sorted(set(map(int, found["n_layers"])))
    results = []
    for depth in depths:
        for setting in list(knob.settings)[1:]:
            rows = by.get(setting if at_any else (depth, setting))
            if rows is None:
                continue
            same = (depth, setting, *rows["run_id"], *rows["run_id_baseline"])
            if same not in known:
                known[same] = _contrast(rows, knob, setting, outcome, depth)
            results.append(replace(known[same], basis=basis))
    return results


def compare(runs: pd.DataFrame, knob: Knob, setting: str, outcome: str) -> Contrast | None:
    """One setting against the baseline over all the runs given; None if no two runs differ in the knob alone."""
    rows = pairs(runs, knob, outcome)
    rows = rows[rows["setting"] == setting]
    return _contrast(rows, knob, setting, outcome, None) if len(rows) else None


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


def _contrast(rows: pd.DataFrame, knob: Knob, setting: str, outcome: str, depth: int | None) -> Contrast:
    usable = rows[rows["difference"].notna()]
    first_N = ~usable["run_id_baseline"].duplicated()  # without a basis, several settings' runs share a baseline's
    base = usable[first_N]
    run_ids = {*usable["run_id"], *base["run_id_baseline"]}
    diverged, baseline_diverged = rows["diverged"], rows["diverged_baseline"]
    least_sd = _rounding_sd(outcome, rows["n_layers"].min(), rows["n_layers_baseline"].min())
    effect = estimate(usable["difference"].to_numpy(), least_sd)
    spread, df = _noise(
        np.concatenate([usable["cell_id"], base["cell_id_baseline"]]),
        np.concatenate([usable["value"], base["baseline"]]),
    )
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
        n_at_edge=int(usable["at_edge"].sum()),
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
