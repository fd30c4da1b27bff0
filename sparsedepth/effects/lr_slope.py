"""Does an effect run with the learning rate? A setting and its baseline at every learning rate that both were run at.

A *place* is what two runs have in common besides knob, lr and seed: depth and every other choice. Both sides of a pair
have one place, one lr and one seed.

    d_sl   = mean over places of outcome(setting) - outcome(baseline), of seed s at learning rate l
    effect = mean over seeds of the least-squares slope of d_sl on log2 l: its unit per doubling of lr

Only learning rates that every place has, and seeds that have all of these in every place: where lr was tuned the tuning
seeds, which favour no lr, since the chosen one has no more of them than the others. The seed is the unit, the floor 0.

A slope says that a comparison at one lr answers for that lr alone: a setting that wants another lr than its baseline
looks harmful on one side of the two and helpful on the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.effects.all_effects import all_knobs, choose
from sparsedepth.effects.contrast import effect_fields
from sparsedepth.effects.holm import correct
from sparsedepth.effects.intervals import ALPHA, Judged, moderate
from sparsedepth.effects.knobs import ROLES, Design, Knob, design_of, find_knobs, keys, labels, tuned_fields
from sparsedepth.effects.pairs import UNKNOWN_SEED, one_in_each, rounding_sd, unit_of, values_of
from sparsedepth.effects.sentences import counted, size_text
from sparsedepth.effects.summary import against, laid_out, shown_value, title, verdict_word
from sparsedepth.effects.tuning_error import TuningUncertainty
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows, without_measured_models

MIN_RATES = 3
"""Two have a difference, and no shape."""


@dataclass(frozen=True, kw_only=True)
class LrSlope(Judged):
    """How a setting's effect runs with lr (`effect`: per doubling), over all depths and whatever else was set."""

    knob: str
    setting: str
    baseline: str
    outcome: str
    by_lr: dict[float, float]
    """lr, ascending -> mean difference, setting less baseline."""
    depths: tuple[int, ...]
    n_places: int
    """Over which each seed's difference at an lr is a mean."""
    n_diverged: int
    """Pairs of which a side diverged; all at their lr are left out with them."""


def lr_slopes(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> list[LrSlope]:
    """Every setting that was run at three learning rates beside its baseline, judged as one family; of one knob, with a
    name. None where lr did not vary, or was tuned together with another field.

    Raises ValueError for an outcome that is no number of `runs`, and for a knob that does not vary.
    """
    unit_of(outcome)
    wanted = {each.name for each in choose(all_knobs(runs), knob)}
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
    return [slope for slope in correct(moderate(family)) if slope.knob in wanted]


def _slope(pairs: pd.DataFrame, knob: Knob, setting: str, outcome: str, unit: str) -> LrSlope | None:
    n_places = pairs["place"].nunique()
    lost = pairs.loc[pairs["difference"].isna(), "lr"]
    kept = pairs[~pairs["lr"].isin(lost)]  # of an lr that some did not survive the others are no fair sample
    by_seed_SL = kept.pivot_table(index="seed", columns="lr", values="difference")
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
        **effect_fields(slopes_S, len(kept), rounding_sd(outcome, *depths), TuningUncertainty()),
        floor=0.0,
        by_lr={float(lr): float(mean) for lr, mean in by_seed_SL.mean().items()},
        depths=depths,
        n_places=n_places,
        n_diverged=int(pairs["diverged"].sum()),
    )


def _pairs_by_setting(
    runs: pd.DataFrame, knob: Knob, outcome: str, design: Design
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each setting but the baseline, and its pairs: place, seed, lr, n_layers, difference (NaN without a value),
    diverged."""
    others = [name for name in design.with_tuning if name not in {*knob.fields, "seed", "lr"}]
    known = pd.DataFrame(
        {
            "setting": labels(runs, knob),
            "place": keys(runs, others),
            "seed": runs["seed"].fillna(UNKNOWN_SEED),
            "lr": runs["lr"],
            "n_layers": runs["n_layers"].astype(int),
            "value": values_of(runs, outcome),
            "diverged": runs["outcome"] == "diverged",
        }
    )
    side = one_in_each(known, ["setting", "place", "seed", "lr"])
    side = side[side["seed"] != UNKNOWN_SEED]
    base = side[side["setting"] == knob.baseline].drop(columns="n_layers")
    for setting in list(knob.settings)[1:]:
        pairs = side[side["setting"] == setting].merge(base, on=["place", "seed", "lr"], suffixes=("", "_baseline"))
        yield (
            setting,
            pairs.assign(
                difference=pairs["value"] - pairs["value_baseline"],
                diverged=pairs["diverged"] | pairs["diverged_baseline"],
            ),
        )


def _with_every_lr(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs at the learning rates that every place has, of the seeds that have all of these in every place."""
    n_places = pairs["place"].nunique()
    pairs = pairs[pairs.groupby("lr")["place"].transform("nunique") == n_places]
    return pairs[pairs.groupby("seed")["lr"].transform("size") == n_places * pairs["lr"].nunique()]


# What is printed


def lr_lines(runs: pd.DataFrame, outcome: str, knob: str | None = None) -> Iterator[str]:
    """A table of the slopes, and each setting's effect at every lr."""
    slopes = lr_slopes(runs, outcome, knob)
    if not slopes:
        yield (
            f"no setting was run beside its baseline at {MIN_RATES} learning rates with two seeds; lr among `tune`, "
            "or an axis of the sweep, makes them"
        )
        return
    unit = slopes[0].unit
    names = ("slope", "lo", "hi", "seeds", "verdict", "setting")
    rows = []
    for slope in slopes:
        size = (shown_value(value, unit) for value in (slope.effect.mean, slope.effect.lo, slope.effect.hi))
        rows.append((*size, len(slope.by_seed), _word(slope), slope.setting))
    head = (
        f"Does an effect on {title(outcome, unit)}, run with lr? Setting {against(unit)} baseline at one lr on both "
        "sides; slope: its change per doubling of lr, over all depths and whatever else was set",
        f"baseline: {', '.join(dict.fromkeys(slope.baseline for slope in slopes))}",
        "lo, hi: 95% interval over seeds; verdict: the effect 'falls' or 'rises' with lr (Holm's correction at "
        f"{ALPHA} over the settings), '-' not distinguishable",
    )
    yield laid_out(head, names, rows, ("seeds",), ())
    yield "\nAt each lr:"
    for slope in slopes:
        sizes = ", ".join(f"{size_text(mean, unit, '+')} at {lr:g}" for lr, mean in slope.by_lr.items())
        left_out = f"; {counted(slope.n_diverged, 'pair')} diverged" if slope.n_diverged else ""
        depths = f"n_layers {', '.join(map(str, slope.depths))}"
        yield f"  {slope.setting}: {sizes} ({counted(slope.effect.n, 'pair')}, {depths}{left_out})"


def _word(slope: LrSlope) -> str:
    return {"lower": "falls", "higher": "rises"}.get(word := verdict_word(slope), word)


def lr_table(slopes: Sequence[LrSlope]) -> QueryResult:
    """One row per setting and lr, with the setting's slope."""
    names = ("outcome", "knob", "setting", "baseline", "unit", "lr", "effect", "slope", "lo", "hi", "p_holm")
    rows = []
    for slope in slopes:
        what = (slope.outcome, slope.knob, slope.setting, slope.baseline, slope.unit)
        size = (slope.effect.mean, slope.effect.lo, slope.effect.hi, slope.p_holm)
        counts = (len(slope.by_seed), slope.n_places, slope.n_diverged, _word(slope))
        rows += [(*what, lr, mean, *size, *counts) for lr, mean in slope.by_lr.items()]
    return QueryResult(columns=(*names, "n_seeds", "n_places", "n_diverged", "verdict"), rows=tuple(rows))
