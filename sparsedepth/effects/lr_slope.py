"""Does an effect change with the learning rate? A setting and its baseline at every learning rate that both have.

A *context* is everything but knob, lr and seed: depth and all other choices. A pair has the same context, lr and seed.

    d_sl   = mean over contexts of outcome(setting) - outcome(baseline), of seed s at learning rate l
    effect = mean over seeds of the least-squares slope of d_sl on log2 l: its unit per doubling of lr

Only learning rates that every context has count, and seeds that have all of these in every context: where lr was tuned
these are the tuning seeds, which favour no lr, since every lr has the same ones. The seed is the unit, the floor 0.

A significant slope means that a comparison at one lr holds for that lr only: a setting whose best lr differs from its
baseline's looks harmful on one side of the two and helpful on the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.all_effects import all_knobs, choose
from sparsedepth.effects.contrast import effect_fields
from sparsedepth.effects.intervals import ALPHA, Judged, correct, moderate
from sparsedepth.effects.knobs import ROLES, Design, Knob, design_of, find_knobs, keys, labels, tuned_fields
from sparsedepth.effects.pairs import UNKNOWN_SEED, average_duplicates, rounding_sd, unit_of, values_of
from sparsedepth.effects.sentences import size_text
from sparsedepth.effects.summary import display_value, minus, table_page, title, verdict_cell
from sparsedepth.effects.tuning_error import TuningUncertainty
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows, without_measured_models

MIN_RATES = 3
"""A slope through two has no residual."""


@dataclass(frozen=True, kw_only=True)
class LrSlope(Judged):
    """How a setting's effect changes with lr (`effect`: per doubling), over all depths and other settings."""

    knob: str
    setting: str
    baseline: str
    outcome: str
    by_lr: dict[float, float]
    """lr, ascending -> mean difference, setting minus baseline."""
    depths: tuple[int, ...]
    n_contexts: int
    n_diverged: int
    """Pairs with a diverged run; all pairs at their lr are excluded."""


def lr_slopes(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> list[LrSlope]:
    """Every setting (of one `knob`) with pairs at three learning rates, judged as one family; none where lr did not
    vary, or was tuned together with another field.

    Raises ValueError for an outcome that is no number of `runs`, and for a knob that does not vary.
    """
    unit_of(outcome)
    chosen = {each.name for each in choose(all_knobs(runs), knob)}
    trained = without_measured_models(runs)
    if tuned_fields(result_rows(runs)) - {"lr"} or trained["lr"].nunique() < MIN_RATES:
        return []
    design = design_of(runs)
    knobs = [each for each in find_knobs(runs) if each.name != "lr" and ROLES[each.name].kind == "knob"]
    unit = unit_of(outcome, trained)
    family = [
        slope
        for each in knobs
        for setting, pairs in _pairs_by_setting(trained, each, outcome, design)
        if (slope := _slope(_with_every_lr(pairs), each, setting, outcome, unit))
    ]
    return [slope for slope in correct(moderate(family)) if slope.knob in chosen]


def _slope(pairs: pd.DataFrame, knob: Knob, setting: str, outcome: str, unit: str) -> LrSlope | None:
    incomplete = pairs.loc[pairs["difference"].isna(), "lr"]
    # At an lr where some pairs diverged, the others are a biased sample.
    complete = pairs[~pairs["lr"].isin(incomplete)]
    by_seed_SL = complete.pivot_table(index="seed", columns="lr", values="difference")
    if len(by_seed_SL) < 2 or by_seed_SL.shape[1] < MIN_RATES:
        return None
    rates_L = np.log2(by_seed_SL.columns.to_numpy(float))
    slopes_S = pd.Series(np.polyfit(rates_L, by_seed_SL.to_numpy().T, 1)[0], by_seed_SL.index)
    depths = tuple(sorted(set(pairs["n_layers"])))
    return LrSlope(
        knob=knob.name,
        setting=setting,
        baseline=knob.baseline,
        outcome=outcome,
        unit=unit,
        **effect_fields(slopes_S, len(complete), rounding_sd(outcome, *depths), TuningUncertainty()),
        floor=0.0,
        by_lr={float(lr): float(mean) for lr, mean in by_seed_SL.mean().items()},
        depths=depths,
        n_contexts=pairs["context"].nunique(),
        n_diverged=int(pairs["diverged"].sum()),
    )


def _pairs_by_setting(
    runs: pd.DataFrame, knob: Knob, outcome: str, design: Design
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each setting but the baseline, and its pairs: context, seed, lr, n_layers, difference (NaN without a value),
    diverged."""
    context = [name for name in design.with_tuning if name not in {*knob.fields, "seed", "lr"}]
    rows = pd.DataFrame(
        {
            "setting": labels(runs, knob),
            "context": keys(runs, context),
            "seed": runs["seed"].fillna(UNKNOWN_SEED),
            "lr": runs["lr"],
            "n_layers": runs["n_layers"].astype(int),
            "value": values_of(runs, outcome),
            "diverged": runs["outcome"] == "diverged",
        }
    )
    rows = average_duplicates(rows, ["setting", "context", "seed", "lr"])
    rows = rows[rows["seed"] != UNKNOWN_SEED]
    baseline = rows[rows["setting"] == knob.baseline].drop(columns="n_layers")
    for setting in list(knob.settings)[1:]:
        of_setting = rows[rows["setting"] == setting]
        pairs = of_setting.merge(baseline, on=["context", "seed", "lr"], suffixes=("", "_baseline"))
        pairs["difference"] = pairs["value"] - pairs["value_baseline"]
        pairs["diverged"] |= pairs["diverged_baseline"]
        yield setting, pairs


def _with_every_lr(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs at the learning rates that every context has, of the seeds that have all of these in every context."""
    n_contexts = pairs["context"].nunique()
    pairs = pairs[pairs.groupby("lr")["context"].transform("nunique") == n_contexts]
    return pairs[pairs.groupby("seed")["lr"].transform("size") == n_contexts * pairs["lr"].nunique()]


# Text


def lr_lines(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> Iterator[str]:
    """A table of the slopes, and each setting's effect at every lr. Raises ValueError where there is none."""
    slopes = lr_slopes(runs, outcome, knob)
    if not slopes:
        raise ValueError(
            f"no setting was run with its baseline at {MIN_RATES} learning rates and two seeds; put lr under `tune`, "
            "or make it an axis of the sweep"
        )
    unit = slopes[0].unit
    names = ("slope", "lo", "hi", "seeds", "verdict", "setting")
    rows = []
    for slope in slopes:
        cells = (display_value(value, unit) for value in (slope.effect.mean, slope.effect.lo, slope.effect.hi))
        rows.append((*cells, len(slope.by_seed), _verdict(slope), slope.setting))
    head = (
        f"Does an effect change with lr? {title(outcome, unit)}; effect: setting {minus(unit)} baseline, both at the "
        "same lr; slope: change of the effect per doubling of lr, over all depths and other settings",
        f"baseline: {', '.join(dict.fromkeys(slope.baseline for slope in slopes))}",
        "lo, hi: 95% interval over seeds; verdict: the effect 'falls' or 'rises' with lr (Holm's correction at "
        f"{ALPHA} over the settings), '-' not significant",
    )
    yield table_page(head, names, rows, ("seeds",), ())
    yield "\nEffect at each lr:"
    for slope in slopes:
        sizes = ", ".join(f"{size_text(mean, unit, '+')} at {lr:g}" for lr, mean in slope.by_lr.items())
        diverged = f"; {counted(slope.n_diverged, 'pair')} diverged" if slope.n_diverged else ""
        depths = f"n_layers {', '.join(map(str, slope.depths))}"
        yield f"  {slope.setting}: {sizes} ({counted(slope.effect.n, 'pair')}, {depths}{diverged})"


def _verdict(slope: LrSlope) -> str:
    verdict = verdict_cell(slope)
    return {"lower": "falls", "higher": "rises"}.get(verdict, verdict)


def lr_table(slopes: Sequence[LrSlope]) -> QueryResult:
    """One row per setting and lr, with the setting's slope."""
    names = ("outcome", "knob", "setting", "baseline", "unit", "lr", "effect", "slope", "lo", "hi", "p_holm")
    rows = []
    for slope in slopes:
        head = (slope.outcome, slope.knob, slope.setting, slope.baseline, slope.unit)
        numbers = (slope.effect.mean, slope.effect.lo, slope.effect.hi, slope.p_holm)
        counts = (len(slope.by_seed), slope.n_contexts, slope.n_diverged, _verdict(slope))
        rows += [(*head, lr, mean, *numbers, *counts) for lr, mean in slope.by_lr.items()]
    return QueryResult(columns=(*names, "n_seeds", "n_places", "n_diverged", "verdict"), rows=tuple(rows))
