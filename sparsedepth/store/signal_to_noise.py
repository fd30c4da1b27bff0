"""How well each quantity tells configurations apart from seeds (Signal and Noise, 2508.13144).

One-way analysis of variance at equal n_layers, pooled over depths: configurations i with n_i >= 2 seeds, each the mean
of its runs, as from several start weights:

    noise^2   MS_within: the variance between the seeds of a configuration
    signal^2  (MS_between - MS_within) / n0, at least 0: the variance between true means, without what noise adds to it
    n0        (N - sum n_i^2 / N) / (k - 1) for the k configurations and N seeds of a depth, averaged with weights k - 1

    signal_to_noise    signal / noise, s
    decision_accuracy  1/2 + arctan(s) / pi: the expected share of pairs of configurations that one seed of each puts in
                       the right order, for normal means and noise
    seeds_for_90pct    (tan(0.4 pi) / s)^2: seeds of each for which that share is 0.9

lo, hi: 95% interval of decision_accuracy by the F distribution of MS_between / MS_within, exact for equal n_i and
normal values. Deviates: the paper's signal is the range of final scores over their mean, its noise the relative
deviation of the last checkpoints of one run; here both are deviations of the same scale, the noise that between seeds.
"""

import math
from typing import TYPE_CHECKING

from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.quantities import IN_RUNS, PROFILED
from sparsedepth.quantities.quantity import Named, Quantity
from sparsedepth.store.comparable_loss import COMMON, OWN, loss_in
from sparsedepth.store.degeneracy import degeneracy, score_rows
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.small_sample import LEVEL
from sparsedepth.store.tuning_roles import IS_RESULT, parse_tuned_fields
from sparsedepth.words.degeneracy import main_reason

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.store.connection import Store

QUESTION = "which quantity tells configurations of equal depth apart best, compared with its noise between seeds?"
COLUMNS = (
    *("quantity", "configurations", "seeds", "signal", "noise", "signal_to_noise", "decision_accuracy", "lo", "hi"),
    *("seeds_for_90pct", "degenerate"),
)
EXPLAINED = (
    "signal: standard deviation of the configurations' true means at equal depth; noise: between their seeds;"
    " decision_accuracy: expected share of pairs of configurations that one seed of each puts in the right order (0.5:"
    " chance); lo, hi: its 95% interval; seeds_for_90pct: seeds of each with which 90% are. A quantity that tells"
    " configurations apart need not measure what its name says (`analysis/calibration.py`)"
)
IN_TERMINAL = ("quantity", "signal_to_noise", "decision_accuracy", "lo", "hi", "seeds_for_90pct")
FORMS = {form.name for score in PROFILED for form in score.depth_columns()}
"""Scores of some of the layers, which a terminal leaves out."""
_WANTED = 0.9
"""Share of the pairs in the right order."""


def answer(store: "Store") -> QueryResult:
    """A row for each measured quantity of two configurations of equal depth or more with two seeds each, the best
    first; `degenerate` is the main reason why a score is (`store.degeneracy`), or NULL."""
    runs = store.frame(f"SELECT * FROM runs WHERE outcome = 'ok' AND {IS_RESULT}")
    runs = runs if runs.empty else _longest(runs)
    rows: list[Named] = []
    for quantity in [] if runs.empty else _quantities(loss_in(store)):
        if found := _compared(quantity, runs):
            judged = degeneracy(quantity.name, score_rows(runs, quantity.name))
            rows.append({**found, "degenerate": main_reason(judged) if judged.is_degenerate else None})
    rows.sort(key=lambda row: (-row["decision_accuracy"], row["quantity"]))
    return QueryResult.of_records(rows, COLUMNS)


def _longest(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Without the shorter of several budgets of schedule wsd: branches of one trunk are one unit."""
    tuned = {name for text in runs["tuned_fields"].dropna() for name in parse_tuned_fields(text)}
    alike = runs[[name for name in CELL_FIELDS if name not in ("train_tokens", *tuned)]].astype(str)
    largest = runs["train_tokens"].groupby(alike.fillna("").agg("\x1f".join, axis=1)).transform("max")
    return runs[(runs["schedule"] != "wsd") | (runs["train_tokens"] == largest)]


def _quantities(loss: str) -> list[Quantity]:
    """Those measured that are better in one direction, or a link of the chain; of the losses the comparable one."""
    told = (each for each in IN_RUNS.values() if each.measure and (each.better or each.stage))
    return [quantity for quantity in told if quantity.name not in {COMMON, OWN} - {loss}]


def _compared(quantity: Quantity, runs: "pd.DataFrame") -> Named | None:
    """A quantity's columns but for `degenerate`; None without noise, or without two configurations of equal depth. The
    names are those of the formulas above."""
    cells = _configurations(quantity, runs)
    depth = cells["n_layers"]
    n = cells["n"]
    n_seeds = n.groupby(depth).sum()
    depth_mean = depth.map((n * cells["mean"]).groupby(depth).sum() / n_seeds)
    df_between = len(cells) - len(n_seeds)
    df_within = int((n - 1).sum())
    within = ((n - 1) * cells["variance"]).sum() / max(df_within, 1)
    if not within > 0:
        return None
    between = (n * (cells["mean"] - depth_mean) ** 2).sum() / df_between
    n0 = (n_seeds - (n**2).groupby(depth).sum() / n_seeds).sum() / df_between
    noise = math.sqrt(within)
    ratio = float(between / within)
    ends = _ratio_interval(ratio, df_between, df_within)
    estimate, lo, hi = (math.sqrt(max(0.0, end - 1) / n0) for end in (ratio, *ends))
    return {
        "quantity": quantity.name,
        "configurations": len(cells),
        "seeds": int(n.sum()),
        "signal": estimate * noise,
        "noise": noise,
        "signal_to_noise": estimate,
        "decision_accuracy": _decision_accuracy(estimate),
        "lo": _decision_accuracy(lo),
        "hi": _decision_accuracy(hi),
        "seeds_for_90pct": math.ceil((math.tan(math.pi * (_WANTED - 0.5)) / estimate) ** 2) if estimate else None,
    }


def _configurations(quantity: Quantity, runs: "pd.DataFrame") -> "pd.DataFrame":
    """Those with two seeds or more, at depths with two or more: n_layers, cell_id, n seeds, their mean and variance."""
    import numpy as np

    unit = runs["seed"].astype(object).fillna(runs["run_id"])
    values = runs[["n_layers", "cell_id"]].assign(unit=unit, value=runs[quantity.name].astype(float)).dropna()
    if quantity.is_ratio or quantity.scale == "log":
        values = values[values["value"] > 0].assign(value=lambda positive: np.log(positive["value"]))
    seeds = values.groupby(["n_layers", "cell_id", "unit"])["value"].mean()
    cells = seeds.groupby(["n_layers", "cell_id"]).agg(n="count", mean="mean", variance="var").reset_index()
    cells = cells[cells["n"] >= 2]
    return cells[cells.groupby("n_layers")["cell_id"].transform("count") >= 2]


def _decision_accuracy(signal_to_noise: float) -> float:
    return 0.5 + math.atan(signal_to_noise) / math.pi


def _ratio_interval(ratio: float, df_between: int, df_within: int) -> tuple[float, float]:
    """The 95% interval of E MS_between / E MS_within."""
    from scipy.stats import f as f_distribution  # slow to import, and needed here alone

    lo, hi = ratio / f_distribution.ppf([(1 + LEVEL) / 2, (1 - LEVEL) / 2], df_between, df_within)
    return float(lo), float(hi)
