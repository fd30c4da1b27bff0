"""Matched pairs: two runs that differ in one knob's setting and in nothing else that could matter.

A pair is two runs with the same seed, the same depth and the same value of every other field, one at the knob's
baseline and one at another setting. Variances are compared as ratios: their difference is taken between natural
logarithms.

On a *basis* (equal tokens, FLOPs, total or active parameters) only pairs that agree in it to 1% count, and the fields
that a sweep moves to get there (COMPENSATES) may differ as well: a setting that costs more per token may stand beside a
baseline that trained longer. Every comparison is between ends of schedules; nothing is interpolated along a curve.

Where lr was tuned, runs stand for a configuration at its own value. At *equal lr* both sides have the baseline's: there
the setting's runs are those of its tuning, and the baseline's, too, but for the seeds of its results; so the baseline
alone is flattered by the choice. At the setting's lr it is the other way round.
"""

import difflib
import math

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.images import unit_for
from sparsedepth.effects.knobs import SIZES, Design, Knob, design_of, keys, labels
from sparsedepth.effects.tuning_error import SIDE, tuned_side
from sparsedepth.store.tuning_roles import result_rows, without_measured_models

BASES = {
    "tokens": "tokens_trained",
    "params_total": "params_total",
    "params_active": "params_active",
    "flops": "train_flops",
}
"""What two runs can have in common, by the name that a sweep's `matched` uses -> the column that tells."""
EQUAL_LR = "lr"
"""A basis beside the others, where lr was tuned: the baseline's."""
LR_OF_SETTING = "lr of the setting"
"""Beside no basis: what effects of tuned configurations are held against (`tuned`)."""
AT_ONE_LR = (EQUAL_LR, LR_OF_SETTING)
MATCH_TOLERANCE = 0.01
"""A basis counts as matched if every pair agrees to 1%."""
UNKNOWN_SEED = -1
"""Imported runs that do not say their seed count as of one, which tells no spread."""
COMPENSATES: dict[str, tuple[str, ...]] = {
    "tokens": (),
    "params_total": SIZES,
    "params_active": SIZES,
    "flops": (*SIZES, "train_tokens"),
}
"""Basis -> what two runs that agree in it may differ in, beside the knob."""


def unit_of(outcome: str, runs: pd.DataFrame | None = None) -> str:
    """The unit of a difference in this outcome, on the corpora of `runs`. Raises ValueError for a name that is no
    number of `runs`."""
    quantity = quantities.IN_RUNS.get(outcome)
    if quantity is None or quantity.type == "VARCHAR":
        known = [name for name, other in quantities.IN_RUNS.items() if other.type == "DOUBLE"]
        near = ", ".join(difflib.get_close_matches(outcome, known, n=3))
        hint = f"the nearest: {near}" if near else "see `sparsedepth metrics`"
        raise ValueError(f"outcome {outcome!r} is not a measured number of a run; {hint}")
    unit = "ln ratio" if quantity.is_ratio else quantity.unit
    return unit_for(unit, runs["corpus"].dropna().unique()) if runs is not None and "corpus" in runs.columns else unit


def is_ratio(outcome: str) -> bool:
    """Whether runs are compared by the ratio of this outcome: as the difference of its logarithms."""
    return outcome in quantities.IN_RUNS and quantities.IN_RUNS[outcome].is_ratio


def values_of(runs: pd.DataFrame, outcome: str) -> pd.Series:
    """The outcome on the scale on which it is compared; NaN where it is missing or the run diverged."""
    values = pd.to_numeric(runs[outcome], errors="coerce").astype(float)
    if is_ratio(outcome):
        values = np.log(values.where(values > 0))
    return values.where(runs["outcome"] == "ok")


def pairs(
    runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None = None, design: Design | None = None
) -> pd.DataFrame:
    """Every matched pair of a knob, one row each; on a basis, those that agree in it, every run in one pair at most;
    at EQUAL_LR those at the baseline's lr, at LR_OF_SETTING those at the setting's. `design` is that of these
    runs, where it is known already.

    Columns: setting, unit (of differences), n_layers, seed, match (everything else but depth, as a key), context (that
    less the seed), run_id, cell_id, value (on the compared scale), difference, diverged, at_edge (of either run), one
    ratio per basis, SIDE; n_layers_baseline, run_id_baseline, cell_id_baseline, value_baseline, diverged_baseline, SIDE
    again.
    """
    unit = unit_of(outcome, runs)
    at_equal_lr = basis in AT_ONE_LR
    rows = without_measured_models(runs) if at_equal_lr else result_rows(runs)
    side = _sides(rows, knob, outcome, basis, design or design_of(runs))
    base = side[side["setting"] == knob.baseline].drop(columns=["setting", "match", "context", "seed"])
    rest = side[side["setting"] != knob.baseline]
    matched = rest.merge(base, on="other_fields", suffixes=("", "_baseline"))
    for name in BASES:
        matched[name] = matched[name] / matched[f"{name}_baseline"]
    if at_equal_lr:
        role = "role_baseline" if basis == EQUAL_LR else "role"
        matched = matched[matched[role] != "rejected"].assign(at_edge=False, at_edge_baseline=False)
    elif basis is not None:
        matched = _nearest(matched, basis)
    matched["difference"] = matched["value"] - matched["value_baseline"]
    matched["at_edge"] = matched["at_edge"] | matched["at_edge_baseline"]
    kept = [
        "setting",
        "unit",
        "n_layers",
        "n_layers_baseline",
        "seed",
        "match",
        "context",
        "run_id",
        "run_id_baseline",
        "cell_id",
    ]
    kept += ["cell_id_baseline", "value", "value_baseline", "difference", "diverged", "diverged_baseline", "at_edge"]
    matched["matched_lr"], matched["unit"] = at_equal_lr, unit
    return matched[[*kept, "matched_lr", *BASES, *SIDE, *(f"{name}_baseline" for name in SIDE)]]


def _sides(runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None, design: Design) -> pd.DataFrame:
    """One row per run that can be half of a pair; two runs of one `other_fields` may be paired."""
    at_depth = {"n_layers", *design.with_depth}
    free = {*knob.fields, *(COMPENSATES.get(basis, ()) if basis else ())}
    compared = (*design.with_tuning, "lr") if basis in AT_ONE_LR else design.chosen
    others = [name for name in compared if name not in free]
    side = pd.DataFrame(
        {
            "setting": labels(runs, knob),
            "other_fields": keys(runs, others),
            "match": keys(runs, [name for name in others if name not in at_depth]),
            "context": keys(runs, [name for name in others if name not in {*at_depth, "seed"}]),
            "size": keys(runs, [name for name in design.chosen if name in free and name not in knob.fields]),
            "n_layers": runs["n_layers"].astype(int),
            "seed": runs["seed"].fillna(UNKNOWN_SEED),
            "run_id": runs["run_id"],
            "cell_id": runs["cell_id"],
            "value": values_of(runs, outcome),
            "diverged": runs["outcome"] == "diverged",
            "role": runs["tuning"] if "tuning" in runs.columns else None,
            "at_edge": runs["tuning"] == "edge" if "tuning" in runs.columns else False,
            **tuned_side(runs, outcome),
            **{name: pd.to_numeric(runs[column], errors="coerce").astype(float) for name, column in BASES.items()},
        }
    )
    return one_in_each(side, ["other_fields", "setting", "size"])


def one_in_each(side: pd.DataFrame, place: list[str]) -> pd.DataFrame:
    """One row for each value of the columns `place`, since there is nothing to pair a second one by: the mean of the
    finished runs there, diverged where any is. Several are those that do not say their seed, or of one seed from
    several starts (`start_weights`)."""
    several = side.duplicated(place, keep=False)
    if several.any():
        of_place = side[several].groupby(place)
        side.loc[several, "value"] = of_place["value"].transform("mean")
        side.loc[several, "diverged"] = of_place["diverged"].transform("any")
    return side.drop_duplicates(place)


def _nearest(matched: pd.DataFrame, basis: str) -> pd.DataFrame:
    """The pairs that agree in a basis: of those that share a run, the one of equal sizes, else the nearest."""
    gap = (matched[basis] - 1).abs()
    matched = matched.assign(gap=gap, moved=matched["size"] != matched["size_baseline"])[gap <= MATCH_TOLERANCE]
    matched = matched.sort_values(["moved", "gap", "run_id", "run_id_baseline"]).drop_duplicates("run_id")
    return matched.drop_duplicates(["setting", "run_id_baseline"]).sort_index()


def rounding_sd(outcome: str, *depths: int) -> float:
    """Standard deviation that rounding alone gives a difference of runs at these depths: usefulness counts layers, so
    it moves in steps h of 1/n_layers, and seeds may agree by chance. A rounding error has variance h^2 / 12."""
    steps = {"usefulness": [1 / depth for depth in depths], "effective_layers": [1.0 for _ in depths]}.get(outcome, [])
    return math.sqrt(sum(step**2 for step in steps) / 12)
