"""Forest plot: every setting against its baseline at every depth.

A point is an estimate of the frame `effects` with its 95% interval, filled where the verdict is lower or higher."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator

from sparsedepth.effects.cells import BASELINE
from sparsedepth.effects.frame import setting_effects
from sparsedepth.once import once
from sparsedepth.plots.page import Drawing, NothingToDraw, caption, depth_legend, mark_id, panels, paper_width
from sparsedepth.plots.runs import cells_of_store, of_selection, read_runs, settings_in_order
from sparsedepth.plots.style import GREY, depth_colours, log_scale
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import UsableForm, usable_forms
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.captions import LONGEST, effect_mark, effects_caption, escaped, folded, lr_change, not_shown
from sparsedepth.words.degeneracy import degeneracy_caption
from sparsedepth.words.effects import nothing_text
from sparsedepth.words.plain_text import counted

VARIANCE = "residual_variance_last"
OUTCOMES = ("val_loss", VARIANCE, "usefulness_loss_increase", "causal_score")
LOG_UNIT = "ln ratio"
SIZES = ["estimate", "lo", "hi"]
COLUMNS = (
    *("outcome", "setting", "n_layers", *SIZES, "unit", "detectable", "verdict", "reason"),
    *("lr", "lr_baseline", "seeds", "diverged"),
)


@once
def effects_of(store: Store) -> pd.DataFrame:
    """Every setting against the baseline at every depth, on the outcomes of the forest plot, degenerate scores in their
    sound form. Settings that agree with the baseline in no cost are left out: other data with another budget."""
    cells = cells_of_store(store)
    outcomes = (
        cells.of_outcome(name) for name in dict.fromkeys(usable.form for usable in outcome_forms(cells.runs).values())
    )
    effects = pd.concat(map(setting_effects, outcomes), ignore_index=True)
    return effects.loc[effects["basis"].ne("none") & effects["estimate"].notna(), [*COLUMNS]].reset_index(drop=True)


def outcome_forms(runs: pd.DataFrame) -> dict[str, UsableForm]:
    """Outcome of the forest plot -> the column that is drawn for it."""
    return usable_forms(with_loss(loss_of(runs), OUTCOMES), runs)


def effects(store: Store) -> Drawing:
    """The effects of every setting. Raises NothingToDraw."""
    runs = read_runs(store)
    data = of_selection(store, effects_of(store))
    if data.empty:
        cells = cells_of_store(store)
        if {*cells.rows["setting"]} <= {BASELINE}:
            raise NothingToDraw(nothing_text(cells))
        raise NothingToDraw(
            "no setting and baseline of one depth agree in tokens, parameters or FLOPs and have seeds in common, "
            "so there is no effect to draw"
        )
    notes = degeneracy_caption(outcome_forms(result_rows(runs)).values())
    return Drawing(data=data, page=partial(page_of_effects, data, sorted(set(runs["n_layers"].astype(int))), notes))


def page_of_effects(data: pd.DataFrame, depths: Sequence[int], notes: str = "") -> Figure:
    """One panel per outcome: every effect as a point with its interval."""
    colours = {depth: colour for depth, colour in depth_colours(depths).items() if (data["n_layers"] == depth).any()}
    settings = settings_in_order(data["setting"])
    outcomes = sorted(dict.fromkeys(data["outcome"]), key=lambda name: name == VARIANCE)  # last, beside room for lr
    rows = _placed(data, settings, [*colours])
    has_lr = rows["lr_change"].any()
    width = 2.35 + (1.5 + 1.3 * has_lr) / len(outcomes)  # with room for the names of settings, and for lr
    most_lines = max(len(folded(name, _letters()).splitlines()) for name in settings)
    of_setting = max(0.16 * max(2.2, len(colours) + 0.6), 0.13 * most_lines)
    if paper_width():  # a panel is at most a page
        n_further = len(settings) - len(settings := settings[: int(8.2 / of_setting)])
        rows, notes = rows[rows["setting"].isin(settings)], notes + not_shown(n_further, "further setting")
    page, axes = panels(len(outcomes), len(outcomes), width, of_setting * len(settings) + 0.9, least=6.8, sharey=True)
    for axis, name in zip(axes, outcomes, strict=True):
        of_outcome = rows[rows["outcome"] == name]
        _draw_effects(axis, of_outcome, colours)
        _label_settings(axis, settings)
        _label_sizes(axis, of_outcome)
    depth_legend(page, colours)
    caption(page, effects_caption(has_lr, int(rows.loc[rows["outcome"] == outcomes[0], "diverged"].sum())) + notes)
    return page


def _placed(data: pd.DataFrame, settings: Sequence[str], depths: Sequence[int]) -> pd.DataFrame:
    """The effects with their place `y`, depths side by side within a setting, and ratios in place of logarithms."""
    is_ratio = data["unit"] == LOG_UNIT
    of_depth = 0.76 / len(depths) * (data["n_layers"].map(depths.index) - (len(depths) - 1) / 2)
    return data.assign(
        y=data["setting"].map(settings.index) + of_depth,
        lr_change=np.where(data["outcome"] == VARIANCE, [lr_change(row) for row in data.to_dict("records")], ""),
        **{size: np.exp(data[size].where(is_ratio)).fillna(data[size]) for size in SIZES},
    )


def _draw_effects(axis: Any, rows: pd.DataFrame, colours: dict[int, str]) -> None:
    for depth, colour in colours.items():
        part, gid = rows[rows["n_layers"] == depth], mark_id(counted(depth, "layer"))
        axis.hlines(part["y"], part["lo"], part["hi"], color=colour, linewidth=1.4, gid=gid)
        face = np.where(part["verdict"].isin(["lower", "higher"]), colour, "white")
        axis.scatter(part["estimate"], part["y"], s=20, color=face, edgecolor=colour, zorder=3, gid=gid)
    has_ratios = bool((rows["unit"] == LOG_UNIT).any())
    axis.marks = pd.DataFrame(
        {
            "x": rows["estimate"],
            "y": rows["y"],
            "group": [counted(depth, "layer") for depth in rows["n_layers"]],
            "text": [effect_mark(row, has_ratios) for row in rows.to_dict("records")],
        }
    )
    for row in rows[rows["lr_change"] != ""].itertuples() if not paper_width() else ():  # at the panel's right end
        at_end = axis.get_yaxis_transform()
        axis.text(1.01, row.y, row.lr_change, fontsize=6.5, color=GREY, transform=at_end, va="center")


def _letters() -> int:
    """Of a line of a setting's name."""
    return 20 if paper_width() else LONGEST


def _label_settings(axis: Any, settings: Sequence[str]) -> None:
    names = [escaped(folded(name, _letters())) for name in settings]
    axis.set_yticks(range(len(settings)), names, fontsize=6.5 if paper_width() else 7.5)
    axis.set_ylim(len(settings) - 0.5, -0.5)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    for i in range(1, len(settings)):
        axis.axhline(i - 0.5, color="#e4e4e4", linewidth=0.6, zorder=0)


def _label_sizes(axis: Any, rows: pd.DataFrame) -> None:
    """The horizontal axis of an outcome: ratios on a logarithmic one."""
    outcome = rows["outcome"].iloc[0]
    unit = rows["unit"].iloc[0]
    n_ticks = 3 if paper_width() else 4
    ratios = unit == LOG_UNIT
    axis.axvline(float(ratios), color="#444444", linewidth=0.8)
    if ratios:
        axis.plot([0.95, 1.05], [0, 0], linewidth=0)  # the least range: that of equal values would have no label
        log_scale(axis, "x", [1.0, *rows[SIZES].stack().dropna()])
        if axis.get_xlim()[1] > 1e3 * axis.get_xlim()[0]:
            axis.xaxis.set_major_locator(LogLocator(numticks=n_ticks))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"×{ratio:g}"))
        label = "ratio to the baseline"
    else:
        axis.xaxis.set_major_locator(MaxNLocator(n_ticks))
        if max(map(abs, axis.get_xlim())) >= 1e4:
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        label = "difference" if unit in ("1", "") else f"difference ({unit})"
    axis.set_title(folded(IN_RUNS[outcome].display_name if ratios else axis_label(outcome), 36), fontsize=8.5)
    axis.tick_params(axis="x", labelsize=7.5)
    axis.set_xlabel(label, size=8, color=GREY)
