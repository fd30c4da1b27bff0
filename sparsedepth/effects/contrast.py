"""Paired contrasts: what one knob does to an outcome, over runs that differ in nothing else.

The seed is the unit. With d_s the mean of outcome(setting) - outcome(baseline) over the pairs of seed s = 1..S (see
`pairs`; pairs of one seed share its noise and count once together), and y_ks the mean outcome of side k over them:

    effect = mean(d)                 95% interval: Student's, over seeds; in a family, moderated (see `intervals`)
    noise  = sqrt(sum over k of sum_s (y_ks - mean_k)^2 / 2 (S - 1)),  k = setting, baseline
    floor  = t(2 (S - 1), 0.975) noise sqrt(2 / S):  the smallest difference of two means that seeds do not explain

An effect is called 'lower' or 'higher' only if its interval excludes 0 *and* it exceeds the floor, in a family if
Holm's p is at most ALPHA besides, and only if both sides were tuned alike. Diverged runs are counted
and never averaged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.effects.intervals import Judged, estimate, floor_of, with_extra_variances
from sparsedepth.effects.knobs import Design, Knob, design_of, tuned_fields
from sparsedepth.effects.pairs import (
    BASES,
    COMPENSATES,
    EQUAL_LR,
    LR_OF_SETTING,
    MATCH_TOLERANCE,
    UNKNOWN_SEED,
    is_ratio,
    pairs,
    rounding_sd,
    values_of,
)
from sparsedepth.effects.tuning_error import TuningUncertainty, tuning_of, values_text
from sparsedepth.store.tuning_roles import result_rows


@dataclass(frozen=True, kw_only=True)
class Contrast(Judged):
    """One setting of a knob against its baseline at one depth: an effect's one shape, from here to card and page."""

    knob: str
    setting: str
    baseline: str
    n_layers: int | None
    """None: all depths, as where depth itself is the knob."""
    outcome: str
    baseline_mean: float | None
    """Over the same pairs, in the outcome's own unit (the geometric mean on a log scale)."""
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
    tuned: str = ""
    """'each at its own lr (0.0015 -> 0.006)', baseline first; '' where nothing was tuned."""
    basis: str | None = None
    """What every pair agrees in; None: the pairs differ in nothing but the knob, whatever that costs."""

    @property
    def has_pairs(self) -> bool:
        """Whether any two runs match, finished and measured or not."""
        return bool(self.effect.n + self.n_missing + self.n_diverged + self.n_baseline_diverged)

    def costs_no_more(self, basis: str) -> bool:
        """Whether no pair spends more of a basis at the setting than at the baseline, to 1%."""
        ratio = self.ratios[basis]
        return ratio is not None and ratio[1] <= 1 + MATCH_TOLERANCE

    def matches(self, basis: str) -> bool:
        """Whether every pair agrees on a basis to 1%."""
        ratio = self.ratios[basis]
        return ratio is not None and max(abs(ratio[0] - 1), abs(ratio[1] - 1)) <= MATCH_TOLERANCE


def contrasts(
    runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None = None, design: Design | None = None
) -> list[Contrast]:
    """Every setting against the baseline, at every depth, settings in the knob's order; on one of BASES, or all else
    equal. Those without a pair are absent. `design` is that of these runs, where it is known already.

    Raises ValueError for an outcome that is no number of `runs`.
    """
    design = design or design_of(runs)
    by_depth = _by_depth(pairs(runs, knob, outcome, basis, design), knob, outcome, basis, {})
    return by_depth if basis == EQUAL_LR else at_one_lr(by_depth, runs, knob, design)


def contrasts_on_bases(
    runs: pd.DataFrame, knob: Knob, outcome: str, design: Design | None = None
) -> dict[str | None, list[Contrast]]:
    """The contrasts all else equal (None) and on each of BASES; the same pairs are summarised once."""
    design = design or design_of(runs)
    chosen, known = set(design.chosen) - set(knob.fields), dict[tuple, Contrast]()
    strict = pairs(runs, knob, outcome, design=design)
    by_basis: dict[str | None, list[Contrast]] = {}
    by_basis[None] = at_one_lr(_by_depth(strict, knob, outcome, None, known), runs, knob, design)
    for basis in BASES:
        moves = chosen & set(COMPENSATES[basis])
        agreeing = (strict[basis] - 1).abs() <= MATCH_TOLERANCE
        if agreeing.all() and not moves:
            by_basis[basis] = [replace(contrast, basis=basis) for contrast in by_basis[None]]
            continue
        matched = pairs(runs, knob, outcome, basis, design) if moves else strict[agreeing]
        by_basis[basis] = at_one_lr(_by_depth(matched, knob, outcome, basis, known), runs, knob, design)
    if tuned_fields(result_rows(runs)) == {EQUAL_LR}:
        at_equal_lr = pairs(runs, knob, outcome, EQUAL_LR, design)
        by_basis[EQUAL_LR] = _by_depth(at_equal_lr, knob, outcome, EQUAL_LR, {})
    return by_basis


def _by_depth(
    matched: pd.DataFrame, knob: Knob, outcome: str, basis: str | None, known: dict[tuple, Contrast]
) -> list[Contrast]:
    """`known` holds the contrasts of other bases by their pairs, and is added to."""
    if matched.empty:
        return []
    at_any = "n_layers" in knob.fields
    by = {key: rows for key, rows in matched.groupby("setting" if at_any else ["n_layers", "setting"], sort=False)}
    depths: Sequence[int | None] = [None] if at_any else sorted(set(map(int, matched["n_layers"])))
    compared = []
    for depth in depths:
        for setting in list(knob.settings)[1:]:
            rows = by.get(setting if at_any else (depth, setting))
            if rows is None:
                continue
            same = (depth, setting, *rows["run_id"], *rows["run_id_baseline"])
            if same not in known:
                known[same] = contrast_of(rows, knob, setting, outcome, depth)
            compared.append(replace(known[same], basis=basis))
    return compared


def compare(runs: pd.DataFrame, knob: Knob, setting: str, outcome: str) -> Contrast | None:
    """One setting against the baseline over all the runs given; None if no two runs differ in the knob alone."""
    rows = pairs(runs, knob, outcome)
    rows = rows[rows["setting"] == setting]
    return contrast_of(rows, knob, setting, outcome, None) if len(rows) else None


def over_depths(runs: pd.DataFrame, knob: Knob, outcome: str, design: Design | None = None) -> list[Contrast]:
    """Every setting against the baseline over all the runs given, settings in the knob's order; those without a pair
    are absent. `design` is that of these runs, where it is known already."""
    by_setting = dict(list(pairs(runs, knob, outcome, design=design).groupby("setting", sort=False)))
    settings = (setting for setting in list(knob.settings)[1:] if setting in by_setting)
    return [contrast_of(by_setting[setting], knob, setting, outcome, None) for setting in settings]


class _AtOneLr(NamedTuple):
    """What tells the contrasts of sides at one lr apart."""

    is_lower: bool
    """Whether they test a 'lower', at the setting's lr; a 'higher' is tested at the baseline's."""
    n_layers: int | None
    setting: str


def at_one_lr(
    contrasts: Sequence[Contrast], runs: pd.DataFrame, knob: Knob, design: Design | None = None
) -> list[Contrast]:
    """The same contrasts of configurations each at its own lr; where runs of both sides at one lr exclude the effect
    that was found (`tuned`), what is left of it there is all that a verdict may rest on."""
    if not any(contrast.extra_variances for contrast in contrasts) or tuned_fields(result_rows(runs)) != {EQUAL_LR}:
        return list(contrasts)
    at: dict[_AtOneLr, Contrast] = {}
    for is_lower, basis in ((True, LR_OF_SETTING), (False, EQUAL_LR)):
        rows = pairs(runs, knob, contrasts[0].outcome, basis, design)
        for contrast in _by_depth(rows, knob, contrasts[0].outcome, basis, {}):
            at[_AtOneLr(is_lower, contrast.n_layers, contrast.setting)] = contrast
    return [_held_against(contrast, at) for contrast in contrasts]


def _held_against(contrast: Contrast, at: Mapping[_AtOneLr, Contrast]) -> Contrast:
    mean = contrast.effect.mean or 0.0
    other = at.get(_AtOneLr(mean < 0, contrast.n_layers, contrast.setting))
    if not contrast.extra_variances or other is None or other.effect.lo is None or other.effect.hi is None:
        return contrast
    there = other.effect.mean or 0.0
    if other.effect.covers(mean) or abs(there - mean) <= abs(contrast.expected_regret) or (there - mean) * mean > 0:
        return contrast
    interval = f"95% interval {other.effect.lo:+.3g} to {other.effect.hi:+.3g}"
    ambiguity = f"{other.tuned} ({other.n_seeds} seeds) it is {there:+.3g} ({interval})"
    return replace(contrast, expected_regret=mean - there, tuning_ambiguity=ambiguity)


def contrast_of(rows: pd.DataFrame, knob: Knob, setting: str, outcome: str, depth: int | None) -> Contrast:
    """One setting against the baseline, from the rows of `pairs` that have it; not moderated yet."""
    of_seeds = rows[rows["seed"] != UNKNOWN_SEED]
    rows = of_seeds if len(of_seeds) else rows  # two runs that do not say their seed are no further pair of one
    usable = rows[rows["difference"].notna()]
    by_seed = usable.groupby("seed")[["difference", "value", "value_baseline"]].mean()
    least_sd = rounding_sd(outcome, rows["n_layers"].min(), rows["n_layers_baseline"].min())
    noise, floor = noise_and_floor(by_seed, least_sd)
    baseline = float(usable["value_baseline"].mean()) if len(usable) else None
    diverged, baseline_diverged = rows["diverged"], rows["diverged_baseline"]
    return Contrast(
        knob=knob.name,
        setting=setting,
        baseline=knob.baseline,
        n_layers=depth,
        outcome=outcome,
        unit=str(rows["unit"].iloc[0]),
        baseline_mean=math.exp(baseline) if baseline is not None and is_ratio(outcome) else baseline,
        **effect_fields(by_seed["difference"], len(usable), least_sd, tuning_of(usable)),
        noise=noise,
        floor=floor,
        n_seeds=len(by_seed),
        n_diverged=int(diverged.sum()),
        n_baseline_diverged=int(baseline_diverged.sum()),
        n_at_edge=int(usable["at_edge"].sum()),
        n_missing=int((rows["difference"].isna() & ~diverged & ~baseline_diverged).sum()),
        ratios={basis: _range(usable[basis]) for basis in BASES},
        tuned=values_text(usable),
        run_ids=tuple(sorted({*usable["run_id"], *usable["run_id_baseline"]})),
    )


def effect_fields(difference_S: pd.Series, n: int, least_sd: float, tuning: TuningUncertainty) -> dict[str, Any]:
    """What `intervals.Judged` holds of the differences by seed, of `n` pairs: their interval, which
    `intervals.moderate` replaces in a family, and what tuning adds to it."""
    effect = with_extra_variances(estimate(difference_S.to_numpy(), least_sd), tuning.extra_variances)
    by_seed = tuple(map(float, difference_S))
    return {"effect": replace(effect, n=n), "by_seed": by_seed, "least_sd": least_sd, **vars(tuning)}


def noise_and_floor(by_seed: pd.DataFrame, least_sd: float = 0.0) -> tuple[float | None, float | None]:
    """The noise and the floor of two sides, `value` and `value_baseline`, one row per seed; None of one seed."""
    n = len(by_seed)
    if n < 2:
        return None, None
    spread = math.sqrt(float(by_seed[["value", "value_baseline"]].to_numpy().var(axis=0, ddof=1).mean()))
    return spread, floor_of(spread, 2 * (n - 1), n, least_sd)


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


def _range(ratios: pd.Series) -> tuple[float, float] | None:
    ratio_N = ratios.to_numpy()
    return (float(ratio_N.min()), float(ratio_N.max())) if len(ratio_N) and not np.isnan(ratio_N).any() else None
