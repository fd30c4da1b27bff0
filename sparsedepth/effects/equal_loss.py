"""Effects on a number of layers at equal loss, since a better model needs more of its blocks whatever its setting.

    y' = y - b (loss - mean loss)       b = sum (y - mean y) (loss - mean loss) / sum (loss - mean loss)^2

of each depth, the means within a setting at one lr and role (analysis of covariance). The half-width of an effect on y'
grows by the error of b: h^2 + (t se_b d)^2, with d the effect on the loss.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sparsedepth.effects.cells import Cells, values_of
from sparsedepth.effects.frame import setting_effects
from sparsedepth.store.comparable_loss import layers_hint, loss_of
from sparsedepth.store.small_sample import t_critical


def equal_loss_lines(cells: Cells) -> Iterator[str]:
    """'at equal val_loss, 12 layers (within a setting -5.2 layers per nat/token, r -0.71): depth_scale=lns +0.31 (-0.2
    to 0.8)', a line for each depth; none for an outcome that is no number of layers."""
    loss = loss_of(cells.runs)
    if not layers_hint(cells.outcome):
        return
    on_loss = setting_effects(cells.of_outcome(loss)).set_index(["n_layers", "setting"])["estimate"]
    losses = values_of(cells.runs, loss).reindex(cells.rows.index)
    for depth, rows in cells.rows.assign(loss=losses).dropna(subset=["value", "loss"]).groupby("n_layers"):
        groups = rows.groupby(["setting", "lr", "role"], dropna=False)
        x_N, y_N = (rows[name] - groups[name].transform("mean") for name in ("loss", "value"))
        df, xx = len(rows) - groups.ngroups - 1, float((x_N**2).sum())
        if df < 2 or not xx or not y_N.any():
            continue
        slope = float((x_N * y_N).sum()) / xx
        error = math.sqrt(float(((y_N - slope * x_N) ** 2).sum()) / df / xx)
        adjusted = rows.assign(value=rows["value"] - slope * (rows["loss"] - rows["loss"].mean()))
        texts = []
        for row in setting_effects(replace(cells, rows=adjusted)).dropna(subset=["lo"]).to_dict("records"):
            middle, shift = row["estimate"], t_critical(df) * error * on_loss.get((depth, row["setting"]), np.nan)
            half = math.hypot((row["hi"] - row["lo"]) / 2, shift)
            texts.append(f"{row['setting']} {middle:+.2g} ({middle - half:+.2g} to {middle + half:+.2g})")
        if texts:
            r = slope * math.sqrt(xx / float((y_N**2).sum()))
            within = f"within a setting {slope:+.2g} layers per nat/token, r {r:+.2f}"
            yield f"at equal {loss}, {depth} layers ({within}): {'; '.join(texts)}"
