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
from sparsedepth.effects.cells import unit_of
from sparsedepth.effects.contrast import effect_fields
from sparsedepth.effects.intervals import ALPHA, Judged, correct, moderate
from sparsedepth.effects.knobs import ROLES, Knob, design_of, find_knobs, tuned_fields
from sparsedepth.effects.pairs import EVERY_LR, UNKNOWN_SEED, pairs, rounding_sd
from sparsedepth.effects.sentences import size_text
from sparsedepth.effects.summary import effect_cells, minus, table_page, verdict_cell
from sparsedepth.effects.text import title
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
    trained = without_measured_models(runs)
    unit = unit_of(outcome, trained)
    chosen = {each.name for each in choose(all_knobs(runs), knob)}
    if tuned_fields(result_rows(runs)) - {"lr"} or trained["lr"].nunique() < MIN_RATES:
        return []
    design = design_of(runs)
    knobs = [each for each in find_knobs(runs) if each.name != "lr" and ROLES[each.name].kind == "knob"]
    family = []
    for each in knobs:
        matched = pairs(trained, each, outcome, EVERY_LR, design)
        matched = matched[matched["seed"] != UNKNOWN_SEED]
        for setting in list(each.settings)[1:]:
            of_setting = _with_every_lr(matched[matched["setting"] == setting])
            family += [slope] if (slope := _slope(of_setting, each, setting, outcome, unit)) else []
    return [slope for slope in correct(moderate(family)) if slope.knob in chosen]


def _slope(rows: pd.DataFrame, knob: Knob, setting: str, outcome: str, unit: str) -> LrSlope | None:
    incomplete = rows.loc[rows["difference"].isna(), "lr"]
    # At an lr where some pairs diverged, the others are a biased sample.
    complete = rows[~rows["lr"].isin(incomplete)]
    by_seed_SL = complete.pivot_table(index="seed", columns="lr", values="difference")
    if len(by_seed_SL) < 2 or by_seed_SL.shape[1] < MIN_RATES:
        return None
    rates_L = np.log2(by_seed_SL.columns.to_numpy(float))
    slopes_S = pd.Series(np.polyfit(rates_L, by_seed_SL.to_numpy().T, 1)[0], by_seed_SL.index)
    depths = tuple(sorted(set(rows["n_layers"])))
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
        n_contexts=rows["place"].nunique(),
        n_diverged=int((rows["diverged"] | rows["diverged_baseline"]).sum()),
    )


def _with_every_lr(rows: pd.DataFrame) -> pd.DataFrame:
    """The pairs at the learning rates that every context has, of the seeds that have all of these in every context."""
    rows = rows.assign(place=rows.groupby(["context", "n_layers"]).ngroup())
    n_places = rows["place"].nunique()
    rows = rows[rows.groupby("lr")["place"].transform("nunique") == n_places]
    return rows[rows.groupby("seed")["lr"].transform("size") == n_places * rows["lr"].nunique()]


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
    rows = [(*effect_cells(slope)[:3], len(slope.by_seed), _verdict(slope), slope.setting) for slope in slopes]
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
