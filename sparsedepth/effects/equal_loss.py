"""Effects on a number of layers at equal loss, since a better model needs more of its blocks whatever its setting.

    y' = y - b (loss - mean loss)       b = sum (y - mean y) (loss - mean loss) / sum (loss - mean loss)^2

of each depth, the means within a setting at one lr and role (analysis of covariance). The half-width of an effect on y'
grows by the error of b: h^2 + (t se_b d)^2, with d the effect on the loss."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from sparsedepth.effects.cells import Cells, values_of
from sparsedepth.effects.frame import setting_effects
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.small_sample import t_critical
from sparsedepth.words.runs import layers_hint


class Covariance(NamedTuple):
    """Of an outcome with the loss, within settings of a depth."""

    slope: float
    """layers per nat/token"""
    half_width: float
    r: float


class AtEqualLoss(NamedTuple):
    loss: str
    n_layers: int
    within: Covariance
    effects: tuple[tuple[str, float, float], ...]
    """Setting, effect, half-width of its interval."""


def effects_at_equal_loss(cells: Cells) -> Iterator[AtEqualLoss]:
    """By depth; none for an outcome that is no number of layers."""
    if not layers_hint(cells.outcome):
        return
    loss = loss_of(cells.runs)
    on_loss = setting_effects(cells.of_outcome(loss)).set_index(["n_layers", "setting"])["estimate"]
    losses = values_of(cells.runs, loss).reindex(cells.rows.index)
    for depth, rows in cells.rows.assign(loss=losses).dropna(subset=["value", "loss"]).groupby("n_layers"):
        if (within := _covariance(rows)) is None:
            continue
        adjusted = rows.assign(value=rows["value"] - within.slope * (rows["loss"] - rows["loss"].mean()))
        effects = []
        for row in setting_effects(replace(cells, rows=adjusted)).dropna(subset=["lo"]).to_dict("records"):
            shift = within.half_width * on_loss.get((depth, row["setting"]), math.nan)
            effects.append((row["setting"], row["estimate"], math.hypot((row["hi"] - row["lo"]) / 2, shift)))
        if effects:
            yield AtEqualLoss(loss, int(rows["n_layers"].iloc[0]), within, tuple(effects))


def _covariance(rows: pd.DataFrame) -> Covariance | None:
    """None without degrees of freedom, or where one of the two does not vary."""
    groups = rows.groupby(["setting", "lr", "role"], dropna=False)
    x_N, y_N = (rows[name] - groups[name].transform("mean") for name in ("loss", "value"))
    df, xx = len(rows) - groups.ngroups - 1, (x_N**2).sum()
    if df < 2 or not xx or not y_N.any():
        return None
    slope = (x_N * y_N).sum() / xx
    error = math.sqrt(((y_N - slope * x_N) ** 2).sum() / df / xx)
    return Covariance(slope, t_critical(df) * error, slope * math.sqrt(xx / (y_N**2).sum()))
