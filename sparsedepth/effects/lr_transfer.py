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
from sparsedepth.effects.intervals import Estimate, estimate
from sparsedepth.effects.knobs import ROLES, changed, find_knobs
from sparsedepth.effects.pairs import unit_of, values_of
from sparsedepth.effects.scale import SCALE_FIELDS
from sparsedepth.effects.summary import display_value, table_page, title
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


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """The runs of a setting at one size."""

    rows: pd.DataFrame
    rates: np.ndarray
    """ascending, (L,)"""
    losses: np.ndarray
    """of the seeds that every lr has, (S, L)"""

    @property
    def compute(self) -> float:
        first = self.rows.iloc[0]
        return float(first["params_total"] * first["tokens_trained"])

    @property
    def best(self) -> float:
        return float(self.rates[self.losses.mean(0).argmin()])


def _of_setting(setting: str, rows: pd.DataFrame) -> Iterator[Transfer]:
    curves = sorted((_curve(of_size) for _, of_size in rows.groupby(SIZE)), key=lambda curve: curve.compute)
    curves = [curve for curve in curves if curve.losses.size and len(curve.rates) > 1]
    for curve in curves:
        first = curve.rows.iloc[0]
        chosen = without_tuning_runs(curve.rows)
        optimum, lo, hi = (_single(chosen, name) for name in ("tuned_optimum", "tuned_optimum_lo", "tuned_optimum_hi"))
        transferred = curves[0].best
        yield Transfer(
            setting=setting, d_model=int(first["d_model"]), n_layers=int(first["n_layers"]),
            params=float(first["params_total"]), tokens=float(first["tokens_trained"]), best=curve.best,
            at_edge=is_at_edge(curve.best, curve.rates), optimum=optimum, lo=lo, hi=hi,
            transferred=transferred, regret=None if curve is curves[0] else _regret(curve, transferred),
        )  # fmt: skip


def _curve(rows: pd.DataFrame) -> _Curve:
    by_seed = rows.pivot_table(index="seed", columns="lr", values="value").dropna()
    return _Curve(rows=rows, rates=by_seed.columns.to_numpy(float), losses=by_seed.to_numpy(float))


def _regret(curve: _Curve, transferred: float) -> Estimate | None:
    loss_SL, n_seeds = curve.losses, len(curve.losses)
    if n_seeds < 2 or not curve.rates[0] <= transferred <= curve.rates[-1]:
        return None
    best_S = (loss_SL.sum(0) - loss_SL).argmin(1)  # by the other seeds
    lr, rate_L = math.log(transferred), np.log(curve.rates)
    return estimate([np.interp(lr, rate_L, loss_SL[s]) - loss_SL[s, best_S[s]] for s in range(n_seeds)])


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
