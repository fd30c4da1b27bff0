"""Forest plot: every setting against its baseline at every depth.

A point is the mean paired difference with its 95% interval, filled if it is distinguishable. The grey bar is the noise
floor, the difference that seeds alone can cause (`effects.contrast`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from sparsedepth.config.plain_text import counted
from sparsedepth.effects.all_effects import effects_of
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.knobs import find_knobs
from sparsedepth.effects.pairs import BASES
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import trained_runs
from sparsedepth.plots.style import (
    CHANGES_VARIANCE,
    GREY,
    MISSING,
    caption,
    depth_colours,
    depth_legend,
    escaped,
    shortened,
)
from sparsedepth.quantities import IN_RUNS, axis_label
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption, sound_forms

VARIANCE = "residual_variance_last"
OUTCOMES = ("val_loss", VARIANCE, "usefulness_loss_increase", "causal_score")
LOG_UNIT = "ln ratio"
FIELDS = {
    **{name: name for name in ("outcome", "knob", "setting", "baseline", "n_layers")},
    **{"effect": "effect.mean", "lo": "effect.lo", "hi": "effect.hi", "unit": "unit", "noise_floor": "floor"},
    **{"pairs": "effect.n", "seeds": "n_seeds", "diverged": "n_diverged", "tuned": "tuned", "verdict": "verdict"},
}
"""Column of the numbers drawn -> attribute of a contrast."""


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    contrast: Contrast


def all_contrasts(runs: pd.DataFrame) -> list[Contrast]:
    """Every setting of every knob at every depth, on the outcomes of the forest plot, degenerate scores in their sound
    form; `runs` are trained ones. Contrasts that agree on no basis are left out, as in `sparsedepth effects`: other
    data with another budget, for instance."""
    knobs = find_knobs(runs)
    outcomes = sound_forms(with_loss(loss_of(runs), OUTCOMES), runs)
    contrasts = [contrast for name in outcomes.values() for contrast in effects_of(runs, knobs, name)]
    return [c for c in contrasts if c.effect.mean is not None and any(map(c.matches, BASES))]


def effects(store: Store) -> Drawing:
    """The effects of every knob. Raises NothingToDraw."""
    runs = trained_runs(store)
    panels: dict[str, list[Row]] = {}
    for contrast in all_contrasts(runs):
        label = f"{shortened(contrast.setting)}\nvs {shortened(contrast.baseline)}"
        panels.setdefault(contrast.outcome, []).append(Row(label=label, contrast=contrast))
    if not panels:
        raise NothingToDraw(
            "no two finished runs differ in one knob only and agree in tokens, parameters or FLOPs, "
            "so there is no effect to draw"
        )
    forms = sound_forms(with_loss(loss_of(runs), OUTCOMES), runs)
    degenerate = degeneracy_caption(forms, runs, forms)
    depths = sorted(set(runs["n_layers"]))
    return Drawing(data=table(panels), page=partial(page_of_effects, panels, depths, degenerate=degenerate))


def table(panels: dict[str, list[Row]]) -> pd.DataFrame:
    """One row per point."""
    rows = [attrgetter(*FIELDS.values())(row.contrast) for rows in panels.values() for row in rows]
    return pd.DataFrame(rows, columns=[*FIELDS])


def lr_change(contrast: Contrast) -> str:
    """'0.003 → 0.006', baseline first; '' unless the sides have different tuned lr."""
    own = re.fullmatch(r"each at its own .+ \((.+) -> (.+)\)", contrast.tuned)
    return f"{own[1]} → {own[2]}" if own and own[1] != own[2] else ""


def page_of_effects(panels: dict[str, list[Row]], depths: Sequence[int], degenerate: str = "") -> Figure:
    """One panel per outcome: every effect as a point with its interval, over the bar of the noise floor."""
    contrasts = [row.contrast for rows in panels.values() for row in rows]
    colours = depth_colours(depths)
    depths = [depth for depth in depths if any(contrast.n_layers == depth for contrast in contrasts)]
    labels = list(dict.fromkeys(row.label for rows in panels.values() for row in rows))
    step = 0.16 * max(2.2, len(depths) + 0.6)
    height = step * len(labels) + 1.3
    width = max(6.8, 1.9 + 2.35 * len(panels))
    width += 1.3 * any(lr_change(row.contrast) for row in panels.get(VARIANCE, ()))
    page = Figure(figsize=(width, height), layout="constrained")
    axes = page.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (name, rows) in zip(axes, panels.items(), strict=True):
        _draw_forest(axis, rows, labels, depths, colours)
        is_ratio = rows[0].contrast.unit == LOG_UNIT
        axis.set_title(IN_RUNS[name].display_name if is_ratio else axis_label(name), fontsize=8.5)
    depth_legend(page, {depth: colours[depth] for depth in depths}, n_columns=6)
    text = (
        "Paired difference and 95% interval. Filled: significant (beyond the noise floor of seeds, the grey bar; "
        "interval excludes 0; Holm's p at most 0.05 over the effects on this outcome at this depth). Hollow: not "
        "distinguishable"
    )
    if any(contrast.verdict_ignoring_tuning != contrast.verdict for contrast in contrasts):
        text += ", or withheld because of uneven tuning"
    text += "."
    if any(lr_change(row.contrast) for row in panels.get(VARIANCE, ())):
        text += f" Right of the residual variance: tuned lr of baseline → setting{CHANGES_VARIANCE}."
    if any(contrast.effect.lo is None for contrast in contrasts):
        text += " No line: too few pairs for an interval."
    diverged = sum(row.contrast.n_diverged for row in next(iter(panels.values())))
    left_out = f" Not shown: {counted(diverged, 'pair')} with a diverged run." if diverged else ""
    caption(page, text + left_out + degenerate)
    return page


def _draw_forest(
    axis: Any, rows: Sequence[Row], labels: Sequence[str], depths: Sequence[int], colours: dict[int, str]
) -> None:
    spread = 0.76 / len(depths)
    for row in rows:
        contrast = row.contrast
        depth, effect = contrast.n_layers, contrast.effect
        assert depth is not None and effect.mean is not None
        y = labels.index(row.label) + spread * (depths.index(depth) - (len(depths) - 1) / 2)
        if contrast.floor is not None:
            axis.barh(
                y, 2 * contrast.floor, left=-contrast.floor, height=0.9 * spread, color=MISSING, alpha=0.45, linewidth=0
            )
        if effect.lo is not None and effect.hi is not None:
            axis.plot([effect.lo, effect.hi], [y, y], color=colours[depth], linewidth=1.4)
        face = "white" if contrast.verdict == "not distinguishable" else colours[depth]
        if contrast.outcome == VARIANCE:  # at the panel's right end
            position: Any = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 6.5, "color": GREY}
            axis.text(1.01, y, lr_change(contrast), **position)
        axis.plot(effect.mean, y, "o", markersize=4.5, color=colours[depth], markerfacecolor=face)
    axis.axvline(0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(labels)), [escaped(label) for label in labels], fontsize=7.5)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    for i in range(1, len(labels)):
        axis.axhline(i - 0.5, color="#e4e4e4", linewidth=0.6, zorder=0)
    _label_x(axis, rows[0].contrast.unit)


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
