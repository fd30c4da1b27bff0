"""Forest plot: every setting against its baseline at every depth.

A point is an estimate of the frame `effects` with its 95% interval, filled where the verdict is lower or higher.
"""

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import read_runs, trained_runs
from sparsedepth.plots.style import (
    CHANGES_VARIANCE,
    COLUMN,
    GREY,
    caption,
    depth_colours,
    depth_legend,
    escaped,
    is_paper,
    panels,
    shortened,
)
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption, sound_forms
from sparsedepth.store.tuning_roles import without_measured_models

VARIANCE = "residual_variance_last"
OUTCOMES = ("val_loss", VARIANCE, "usefulness_loss_increase", "causal_score")
LOG_UNIT = "ln ratio"
COLUMNS = (
    *("outcome", "setting", "n_layers", "estimate", "lo", "hi", "unit", "detectable", "verdict", "reason"),
    *("lr", "lr_baseline", "seeds", "diverged"),
)


def forest_effects(runs: pd.DataFrame) -> pd.DataFrame:
    """Every setting against the baseline at every depth, on the outcomes of the forest plot, degenerate scores in their
    sound form. Settings that agree with the baseline in no cost are left out: other data with another budget."""
    outcomes = sound_forms(with_loss(loss_of(runs), OUTCOMES), runs)
    frames = []
    for outcome in dict.fromkeys(outcomes.values()):
        effects = effects_frame(cells := cells_of(runs, outcome))
        effects = effects[
            (effects["question"] == "setting") & effects["estimate"].notna() & (effects["basis"] != "none")
        ]
        frames.append(effects.assign(outcome=outcome, unit=cells.unit))
    return pd.concat(frames, ignore_index=True)[[*COLUMNS]] if frames else pd.DataFrame(columns=[*COLUMNS])


def effects(store: Store) -> Drawing:
    """The effects of every setting. Raises NothingToDraw."""
    runs = trained_runs(store)
    data = forest_effects(without_measured_models(read_runs(store)))
    if data.empty:
        raise NothingToDraw(
            "no two finished configurations agree in tokens, parameters or FLOPs and have seeds in common, "
            "so there is no effect to draw"
        )
    forms = sound_forms(with_loss(loss_of(runs), OUTCOMES), runs)
    degenerate = degeneracy_caption(forms, runs, forms)
    depths = sorted(set(runs["n_layers"]))
    return Drawing(data=data, page=partial(page_of_effects, data, depths, degenerate=degenerate))


def lr_change(row: Any) -> str:
    """'0.003 → 0.006', baseline first; '' unless the sides have different tuned lr."""
    before, after = row.lr_baseline, row.lr
    return f"{before:g} → {after:g}" if pd.notna(before) and pd.notna(after) and before != after else ""


def page_of_effects(data: pd.DataFrame, depths: Sequence[int], degenerate: str = "") -> Figure:
    """One panel per outcome: every effect as a point with its interval."""
    colours = depth_colours(depths)
    depths = [depth for depth in depths if (data["n_layers"] == depth).any()]
    settings = list(dict.fromkeys(data["setting"]))
    outcomes = list(dict.fromkeys(data["outcome"]))
    variance = data[data["outcome"] == VARIANCE]
    has_lr = any(lr_change(row) for row in variance.itertuples())
    height = 0.16 * max(2.2, len(depths) + 0.6) * len(settings) + 1.3
    width = max(6.8, 1.9 + 2.35 * len(outcomes)) + 1.3 * has_lr
    if is_paper():
        page, axes = panels(len(outcomes), 1, COLUMN, height)
    else:
        page = Figure(figsize=(width, height), layout="constrained")
        axes = page.subplots(1, len(outcomes), squeeze=False, sharey=True)[0]
    for axis, name in zip(axes, outcomes, strict=True):
        rows = data[data["outcome"] == name]
        _draw_forest(axis, rows, settings, depths, colours)
        is_ratio = rows["unit"].iloc[0] == LOG_UNIT
        axis.set_title(IN_RUNS[name].display_name if is_ratio else axis_label(name), fontsize=8.5)
    depth_legend(page, {depth: colours[depth] for depth in depths}, n_columns=6)
    text = (
        "Setting minus baseline, and 95% interval of seeds and of the choice of lr. Filled: lower or higher (adjusted "
        "p below .05 over the settings at this depth). Hollow: not shown."
    )
    if has_lr:
        text += f" Right of the residual variance: tuned lr of baseline → setting{CHANGES_VARIANCE}."
    diverged = int(data.loc[data["outcome"] == outcomes[0], "diverged"].sum())
    left_out = f" Without {counted(diverged, 'diverged run')}." if diverged else ""
    caption(page, text + left_out + degenerate)
    return page


def _draw_forest(
    axis: Any, rows: pd.DataFrame, settings: Sequence[str], depths: Sequence[int], colours: dict[int, str]
) -> None:
    spread = 0.76 / len(depths)
    for row in (SimpleNamespace(**record) for record in rows.to_dict("records")):
        depth = int(row.n_layers)
        y = settings.index(row.setting) + spread * (depths.index(depth) - (len(depths) - 1) / 2)
        axis.plot([row.lo, row.hi], [y, y], color=colours[depth], linewidth=1.4)
        face = colours[depth] if row.verdict in ("lower", "higher") else "white"
        if row.outcome == VARIANCE:  # at the panel's right end
            position: Any = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 6.5, "color": GREY}
            axis.text(1.01, y, lr_change(row), **position)
        axis.plot(row.estimate, y, "o", markersize=4.5, color=colours[depth], markerfacecolor=face)
    axis.axvline(0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(settings)), [escaped(shortened(setting)) for setting in settings], fontsize=7.5)
    axis.set_ylim(len(settings) - 0.5, -0.5)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    for i in range(1, len(settings)):
        axis.axhline(i - 0.5, color="#e4e4e4", linewidth=0.6, zorder=0)
    _label_x(axis, rows["unit"].iloc[0])


def _label_x(axis: Any, unit: str) -> None:
    if unit == LOG_UNIT:
        ratios = ratio_ticks(*axis.get_xlim())
        axis.set_xticks([math.log(ratio) for ratio in ratios], [f"×{ratio:g}" for ratio in ratios])
        axis.set_xlabel("ratio to the baseline")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
        if max(map(abs, axis.get_xlim())) >= 1e4:
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel("difference" if unit in ("1", "") else f"difference ({unit})")
    axis.tick_params(axis="x", labelsize=7.5)
    axis.xaxis.label.set(size=8, color=GREY)


def ratio_ticks(low: float, high: float) -> list[float]:
    """Round ratios with logarithms from `low` to `high`, at least a sixth of the range apart (a quarter if their labels
    are long), 1 first."""
    distance = (high - low) / (6 if low > math.log(1e-3) else 4)
    digits = (1, 2, 5) if high - low < math.log(1e4) else (1,)
    wide = [digit * 10.0**power for power in range(-9, 10) for digit in digits]
    candidates = wide if high - low > math.log(4) else [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0]
    shown: list[float] = []
    for ratio in sorted(candidates, key=lambda ratio: abs(math.log(ratio))):
        position = math.log(ratio)
        if low <= position <= high and all(abs(position - math.log(other)) >= distance for other in shown):
            shown.append(ratio)
    return sorted(shown)
