"""Power before running: which effects a design detects, and how many seeds a given effect needs.

Simulated results of the planned runs get the verdict itself (`all_effects.judge`: seeds as units, moderated variances,
the noise floor, Holm's first step). With T_b the threshold of a contrast's mean in draw b (`Judged.threshold`) and s_b
the standard deviation of that mean, the design detects the effect d with

    mean over draws of Phi((d - T_b) / s_b) = POWER          s_b^2 = 2 own_b^2 / (P S) + 2 choice / P

at P pairs per seed and S seeds; contrasts with the same numbers of pairs, seeds and settings at their depth share it.
The mean need not be drawn, since it is independent of the spread.

Noise of a run: `own`, independent in every run, and `shared`, common to all runs of a seed at a depth, which cancels in
a pair (only the floor includes it). A pilot estimates both from its cells x seeds at each depth,

    own^2 = sum (y_cs - mean_c - mean_s + mean)^2 / df        df = sum over depths (C - 1) (S - 1)
    own^2 + shared^2 = the pooled variance within cells

and its uncertainty is included: each draw has own_b^2 = own^2 df / chi^2(df). `choice` is the variance that choosing a
tuned value adds to a configuration's mean (`store.tuning_curve`), the same in all its seeds.

Shapes: B draws, S seeds, C cells, P pairs.
"""

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import ndtr

from sparsedepth.config.plain_text import counted
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.all_effects import all_knobs, judge
from sparsedepth.effects.cells import unit_of, values_of
from sparsedepth.effects.contrast import Contrast, contrasts, effect_fields, noise, noise_and_floor
from sparsedepth.effects.intervals import ALPHA, POWER, ExtraVariance
from sparsedepth.effects.pairs import BASES, pairs
from sparsedepth.effects.tuning_error import TuningUncertainty, tuned_side
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows

VALUES = 160
"""Draws x contrasts, with 8 draws at least."""
MAX_SEEDS = 64


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviations of a run, on the outcome's comparison scale."""

    own: float
    shared: float = 0.0
    df: float | None = None
    """Of `own`; None: given by the user, without uncertainty."""
    choice: ExtraVariance | None = None
    """Added by choosing a tuned value; None where unknown."""

    def __post_init__(self) -> None:
        if not (0 < self.own < math.inf):
            raise ValueError(f"noise between seeds is {self.own:g}; it must be above 0 and finite")


@dataclass(frozen=True, kw_only=True)
class Power:
    """The power of a design for one setting."""

    knob: str
    setting: str
    baseline: str
    n_layers: tuple[int, ...]
    """The depths at each of which this holds; none where depth itself is the knob."""
    n_pairs: int
    n_seeds: int
    detectable: float | None
    """Effect detected with probability POWER; None with too few seeds."""
    n_seeds_wanted: int | None
    """Seeds that the given effect needs; None without one, or if MAX_SEEDS are too few."""


def pilot_noise(runs: pd.DataFrame, outcome: str) -> Noise:
    """The noise of the runs of a store. Raises ValueError where no configuration has two seeds."""
    results = result_rows(runs)
    total, total_df = noise(results, outcome)
    if not total:
        raise ValueError(
            f"the pilot has no estimate of noise: no configuration has two finished runs that differ in {outcome}"
        )
    squares, df = 0.0, 0
    for _, rows in results.assign(value=values_of(results, outcome)).groupby("n_layers"):
        y_CS = rows.pivot_table(index="cell_id", columns="seed", values="value").dropna().to_numpy()
        if y_CS.size:
            residual_CS = y_CS - y_CS.mean(axis=1, keepdims=True) - y_CS.mean(axis=0) + y_CS.mean()
            squares += float((residual_CS**2).sum())
        df += max(len(y_CS) - 1, 0) * max(y_CS.shape[1] - 1, 0)
    own = math.sqrt(squares / df) if squares else total
    return Noise(
        own=own,
        shared=math.sqrt(max(total**2 - own**2, 0.0)),
        df=df if squares else total_df,
        choice=_choice(results, outcome),
    )


def _choice(runs: pd.DataFrame, outcome: str) -> ExtraVariance | None:
    side = tuned_side(runs, outcome).assign(cell=runs["cell_id"]).drop_duplicates("cell")
    side = side[side["tuning_variance"].notna()]
    if side.empty:
        return None
    return ExtraVariance(variance=float(side["tuning_variance"].mean()), df=float(side["tuning_df"].min()))


def regret_of_choice(n_values: int) -> tuple[float, float]:
    """The regret of taking the lowest of n noisy means, on average and in one case of twenty, in standard errors
    of a mean: for parabolas with their optimum near the middle, at the curvature with the largest regret."""
    generator = np.random.default_rng(0)
    offset_NK = np.arange(n_values) - (n_values - 1) / 2 - generator.uniform(-0.5, 0.5, size=(4000, 1))
    noise_NK = generator.normal(size=offset_NK.shape)
    largest, rare = 0.0, 0.0
    for curvature in np.geomspace(0.02, 20, 25):
        smooth_NK = curvature * offset_NK**2
        chosen_N = (smooth_NK + noise_NK).argmin(axis=1)
        regret_N = smooth_NK[np.arange(len(chosen_N)), chosen_N] - smooth_NK.min(axis=1)
        largest, rare = max(largest, float(regret_N.mean())), max(rare, float(np.quantile(regret_N, 0.95)))
    return largest, rare


def choice_text(noise: Noise, outcome: str, n_values: Mapping[str, int], n_tuning: int, n_results: int) -> str:
    """The expected loss of choosing tuned values with this many tuning seeds, and with as many as the results have."""
    mean, rare = np.sum([regret_of_choice(n) for n in n_values.values()], axis=0) * noise.own
    unit = unit_of(outcome)

    def losses(n_seeds: int) -> str:
        on_average, rarely = (_size(loss / math.sqrt(n_seeds), unit) for loss in (mean, rare))
        return f"{on_average} on average, {rarely} in one of 20"

    fields = " and ".join(f"{field} from {n} values" for field, n in n_values.items())
    text = (
        f"choice: choosing {fields} with {counted(n_tuning, 'tuning seed')} may cost a configuration {losses(n_tuning)}"
    )
    if n_tuning < n_results:
        text += f"; with {n_results} seeds, as many as the results have, {losses(n_results)}"
    return text


@dataclass(frozen=True)
class _Planned:
    """A contrast of the planned runs."""

    contrast: Contrast
    at_setting: np.ndarray
    """(P,) the cells of its pairs, as indices."""
    at_baseline: np.ndarray
    n_seeds: int
    n_same_depth: int
    """Contrasts at its depth, this one included."""

    @property
    def n_pairs(self) -> int:
        return len(self.at_setting)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Contrasts with equal shapes have the same detectable effect."""
        return self.n_pairs, self.n_seeds, self.n_same_depth


def measure_power(
    configs: Sequence[RunConfig],
    outcome: str,
    noise: Noise,
    tuned: Sequence[str] = (),
    effect: float | None = None,
) -> list[Power]:
    """Every setting of every knob (depth last) of the planned runs without those of tuning, at every depth.

    Raises ValueError for an outcome that is no number of `runs`, and for an effect that is not above 0.
    """
    unit_of(outcome)
    if effect is not None and not 0 < effect < math.inf:
        raise ValueError(f"effect={effect:g} must be a size above 0, whatever its direction")
    planned = _planned(configs, outcome, tuned)
    noise = replace(noise, choice=noise.choice if tuned else None)
    detectable_with = cache(partial(_detectable, planned, noise))
    groups: dict[tuple, list[_Planned]] = {}
    for plan in planned:
        contrast = plan.contrast
        key = (contrast.knob, contrast.setting, detectable_with(None)[plan.shape], plan.n_pairs, plan.n_seeds)
        groups.setdefault(key, []).append(plan)

    def is_enough(plan: _Planned, n_seeds: int) -> bool:
        detectable = detectable_with(n_seeds)[plan.shape]
        return detectable is not None and effect is not None and detectable <= effect

    powers = []
    for (knob, setting, detectable, n_pairs, n_seeds), plans in groups.items():
        n_wanted = bisect_left(range(3, MAX_SEEDS + 1), True, key=partial(is_enough, plans[0])) + 3 if effect else None
        powers.append(
            Power(
                knob=knob,
                setting=setting,
                baseline=plans[0].contrast.baseline,
                n_layers=tuple(plan.contrast.n_layers for plan in plans if plan.contrast.n_layers is not None),
                n_pairs=n_pairs,
                n_seeds=n_seeds,
                detectable=detectable,
                n_seeds_wanted=None if n_wanted is None or n_wanted > MAX_SEEDS else n_wanted,
            )
        )
    return powers


def _planned(configs: Sequence[RunConfig], outcome: str, tuned: Sequence[str]) -> list[_Planned]:
    """The contrasts of these configurations, all else equal, by the rules of `effects`."""
    seeds: dict[str, set[int]] = {}
    for config in configs:
        seeds.setdefault(config.cell_id, set()).add(config.seed)
    cells = list({config.cell_id: config for config in configs}.values())
    runs = pd.DataFrame.from_records([_row(i, config, outcome, tuned) for i, config in enumerate(cells)])
    knobs = all_knobs(runs) if len(runs) else []
    by_knob = [(pairs(runs, knob, outcome), contrasts(runs, knob, outcome)) for knob in knobs]
    same_depth = Counter(contrast.n_layers for _, at_depths in by_knob for contrast in at_depths)
    planned = []
    for rows, at_depths in by_knob:
        for contrast in at_depths:
            at_depth = rows["n_layers"] == (contrast.n_layers or rows["n_layers"])
            at = rows[(rows["setting"] == contrast.setting) & at_depth]
            sides = at["run_id"].to_numpy(), at["run_id_baseline"].to_numpy()
            n_seeds = max(len(seeds[cells[a].cell_id] & seeds[cells[b].cell_id]) for a, b in zip(*sides, strict=True))
            planned.append(_Planned(contrast, *sides, n_seeds, same_depth[contrast.n_layers]))
    return planned


def _row(number: int, config: RunConfig, outcome: str, tuned: Sequence[str]) -> dict:
    """A cell as a row of `runs` with one seed and dummy numbers."""
    fields = {**config.model_dump(mode="json"), "seed": 0}
    texts = {name: json.dumps(value) for name, value in fields.items() if isinstance(value, list)}
    numbers = dict.fromkeys((outcome, *BASES.values()), 1.0)
    choice = {"tuned_fields": ",".join(tuned), "tuning": "best"} if tuned else {}
    return {**fields, **texts, **numbers, **choice, "run_id": number, "cell_id": config.cell_id, "outcome": "ok"}


def _detectable(planned: Sequence[_Planned], noise: Noise, n_seeds: int | None) -> dict[tuple, float | None]:
    """Shape of contrast -> the effect detected with probability POWER; with another number of seeds, if given."""
    generator = np.random.default_rng(0)
    draws: dict[tuple, list[tuple[float, float]]] = {}
    for _ in range(max(8, math.ceil(VALUES / max(len(planned), 1)))):
        own2 = noise.own**2 * (noise.df / generator.chisquare(noise.df) if noise.df else 1.0)
        for plan, judged in zip(planned, judge(_draw(planned, noise, own2, n_seeds, generator)), strict=True):
            choice = noise.choice.variance if noise.choice else 0.0
            variance = 2 * (own2 / (n_seeds or plan.n_seeds) + choice) / plan.n_pairs
            threshold = math.inf if judged.threshold is None else judged.threshold
            draws.setdefault(plan.shape, []).append((threshold, math.sqrt(variance)))
    return {shape: _at_power(*np.array(values).T) for shape, values in draws.items()}


def _draw(
    planned: Sequence[_Planned], noise: Noise, own2: float, n_seeds: int | None, generator: np.random.Generator
) -> list[Contrast]:
    """The contrasts of one draw without any effect."""
    n_cells = 1 + max((int(max(plan.at_setting.max(), plan.at_baseline.max())) for plan in planned), default=0)
    most = n_seeds or max((plan.n_seeds for plan in planned), default=0)
    shared_S1 = noise.shared * generator.normal(size=(most, 1))
    y_SC = shared_S1 + math.sqrt(own2) * generator.normal(size=(most, n_cells))
    drawn = []
    for plan in planned:
        n = n_seeds or plan.n_seeds
        sides = {"value": plan.at_setting, "value_baseline": plan.at_baseline}
        by_seed = pd.DataFrame({name: y_SC[:n, cells_P].mean(axis=1) for name, cells_P in sides.items()})
        extra = [replace(noise.choice, variance=noise.choice.variance / plan.n_pairs)] * 2 if noise.choice else []
        tuning, least_sd = TuningUncertainty(extra_variances=tuple(extra)), plan.contrast.least_sd
        fields = effect_fields(by_seed["value"] - by_seed["value_baseline"], plan.n_pairs * n, least_sd, tuning)
        sd, floor = noise_and_floor(by_seed, least_sd)
        drawn.append(replace(plan.contrast, **fields, noise=sd, floor=floor, n_seeds=n))
    return drawn


def _at_power(threshold_B: np.ndarray, error_B: np.ndarray) -> float | None:
    """The effect whose mean probability of exceeding the threshold is POWER; None where that is out of reach."""
    is_finite = np.isfinite(threshold_B)
    if is_finite.mean() <= POWER:
        return None
    threshold_B, error_B = threshold_B[is_finite], error_B[is_finite]

    def excess_power(effect: float) -> float:
        return float(ndtr((effect - threshold_B) / error_B).sum()) / len(is_finite) - POWER

    return float(brentq(excess_power, 0.0, float((threshold_B + 9 * error_B).max())))


# Text


def power_text(noise: Noise, source: str, outcome: str, tuned: Sequence[str], effect: float | None) -> str:
    """Above the table: its explanation, and the noise that was assumed."""
    unit, fields = unit_of(outcome), " and ".join(tuned)
    df = f", {noise.df:g} df, its uncertainty included" if noise.df else ""
    parts = [f"{noise.own:.3g} {unit} between the runs of a configuration ({source}{df})"]
    if noise.shared:
        parts.append(f"{noise.shared:.3g} shared by all runs of a seed")
    if tuned and noise.choice:
        parts.append(f"{math.sqrt(noise.choice.variance):.3g} from choosing {fields}")
    elif tuned:
        parts.append(f"none assumed from choosing {fields}, which a pilot with tuning would measure")
    needed = "" if effect is None else f"; seeds wanted: for an effect of {_size(effect, unit)}"
    return (
        f"power: detectable: the effect on {outcome} that such a sweep detects with {POWER:.0%} power ({ALPHA:.0%} "
        f"two-sided, Holm-corrected over the settings at a depth, as in `effects`){needed}\n"
        f"noise (standard deviation): {'; '.join(parts)}"
    )


def power_table(powers: Sequence[Power], outcome: str, effect: float | None) -> QueryResult:
    """One row per setting, and per number of pairs at a depth."""
    rows = []
    for power in powers:
        detectable = "none: too few seeds" if power.detectable is None else _size(power.detectable, unit_of(outcome))
        depths = ", ".join(map(str, power.n_layers)) or "all"
        wanted = () if effect is None else (str(power.n_seeds_wanted or f"over {MAX_SEEDS}"),)
        pairs_there = power.n_pairs * power.n_seeds
        rows.append((power.setting, power.baseline, depths, pairs_there, power.n_seeds, detectable, *wanted))
    names = ("setting", "baseline", "n_layers", "pairs", "seeds", "detectable")
    return QueryResult(columns=(*names, *(() if effect is None else ("seeds wanted",))), rows=tuple(rows))


def _size(value: float, unit: str) -> str:
    """Two digits, the precision of the draws."""
    return f"x{math.exp(value):.2g}" if unit == "ln ratio" else f"{value:.2g} {unit}"
