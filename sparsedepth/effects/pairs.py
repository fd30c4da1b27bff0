"""Matched pairs: two runs that differ in one knob's setting and in nothing else that could matter.

A pair is two runs with the same seed, the same depth and the same value of every other field, one at the knob's
baseline and one at another setting. Variances are compared as ratios: their difference is taken between natural
logarithms.

On a *basis* (equal tokens, FLOPs, total or active parameters) only pairs that agree in it to 1% count, and the fields
that a sweep changes to match it (COMPENSATES) may differ as well: a setting that costs more per token may be paired
with a baseline that trained longer. Runs are compared at the end of their schedules; no curve is interpolated.

Where lr was tuned, each configuration is represented by the runs at its tuned value. At *equal lr* both sides have the
baseline's: the setting's runs are its tuning runs there, the baseline's are its tuning runs and its results, so the
choice of lr favours the baseline. At the setting's lr it is the other way round.
"""

import math

import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.cells import unit_of, values_of
from sparsedepth.effects.knobs import SIZES, Design, Knob, design_of, keys, labels
from sparsedepth.effects.tuning_error import SIDE, tuned_side
from sparsedepth.store.tuning_roles import result_rows, without_measured_models

BASES = {
    "tokens": "tokens_trained",
    "params_total": "params_total",
    "params_active": "params_active",
    "flops": "train_flops",
}
"""What two runs can be matched on, by its name in a sweep's `matched` -> its column."""
EQUAL_LR = "lr"
"""One more basis, where lr was tuned: both sides at the baseline's."""
LR_OF_SETTING = "lr of the setting"
"""No basis: a check of effects between tuned configurations (`sparsedepth.effects.contrast.check_at_one_lr`)."""
EVERY_LR = "every lr"
"""No basis: change of effects with lr (`sparsedepth.effects.lr_slope`)."""
AT_ONE_LR = {EQUAL_LR: "role_baseline", LR_OF_SETTING: "role", EVERY_LR: None}
"""Basis of pairs whose sides have one lr -> the role of the run whose tuning chose that lr."""
MATCH_TOLERANCE = 0.01
"""A basis counts as matched if every pair agrees to 1%."""
UNKNOWN_SEED = -1
"""Stands for the seed of imported runs without one: together they count as one seed."""
COMPENSATES: dict[str, tuple[str, ...]] = {
    "tokens": (),
    "params_total": SIZES,
    "params_active": SIZES,
    "flops": (*SIZES, "train_tokens"),
}
"""Basis -> the fields, other than the knob, in which two runs matched on it may differ."""


def pairs(
    runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None = None, design: Design | None = None
) -> pd.DataFrame:
    """Every matched pair of a knob, one row each. On a basis: pairs that agree in it, each run in at most one pair; at
    EQUAL_LR, pairs at the baseline's lr; at LR_OF_SETTING, pairs at the setting's; at EVERY_LR, at any. `design`:
    `design_of(runs)`, if already computed.

    Columns: setting, unit (of differences), n_layers, seed, lr, context (key of all other fields but depth), run_id,
    cell_id, value (on the comparison scale), difference, diverged, at_edge (of either run), one ratio per basis, SIDE;
    with suffix _baseline: n_layers, run_id, cell_id, value, diverged, SIDE.
    """
    unit = unit_of(outcome, runs)
    at_one_lr = basis in AT_ONE_LR
    rows = without_measured_models(runs) if at_one_lr else result_rows(runs)
    sides = _sides(rows, knob, outcome, basis, design or design_of(runs))
    baseline = sides[sides["setting"] == knob.baseline].drop(columns=["setting", "context", "seed", "lr"])
    matched = sides[sides["setting"] != knob.baseline].merge(baseline, on="other_fields", suffixes=("", "_baseline"))
    for name in BASES:
        matched[name] = matched[name] / matched[f"{name}_baseline"]
    if at_one_lr:
        role = AT_ONE_LR[basis]
        matched = matched[matched[role] != "rejected"] if role else matched
        matched = matched.assign(at_edge=False, at_edge_baseline=False)
    elif basis is not None:
        matched = _nearest(matched, basis)
    matched["difference"] = matched["value"] - matched["value_baseline"]
    matched["at_edge"] = matched["at_edge"] | matched["at_edge_baseline"]
    matched["matched_lr"], matched["unit"] = at_one_lr, unit
    of_both = ("n_layers", "run_id", "cell_id", "value", "diverged", *SIDE)
    columns = ["setting", "unit", "seed", "lr", "context", "difference", "at_edge", "matched_lr", *BASES]
    return matched[[*columns, *of_both, *(f"{name}_baseline" for name in of_both)]]


def _sides(runs: pd.DataFrame, knob: Knob, outcome: str, basis: str | None, design: Design) -> pd.DataFrame:
    """One row per run that can be one side of a pair; runs with equal `other_fields` can be paired."""
    not_context = {"n_layers", *design.with_depth, "seed", *(("lr",) if basis in AT_ONE_LR else ())}
    free = {*knob.fields, *(COMPENSATES.get(basis, ()) if basis else ())}
    compared = (*design.with_tuning, "lr") if basis in AT_ONE_LR else design.chosen
    others = [name for name in compared if name not in free]
    sides = pd.DataFrame(
        {
            "setting": labels(runs, knob),
            "other_fields": keys(runs, others),
            "context": keys(runs, [name for name in others if name not in not_context]),
            "size": keys(runs, [name for name in design.chosen if name in free and name not in knob.fields]),
            "lr": runs.get("lr"),
            "role": runs["tuning"] if "tuning" in runs.columns else None,
            "at_edge": runs["tuning"] == "edge" if "tuning" in runs.columns else False,
            **columns_of_side(runs, outcome),
            **{name: pd.to_numeric(runs[column], errors="coerce").astype(float) for name, column in BASES.items()},
        }
    )
    return average_duplicates(sides, ["other_fields", "setting", "size"])


def columns_of_side(runs: pd.DataFrame, outcome: str) -> dict[str, pd.Series]:
    """What a comparison needs of each run, whatever it is compared with."""
    return {
        "n_layers": runs["n_layers"].astype(int),
        "seed": runs["seed"].fillna(UNKNOWN_SEED),
        "run_id": runs["run_id"],
        "cell_id": runs["cell_id"],
        "value": values_of(runs, outcome),
        "diverged": runs["outcome"] == "diverged",
        **tuned_side(runs, outcome),
    }


def average_duplicates(rows: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """One row per key: the mean of its finished runs, diverged where any is. Several runs share a key if they have no
    seed, or one seed and several starts (`start_weights`)."""
    several = rows.duplicated(key, keep=False)
    if several.any():
        by_key = rows[several].groupby(key)
        rows.loc[several, "value"] = by_key["value"].transform("mean")
        rows.loc[several, "diverged"] = by_key["diverged"].transform("any")
    return rows.drop_duplicates(key)


def _nearest(matched: pd.DataFrame, basis: str) -> pd.DataFrame:
    """The pairs that agree in a basis; of pairs that share a run, the one of equal sizes, else the nearest."""
    gap = (matched[basis] - 1).abs()
    matched = matched.assign(gap=gap, moved=matched["size"] != matched["size_baseline"])[gap <= MATCH_TOLERANCE]
    matched = matched.sort_values(["moved", "gap", "run_id", "run_id_baseline"]).drop_duplicates("run_id")
    return matched.drop_duplicates(["setting", "run_id_baseline"]).sort_index()


def rounding_sd(outcome: str, *depths: int) -> float:
    """Standard deviation of a difference between runs at these depths by rounding alone: a count of layers changes in
    steps h of 1, a share of them in steps of 1/n_layers, and seeds may agree by chance. A rounding error has variance
    h^2 / 12."""
    quantity = quantities.IN_RUNS.get(outcome)
    is_share = quantity is not None and quantity.unit == "share of layers"
    is_count = quantity is not None and quantity.is_count
    steps = [1 / depth if is_share else 1.0 for depth in depths] if is_share or is_count else []
    return math.sqrt(sum(step**2 for step in steps) / 12)
