"""Does the best learning rate of the smallest runs serve the larger ones? Its regret, for each setting.

Of each setting (knobs and data; tuned fields are no choice) and size (width, depth, tokens), the loss at each lr over
the seeds that every lr has: the chosen lr alone has result seeds, too. The *transferred* lr is the best one at the
setting's smallest size, by parameters x tokens.

    regret = mean over seeds s of  loss_s(transferred lr) - loss_s(best lr by the mean of the other seeds)

with Student's interval from three seeds on. The other seeds choose because the lowest of several noisy means is lower
than its true value: against it, any lr seems to cost something.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.effects.cells import unit_of, values_of
from sparsedepth.effects.intervals import Estimate, estimate
from sparsedepth.effects.knobs import ROLES, changed, find_knobs
from sparsedepth.effects.scale import SCALE_FIELDS
from sparsedepth.effects.summary import display_value, table_page
from sparsedepth.effects.text import title
from sparsedepth.store.tuning_roles import is_at_edge, parse_tuned_fields, without_tuning_runs

BASELINE = "baseline"
SIZE = ["d_model", "n_layers", "params_total", "tokens_trained"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The best lr of a setting at one size, and the regret of the lr of its smallest runs."""

    setting: str
    d_model: int
    n_layers: int
    params: float
    tokens: float
    best: float
    at_edge: bool
    """Whether the best is the lowest or highest lr tried."""
    optimum: float | None
    """Of a fitted curve (`store.tuning_curve`), with its 95% interval; None where it has none."""
    lo: float | None
    hi: float | None
    transferred: float
    regret: Estimate | None
    """Between the values tried, losses are linear in ln lr. None at the smallest size, outside the values tried, and
    with one seed."""


def transfers(runs: pd.DataFrame, outcome: str) -> list[Transfer]:
    """Every setting and size at which lr was tuned: the baseline first, sizes ascending."""
    if "tuned_fields" not in runs.columns or "lr" not in runs.columns:
        return []
    tuned = runs[runs["tuned_fields"].map(lambda text: "lr" in parse_tuned_fields(text))]
    tuned = tuned.assign(value=-quantities.sign(outcome) * values_of(tuned, outcome), setting=_settings(runs, tuned))
    for name in SIZE:
        tuned[name] = pd.to_numeric(tuned[name], errors="coerce")
    tuned = tuned.dropna(subset=["value", "lr", "seed", *SIZE])
    by_setting = sorted(tuned.groupby("setting"), key=lambda group: group[0] != BASELINE)
    return [transfer for setting, rows in by_setting for transfer in _of_setting(str(setting), rows)]


def _settings(runs: pd.DataFrame, tuned: pd.DataFrame) -> pd.Series:
    """'depth_scale=lns, n_kv_heads=1': the knobs of each run that differ from their baselines."""
    knobs = [
        knob
        for knob in find_knobs(runs)
        if ROLES[knob.name].kind in ("knob", "data") and not {"lr", *SCALE_FIELDS}.intersection(knob.fields)
    ]
    return changed(tuned, knobs).map(lambda settings: ", ".join(settings.values()) or BASELINE)


def _of_setting(setting: str, rows: pd.DataFrame) -> Iterator[Transfer]:
    """`loss_SL`: by lr, of the seeds that every lr has."""
    curves = []
    for _, of_size in rows.groupby(SIZE):
        loss_SL = of_size.pivot_table(index="seed", columns="lr", values="value").dropna()
        if loss_SL.size and loss_SL.shape[1] > 1:
            curves.append((of_size.iloc[0], without_tuning_runs(of_size), loss_SL))
    curves.sort(key=lambda curve: float(curve[0]["params_total"] * curve[0]["tokens_trained"]))
    best = [float(loss_SL.columns.to_numpy(float)[loss_SL.mean().argmin()]) for _, _, loss_SL in curves]
    for i, (first, chosen, loss_SL) in enumerate(curves):
        optimum, lo, hi = (_single(chosen, name) for name in ("tuned_optimum", "tuned_optimum_lo", "tuned_optimum_hi"))
        yield Transfer(
            setting=setting, d_model=int(first["d_model"]), n_layers=int(first["n_layers"]),
            params=float(first["params_total"]), tokens=float(first["tokens_trained"]), best=best[i],
            at_edge=is_at_edge(best[i], loss_SL.columns.to_numpy(float)), optimum=optimum, lo=lo, hi=hi,
            transferred=best[0], regret=_regret(loss_SL, best[0]) if i else None,
        )  # fmt: skip


def _regret(losses: pd.DataFrame, transferred: float) -> Estimate | None:
    loss_SL, rates, n_seeds = losses.to_numpy(float), losses.columns.to_numpy(float), len(losses)
    if n_seeds < 2 or not rates[0] <= transferred <= rates[-1]:
        return None
    best_S = (loss_SL.sum(0) - loss_SL).argmin(1)  # by the other seeds
    at_transferred = [np.interp(math.log(transferred), np.log(rates), loss_L) for loss_L in loss_SL]
    return estimate(np.array(at_transferred) - loss_SL[np.arange(n_seeds), best_S])


def _single(rows: pd.DataFrame, name: str) -> float | None:
    """The value of a column that has one; None where several configurations differ in it."""
    values = rows[name].dropna().unique() if name in rows.columns else []
    return float(values[0]) if len(values) == 1 else None


def transfer_page(by_setting: list[Transfer], outcome: str, runs: pd.DataFrame) -> str:
    """A table, a line per setting and size."""
    unit = unit_of(outcome, runs)
    rows = []
    for transfer in by_setting:
        regret = transfer.regret
        ends = (regret.mean, regret.lo, regret.hi) if regret else (None, None, None)
        best = f"{transfer.best:g}{' (edge)' if transfer.at_edge else ''}"
        optimum = (None if value is None else f"{value:.3g}" for value in (transfer.optimum, transfer.lo, transfer.hi))
        cells = (None if value is None else display_value(value, unit) for value in ends)
        rows.append(
            (*cells, f"{transfer.transferred:g}", best, *optimum, transfer.n_layers, transfer.d_model,
             f"{transfer.tokens:.3g}", transfer.setting)
        )  # fmt: skip
    names = ("regret", "lo", "hi", "lr", "best_lr", "optimum", "opt_lo", "opt_hi", "n_layers", "d_model", "tokens")
    head = (
        f"Does the best lr of the smallest runs serve the larger ones? {title(outcome, unit)}",
        "lr: the best of the setting's smallest runs, by parameters x tokens; regret: how much worse the outcome is "
        "at that lr than at the best one of the size, which the other tuning seeds choose; lo, hi: 95% interval",
        "best_lr: by the mean of all tuning seeds ('edge': of the values tried); optimum: of the fitted curve, with "
        "its 95% interval",
    )
    return table_page(head, (*names, "setting"), rows, ("d_model", "tokens", "opt_lo", "opt_hi", "optimum"), ())
