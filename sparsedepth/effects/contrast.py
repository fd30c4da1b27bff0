"""Paired contrasts: the effect of one knob on an outcome, over runs that differ in nothing else.

The seed is the unit. With d_s the mean of outcome(setting) - outcome(baseline) over the pairs of seed s = 1..S (see
`pairs`; pairs of one seed share its noise and count once together), and y_ks the mean outcome of side k over them:

    effect = mean(d)                 95% interval: Student's, over seeds; in a family, moderated (see `intervals`)
    noise  = sqrt(sum over k of sum_s (y_ks - mean_k)^2 / 2 (S - 1)),  k = setting, baseline
    floor  = t(2 (S - 1), 0.975) noise sqrt(2 / S):  the smallest difference of two means that exceeds seed noise

Each *context* (depth and all other fields) has equal weight, also where it has fewer seeds (`seed_means`): else
the design, not the question, would decide what the effect is an average of.

An effect is called 'lower' or 'higher' only if its interval excludes 0, it exceeds the floor, Holm's p over its family
is at most ALPHA, and both sides were tuned alike. Diverged runs are counted and never averaged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import is_ratio, values_of
from sparsedepth.effects.intervals import Judged, estimate, floor_of, with_extra_variances
from sparsedepth.effects.knobs import Design, Knob, design_of, tuned_fields
from sparsedepth.effects.pairs import (
    BASES,
    EQUAL_LR,
    LR_OF_SETTING,
    MATCH_TOLERANCE,
    UNKNOWN_SEED,
    pairs,
    rounding_sd,
)
from sparsedepth.effects.seed_means import seed_means
from sparsedepth.effects.tuning_error import TuningUncertainty, tuning_of, values_text
from sparsedepth.store.tuning_roles import result_rows


@dataclass(frozen=True, kw_only=True)
class Contrast(Judged):
    """One setting of a knob against its baseline at one depth: the one record of an effect, up to card and report."""

    knob: str
    setting: str
    baseline: str
    n_layers: int | None
    """None: all depths together, or depth is the knob."""
    outcome: str
    baseline_mean: float | None
    """Over the same pairs, in the outcome's unit (geometric mean for ratios)."""
    n_seeds: int
    n_diverged: int
    """Matched pairs whose run at the setting diverged."""
    n_baseline_diverged: int
    n_at_edge: int
    """Pairs in which a tuned field (lr) is at the edge of the values tried, in either run."""
    n_missing: int
    """Pairs of finished runs without the outcome (not measured, or not positive for ratios)."""
    ratios: dict[str, tuple[float, float] | None]
    """Smallest and largest setting / baseline over these pairs, by basis; None where unknown."""
    run_ids: tuple[str, ...]
    deepest: int
    """The largest n_layers of its runs: the noise between seeds often grows with depth."""
    tuned: str = ""
    """'each at its own tuned lr (0.0015 -> 0.006)', baseline first; '' without tuning."""
    basis: str | None = None
    """What the pairs are matched on; None: they differ in nothing but the knob, whatever that costs."""

    @property
    def noise_depth(self) -> int | None:
        return self.deepest if self.knob == "n_layers" else self.n_layers

    @property
    def key(self) -> tuple[int | None, str]:
        """n_layers and setting: which effect on an outcome it is."""
        return self.n_layers, self.setting

    @property
    def has_pairs(self) -> bool:
        """Whether any two runs match, even if one diverged or lacks the outcome."""
        return bool(self.effect.n + self.n_missing + self.n_diverged + self.n_baseline_diverged)

    def costs_no_more(self, basis: str) -> bool:
        """Whether no pair spends more of a basis at the setting than at the baseline, to 1%."""
        ratio = self.ratios[basis]
        return ratio is not None and ratio[1] <= 1 + MATCH_TOLERANCE

    def matches(self, basis: str) -> bool:
        """Whether every pair agrees on a basis to 1%."""
        ratio = self.ratios[basis]
        return ratio is not None and max(abs(ratio[0] - 1), abs(ratio[1] - 1)) <= MATCH_TOLERANCE


def contrasts(runs: pd.DataFrame, knob: Knob, outcome: str, design: Design | None = None) -> list[Contrast]:
    """Every setting against the baseline, all else equal, at every depth, settings in the knob's order; settings
    without a pair are absent. `design`: `design_of(runs)`, if already computed.

    Raises ValueError for an outcome that is no number of `runs`.
    """
    design = design or design_of(runs)
    by_depth = _by_depth(pairs(runs, knob, outcome, design=design), knob, outcome, None, {})
    return check_at_one_lr(by_depth, runs, knob, design)


def _by_depth(
    matched: pd.DataFrame, knob: Knob, outcome: str, basis: str | None, cache: dict[tuple, Contrast]
) -> list[Contrast]:
    """`cache`: contrasts by their pairs, shared by the bases of a knob."""
    if matched.empty:
        return []
    is_depth = "n_layers" in knob.fields
    by = {key: rows for key, rows in matched.groupby("setting" if is_depth else ["n_layers", "setting"], sort=False)}
    depths: Sequence[int | None] = [None] if is_depth else sorted(set(map(int, matched["n_layers"])))
    contrasts = []
    for depth in depths:
        for setting in list(knob.settings)[1:]:
            rows = by.get(setting if is_depth else (depth, setting))
            if rows is None:
                continue
            key = (depth, setting, *rows["run_id"], *rows["run_id_baseline"])
            if key not in cache:
                cache[key] = contrast_of(rows, knob, setting, outcome, depth)
            contrasts.append(replace(cache[key], basis=basis))
    return contrasts


def compare(runs: pd.DataFrame, knob: Knob, setting: str, outcome: str) -> Contrast | None:
    """One setting against the baseline over all these runs; None if no two runs differ in the knob alone."""
    rows = pairs(runs, knob, outcome)
    rows = rows[rows["setting"] == setting]
    return contrast_of(rows, knob, setting, outcome, None) if len(rows) else None


def over_depths(runs: pd.DataFrame, knob: Knob, outcome: str, design: Design | None = None) -> list[Contrast]:
    """Every setting against the baseline over all these runs, settings in the knob's order; settings without a pair are
    absent. `design`: `design_of(runs)`, if already computed."""
    by_setting = dict(list(pairs(runs, knob, outcome, design=design).groupby("setting", sort=False)))
    settings = (setting for setting in list(knob.settings)[1:] if setting in by_setting)
    return [contrast_of(by_setting[setting], knob, setting, outcome, None) for setting in settings]


def check_at_one_lr(contrasts: Sequence[Contrast], runs: pd.DataFrame, knob: Knob, design: Design) -> list[Contrast]:
    """Check contrasts of sides each at its own tuned lr against runs of both at one lr: of a lower outcome at the
    setting's lr, of a higher one at the baseline's (`tuning_error`). Where those exclude the effect, the verdict must
    hold for the effect that they show."""
    if not any(contrast.extra_variances for contrast in contrasts) or tuned_fields(result_rows(runs)) != {EQUAL_LR}:
        return list(contrasts)
    outcome, by_basis = contrasts[0].outcome, dict[str, dict[tuple[int | None, str], Contrast]]()
    for basis in (LR_OF_SETTING, EQUAL_LR):
        same_lr = _by_depth(pairs(runs, knob, outcome, basis, design), knob, outcome, basis, {})
        by_basis[basis] = {contrast.key: contrast for contrast in same_lr}
    checked = []
    for contrast in contrasts:
        is_lower = (contrast.effect.mean or 0.0) < 0
        same_lr = by_basis[LR_OF_SETTING if is_lower else EQUAL_LR].get(contrast.key)
        checked.append(_checked(contrast, same_lr) if same_lr else contrast)
    return checked


def _checked(contrast: Contrast, same_lr: Contrast) -> Contrast:
    mean, other, lo, hi = contrast.effect.mean or 0.0, same_lr.effect.mean or 0.0, same_lr.effect.lo, same_lr.effect.hi
    if not contrast.extra_variances or lo is None or hi is None or lo <= mean <= hi:
        return contrast
    if abs(other - mean) <= abs(contrast.expected_regret) or (other - mean) * mean > 0:
        return contrast
    ambiguity = f"{same_lr.tuned} ({same_lr.n_seeds} seeds) it is {other:+.3g} (95% interval {lo:+.3g} to {hi:+.3g})"
    return replace(contrast, expected_regret=mean - other, tuning_ambiguity=ambiguity)


def contrast_of(rows: pd.DataFrame, knob: Knob, setting: str, outcome: str, depth: int | None) -> Contrast:
    """One setting against the baseline, from its rows of `pairs`; not yet moderated."""
    with_seed = rows[rows["seed"] != UNKNOWN_SEED]
    rows = with_seed if len(with_seed) else rows  # beside known seeds, runs of unknown seed are not one more seed
    usable = rows[rows["difference"].notna()]
    context = usable.groupby(["context", "n_layers"], sort=False).ngroup()
    means = seed_means(usable[["difference", "value", "value_baseline"]], usable["seed"], context)
    least_sd = rounding_sd(outcome, rows["n_layers"].min(), rows["n_layers_baseline"].min())
    noise, floor = noise_and_floor(means.by_seed, least_sd, means.df)
    baseline = float(means.by_seed["value_baseline"].mean()) if len(usable) else None
    diverged, baseline_diverged = rows["diverged"], rows["diverged_baseline"]
    return Contrast(
        knob=knob.name,
        setting=setting,
        baseline=knob.baseline,
        n_layers=depth,
        outcome=outcome,
        unit=str(rows["unit"].iloc[0]),
        baseline_mean=math.exp(baseline) if baseline is not None and is_ratio(outcome) else baseline,
        **effect_fields(means.by_seed["difference"], len(usable), least_sd, tuning_of(usable, means.weights), means.df),
        noise=noise,
        floor=floor,
        n_seeds=len(means.by_seed),
        n_diverged=int(diverged.sum()),
        n_baseline_diverged=int(baseline_diverged.sum()),
        n_at_edge=int(usable["at_edge"].sum()),
        n_missing=int((rows["difference"].isna() & ~diverged & ~baseline_diverged).sum()),
        ratios={basis: _range(usable[basis]) for basis in BASES},
        deepest=int(rows[["n_layers", "n_layers_baseline"]].to_numpy().max()),
        tuned=values_text(usable),
        run_ids=tuple(sorted({*usable["run_id"], *usable["run_id_baseline"]})),
    )


def effect_fields(
    difference_S: pd.Series, n: int, least_sd: float, tuning: TuningUncertainty, df: float | None = None
) -> dict[str, Any]:
    """The fields of `intervals.Judged` from the differences by seed, of `n` pairs: their interval, which
    `intervals.moderate` replaces in a family, and the uncertainty from tuning. `df`: of `SeedMeans`."""
    effect = with_extra_variances(estimate(difference_S.to_numpy(), least_sd, df), tuning.extra_variances)
    by_seed = tuple(map(float, difference_S))
    fields = {"effect": replace(effect, n=n), "by_seed": by_seed, "seed_df": df, "least_sd": least_sd}
    return {**fields, **vars(tuning)}


def noise_and_floor(
    by_seed: pd.DataFrame, least_sd: float = 0.0, df: float | None = None
) -> tuple[float | None, float | None]:
    """Noise and floor of two sides, `value` and `value_baseline`, one row per seed; None with one seed."""
    n = len(by_seed)
    if n < 2:
        return None, None
    sd = math.sqrt(float(by_seed[["value", "value_baseline"]].to_numpy().var(axis=0, ddof=1).mean()))
    return sd, floor_of(sd, 2 * (df or n - 1), n, least_sd)


def noise(runs: pd.DataFrame, outcome: str) -> tuple[float | None, int]:
    """Standard deviation over seeds within a cell, pooled over cells and depths, and its degrees of freedom."""
    values = values_of(runs, outcome)
    is_known = np.isfinite(values)
    cell_N, value_N = pd.factorize(runs["cell_id"][is_known])[0], values[is_known].to_numpy()
    count_C = np.bincount(cell_N)
    within_N = value_N - (np.bincount(cell_N, value_N) / count_C)[cell_N]
    df = len(value_N) - len(count_C)
    return (math.sqrt(float(within_N @ within_N) / df), df) if df else (None, 0)


def _range(ratios: pd.Series) -> tuple[float, float] | None:
    ratio_N = ratios.to_numpy()
    return (float(ratio_N.min()), float(ratio_N.max())) if len(ratio_N) and not np.isnan(ratio_N).any() else None
