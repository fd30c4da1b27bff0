"""Forest plot: every setting against its baseline at every depth.

A point is an estimate of the frame `effects` with its 95% interval, filled where the verdict is lower or higher."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator

from sparsedepth.effects.frame import setting_effects
from sparsedepth.plots.page import Drawing, NothingToDraw, caption, depth_legend, is_paper, not_shown, panels
from sparsedepth.plots.runs import cells_of_store, once_per_store, read_runs, settings_in_order
from sparsedepth.plots.style import (
    CHANGES_VARIANCE,
    GREY,
    LONGEST,
    depth_colours,
    escaped,
    log_scale,
    shortened,
    wrapped,
)
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption, sound_forms
from sparsedepth.store.tuning_roles import result_rows

VARIANCE = "residual_variance_last"
OUTCOMES = ("val_loss", VARIANCE, "usefulness_loss_increase", "causal_score")
LOG_UNIT = "ln ratio"
COLUMNS = (
    *("outcome", "setting", "n_layers", "estimate", "lo", "hi", "unit", "detectable", "verdict", "reason"),
    *("lr", "lr_baseline", "seeds", "diverged"),
)


@once_per_store
def effects_of(store: Store) -> pd.DataFrame:
    """Every setting against the baseline at every depth, on the outcomes of the forest plot, degenerate scores in their
    sound form. Settings that agree with the baseline in no cost are left out: other data with another budget."""
    cells = cells_of_store(store)
    outcomes = (cells.of_outcome(name) for name in dict.fromkeys(outcome_forms(cells.runs).values()))
    effects = pd.concat(map(setting_effects, outcomes), ignore_index=True)
    return effects.loc[effects["basis"].ne("none") & effects["estimate"].notna(), [*COLUMNS]].reset_index(drop=True)


def outcome_forms(runs: pd.DataFrame) -> dict[str, str]:
    """Outcome of the forest plot -> the column that is drawn for it."""
    return sound_forms(with_loss(loss_of(runs), OUTCOMES), runs)


def effects(store: Store) -> Drawing:
    """The effects of every setting. Raises NothingToDraw."""
    runs = read_runs(store)
    data = effects_of(store)
    if data.empty:
        raise NothingToDraw(
            "no two finished configurations agree in tokens, parameters or FLOPs and have seeds in common, "
            "so there is no effect to draw"
        )
    forms = outcome_forms(results := result_rows(runs))
    notes = degeneracy_caption(forms, results, forms)
    return Drawing(data=data, page=partial(page_of_effects, data, sorted(set(runs["n_layers"].astype(int))), notes))


def lr_change(row: Mapping[str, Any]) -> str:
    """'0.003 → 0.006', baseline first; '' unless the sides have different tuned lr."""
    before, after = row["lr_baseline"], row["lr"]
    return f"{before:g} → {after:g}" if pd.notna(before) and pd.notna(after) and before != after else ""


def page_of_effects(data: pd.DataFrame, depths: Sequence[int], notes: str = "") -> Figure:
    """One panel per outcome: every effect as a point with its interval."""
    colours = depth_colours(depths)
    depths = [depth for depth in depths if (data["n_layers"] == depth).any()]
    settings = settings_in_order(data["setting"])
    outcomes = sorted(dict.fromkeys(data["outcome"]), key=lambda name: name == VARIANCE)  # last, beside room for lr
    has_lr = any(map(lr_change, data[data["outcome"] == VARIANCE].to_dict("records")))
    width = 2.35 + (1.5 + 1.3 * has_lr) / len(outcomes)  # with room for the names of settings, and for lr
    height = 0.16 * max(2.2, len(depths) + 0.6) * len(settings) + 0.9
    page, axes = panels(len(outcomes), len(outcomes), width, height, least=6.8, sharey=True)
    within = data["n_layers"].map(depths.index) - (len(depths) - 1) / 2
    rows = data.assign(y=data["setting"].map(settings.index) + 0.76 / len(depths) * within)
    for axis, name in zip(axes, outcomes, strict=True):
        _draw_forest(axis, rows[rows["outcome"] == name], settings, colours)
    depth_legend(page, {depth: colours[depth] for depth in depths})
    text = (
        "Setting minus baseline, and 95% interval of seeds and of the choice of lr, where it was tuned. Filled: lower "
        "or higher (adjusted p below .05 over the settings at this depth). Hollow: not shown, or lr decides."
    )
    if has_lr:
        text += f" Right of the residual variance: tuned lr of baseline → setting{CHANGES_VARIANCE}."
    diverged = int(data.loc[data["outcome"] == outcomes[0], "diverged"].sum())
    caption(page, text + not_shown(diverged, "diverged run") + notes)
    return page


def _draw_forest(axis: Any, rows: pd.DataFrame, settings: Sequence[str], colours: dict[int, str]) -> None:
    """The effects on one outcome; ratios on a logarithmic axis."""
    outcome, unit = rows["outcome"].iloc[0], rows["unit"].iloc[0]
    if is_ratio := unit == LOG_UNIT:
        rows = rows.assign(**{end: np.exp(rows[end].astype(float)) for end in ("estimate", "lo", "hi")})
    for row in rows.to_dict("records"):
        colour, y = colours[row["n_layers"]], row["y"]
        axis.plot([row["lo"], row["hi"]], [y, y], color=colour, linewidth=1.4)
        face = colour if row["verdict"] in ("lower", "higher") else "white"
        axis.plot(row["estimate"], y, "o", markersize=4.5, color=colour, markerfacecolor=face)
        if outcome == VARIANCE and not is_paper():  # at the panel's right end
            look: Any = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 6.5, "color": GREY}
            axis.text(1.01, y, lr_change(row), **look)
    axis.axvline(1 if is_ratio else 0, color="#444444", linewidth=0.8)
    fitting = [name if len(name) < 2 * LONGEST and not is_paper() else shortened(name) for name in settings]
    names = [escaped(wrapped(name, 15 if is_paper() else LONGEST)) for name in fitting]  # three lines at most
    axis.set_yticks(range(len(settings)), names, fontsize=7.5)
    axis.set_ylim(len(settings) - 0.5, -0.5)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    for i in range(1, len(settings)):
        axis.axhline(i - 0.5, color="#e4e4e4", linewidth=0.6, zorder=0)
    axis.set_title(wrapped(IN_RUNS[outcome].display_name if is_ratio else axis_label(outcome), 36), fontsize=8.5)
    if is_ratio:
        log_scale(axis, "x", [1.0, *rows[["estimate", "lo", "hi"]].stack().dropna()])
        if axis.get_xlim()[1] > 1e3 * axis.get_xlim()[0]:
            axis.xaxis.set_major_locator(LogLocator(numticks=3 if is_paper() else 4))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"×{ratio:g}"))
        axis.set_xlabel("ratio to the baseline")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(3 if is_paper() else 4))
        if max(map(abs, axis.get_xlim())) >= 1e4:
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel("difference" if unit in ("1", "") else f"difference ({unit})")
    axis.tick_params(axis="x", labelsize=7.5)
    axis.xaxis.label.set(size=8, color=GREY)
