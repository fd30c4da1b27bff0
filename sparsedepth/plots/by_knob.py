"""Layer by layer and along training, a line per setting of a knob: residual variance, and the scores of the layers.

A row of panels per knob. Its runs are those that moved no other knob from its baseline (where there are none, those
that moved the fewest); a line is their mean over seeds, the band their range. The deepest runs are drawn in full, the
shallowest pale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from sparsedepth.effects.knobs import changed, find_knobs, labels
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import at_last_step, mean_and_range, read_metrics, sources, trained_runs
from sparsedepth.plots.style import (
    GREY,
    MOVES_VARIANCE,
    caption,
    fitting_legend,
    groups,
    inert,
    layer_ticks,
    line_handle,
    set_layer_scale,
    setting_styles,
    short,
)
from sparsedepth.quantities import BY_LAYER, IN_RUNS, PROFILED
from sparsedepth.quantities.record import Quantity
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import degeneracy_caption, sound_layer_metrics

VARIANCE = "residual_variance"
SCORES = ("causal_effect", "affine_loss_increase", "affine_loss_added", "skip_loss_increase", "jacobian_deviation")
GRADIENTS = ("gradient_norm", "stream_gradient")
"""Of each block's weights at the end of training, and of the stream."""
ALONG_TRAINING = {"training": "tokens (last layer)", "train_loss": "tokens"}
"""Panels along training, with the names of their x axes; the others are over layers."""
MOST_PANELS = 9
"""On a page."""
MOST_MARKERS = 25
"""On a line: of more points, every second or third has one, and so on."""
PLACE = " in "
"""Between a setting and the results folder that it is from, where there are several."""
MOVED = ["run_id", "n_layers", "lr"]
ALL_RUNS = "n_layers"
"""Names the row of a store in which nothing but depth was varied."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    rows: pd.DataFrame
    """Columns: knob, setting, n_layers, panel, x, mean, low, high, n_runs, lr (NaN where the line's runs differ in it).
    `panel` is a metric, with x the layer, or 'training', with x the tokens and the residual variance of the last layer,
    or 'train_loss', with x the tokens."""
    settings: dict[str, tuple[str, ...]]
    """By knob: its settings, the baseline first."""
    degenerate: str = ""
    """Which of the scores that sum these values up say nothing here, and why: a sentence."""

    @property
    def panels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.rows["panel"]))


def curves(store: Store) -> Drawing:
    """Training loss along training. Raises NothingToDraw."""
    rows = store.frame("select run_id, tokens as x, train_loss as value from curves where train_loss is not null")
    moved = single_moves(trained_runs(store))
    by_setting = _lines(moved, rows.assign(panel="train_loss").merge(_at_ends(moved), on="run_id"))
    if by_setting.rows.empty:
        raise NothingToDraw("no finished run has a curve of its training loss")
    return Drawing(data=by_setting.rows, page=partial(page_of_lines, by_setting))


def layer_lines(metrics: Sequence[str], store: Store, over_training: bool = False) -> Drawing:
    """These metrics by layer, the residual variance over training too. Raises NothingToDraw."""
    by_setting = lines(trained_runs(store), read_metrics(store, "layers", metrics), over_training)
    if by_setting.rows.empty:
        raise NothingToDraw(f"no finished run has {' or '.join(metrics)} by layer; measure it")
    return Drawing(data=by_setting.rows, page=partial(page_of_lines, by_setting))


def lines(runs: pd.DataFrame, layers: pd.DataFrame, over_training: bool = False) -> Lines:
    """The numbers, from the rows of `runs` (trained ones) and `layers`, at the shallowest and the deepest depth."""
    finished = runs[runs["outcome"] == "ok"]
    moved = single_moves(runs)
    values = layers[(layers["layer"] >= 1) & layers["value"].notna()]
    drawn_as, divided = sound_layer_metrics(values["metric"], finished[finished["run_id"].isin(moved["run_id"])])
    values = values[values["metric"].isin(drawn_as.values())]
    parts = [at_last_step(values).rename(columns={"metric": "panel", "layer": "x"})]
    if over_training:
        top = values.merge(finished[["run_id", "n_layers", "batch_tokens"]], on="run_id")
        top = top[(top["layer"] == top["n_layers"]) & (top["metric"] == VARIANCE)]
        top = top.assign(panel="training", x=top["step"] * top["batch_tokens"])
        parts.append(top[["run_id", "panel", "x", "value"]])
    drawn = pd.concat(parts)[["run_id", "panel", "x", "value"]].merge(_at_ends(moved), on="run_id")
    logarithmic = [panel for panel in set(drawn["panel"]) if _quantity(panel).scale == "log"]
    by_setting = _lines(moved, drawn[~drawn["panel"].isin(logarithmic) | (drawn["value"] > 0)])
    scores_of = [score.name for score in PROFILED if score.rows in by_setting.panels]
    return replace(by_setting, degenerate=divided + degeneracy_caption(scores_of, finished))


def _at_ends(moved: pd.DataFrame) -> pd.DataFrame:
    """The runs of the shallowest and the deepest depth."""
    return moved[moved["n_layers"].isin([moved["n_layers"].min(), moved["n_layers"].max()])]


def _lines(moved: pd.DataFrame, drawn: pd.DataFrame) -> Lines:
    """Mean and range of the values of each setting; `moved` are the runs of `single_moves`."""
    rows = mean_and_range(drawn, ["knob", "setting", "n_layers", "panel", "x"])
    settings = {str(knob): tuple(dict.fromkeys(part["setting"])) for knob, part in moved.groupby("knob", sort=False)}
    order = {panel: i for i, panel in enumerate((*SCORES, VARIANCE, "training"))}
    rows = rows.sort_values(["panel", "x"], key=lambda c: c.map(order) if c.name == "panel" else c, kind="stable")
    line = ["knob", "setting", "n_layers"]
    rates = moved.groupby(line)["lr"].agg(lambda lr: lr.iloc[0] if lr.nunique() == 1 else math.nan)
    rows = rows.join(rates.astype(float), on=line)
    return Lines(rows=rows.reset_index(drop=True), settings=settings)


def single_moves(runs: pd.DataFrame) -> pd.DataFrame:
    """Per knob, the finished runs that moved no other one: columns run_id, n_layers, lr, knob, setting; settings in the
    knob's order, each by its folder where there are several. Without a knob, all finished runs, under ALL_RUNS."""
    finished = runs[runs["outcome"] == "ok"]
    places = sources(finished).map(lambda name: f"{PLACE}{name}" if name else "")
    knobs = find_knobs(runs)
    if not knobs:
        depths = finished.sort_values("n_layers")
        named = depths["n_layers"].map("n_layers={}".format) + places.loc[depths.index]
        return depths[MOVED].assign(knob=ALL_RUNS, setting=named)
    away = changed(finished, knobs)
    parts = []
    for knob in knobs:
        others = away.map(lambda names, knob=knob: len(set(names) - {knob.name}))
        kept = finished[others == others.groupby(finished["n_layers"]).transform("min")]
        part = kept[MOVED].assign(knob=knob.name, setting=labels(kept, knob))
        order = {setting: i for i, setting in enumerate(knob.settings)}
        part = part.sort_values("setting", key=lambda column, order=order: column.map(order), kind="stable")
        parts.append(part.assign(setting=part["setting"] + places.loc[part.index]))
    return pd.concat(parts, ignore_index=True)


def shown_knobs(by_setting: Lines, most: int) -> list[str]:
    """The knobs with lines, in their order; of many, those whose settings lie furthest apart at the deepest depth: the
    median over x of the settings' spread, over the median size, in the panel where that is largest."""
    rows = by_setting.rows[by_setting.rows["n_layers"] == by_setting.rows["n_layers"].max()]
    apart: dict[str, float] = {}
    for (knob, _), part in groups(rows, "knob", "panel"):
        means = part.groupby("x")["mean"]
        size = float(part["mean"].abs().median()) or 1.0
        apart[knob] = max(apart.get(knob, 0.0), float((means.max() - means.min()).median()) / size)
    known = [knob for knob in by_setting.settings if (by_setting.rows["knob"] == knob).any()]
    kept = sorted(known, key=lambda knob: -apart.get(knob, 0.0))[:most]
    return [knob for knob in known if knob in kept]


def page_of_lines(by_setting: Lines) -> Figure:
    """A row of panels for each knob, a line for each of its settings; of many knobs those that tell apart."""
    panels = by_setting.panels
    knobs = shown_knobs(by_setting, MOST_PANELS // len(panels))
    rows = by_setting.rows[by_setting.rows["knob"].isin(knobs)]
    own_rates = rows.loc[~rows["setting"].str.contains(r"\blr="), "lr"].nunique() > 1
    page = Figure(figsize=(max(6.8, 3.1 * len(panels)), 2.6 * len(knobs) + 0.8), layout="constrained")
    axes = page.subplots(len(knobs), len(panels), squeeze=False, sharex="col", sharey="col")
    for i, knob in enumerate(knobs):
        of_knob, settings = rows[rows["knob"] == knob], by_setting.settings[knob]
        styles = setting_styles(settings)
        for axis, panel in zip(axes[i], panels, strict=True):
            _draw_panel(axis, panel, of_knob[of_knob["panel"] == panel], styles)
        rates = _rates(of_knob) if own_rates else {}
        handles = [
            line_handle(inert(_named(setting) + rates.get(setting, "")), styles[setting]) for setting in settings
        ]
        legend, n_columns = fitting_legend(  # on the left, above its row: a narrow window shows it
            page, axes[i][0], handles, 2 if len(settings) < 5 else 3, indent=0.7,
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), fontsize=7.5, borderaxespad=0.2,
        )  # fmt: skip
        legend.set_in_layout(False)
        height = -(-len(settings) // n_columns)
        axes[i][0].set_title("\n".join(" " * height), fontsize=8.5)  # room for the legend, which may be wider
    for column, panel in zip(axes.T, panels, strict=True):
        shown = rows[rows["panel"] == panel]
        if len(shown):  # one scale for the column, of all its rows
            set_layer_scale(column[0], _quantity(panel).scale, [*shown["low"], *shown["high"]])
    depths = sorted(set(rows["n_layers"]))
    ends = f" Full: {depths[-1]} layers; pale: {depths[0]}." if len(depths) > 1 else f" {depths[0]} layers."
    most = int(rows["n_runs"].max())
    text = f"Mean and range over up to {most} runs; no other knob moved.{ends}" if most > 1 else f"One run each.{ends}"
    if own_rates:
        text += " Each line has its own lr (above, that of the full lines)"
        text += f"{MOVES_VARIANCE}." if VARIANCE in panels else "."
    elif len(rates := set(rows["lr"].dropna())) == 1:
        text += f" lr {rates.pop():g} throughout."
    if left_out := [knob for knob in by_setting.settings if knob not in knobs]:
        text += f" Not shown, since their settings lie closer together: {', '.join(map(inert, left_out))}."
    caption(page, text + by_setting.degenerate)
    return page


def _rates(of_knob: pd.DataFrame) -> dict[str, str]:
    """', lr 0.003' of each setting at the deepest depth, unless its name says it."""
    deepest = of_knob[of_knob["n_layers"] == of_knob["n_layers"].max()].drop_duplicates("setting").dropna(subset="lr")
    deepest = deepest[~deepest["setting"].str.contains(r"\blr=")]
    return {str(setting): f", lr {lr:g}" for setting, lr in zip(deepest["setting"], deepest["lr"], strict=True)}


def _named(setting: str) -> str:
    """A setting in a legend, cut where it is long; the folder that it is from stays whole."""
    name, _, place = setting.partition(PLACE)
    return f"{short(name)}{PLACE}{place}" if place else short(name)


def _quantity(panel: str) -> Quantity:
    return IN_RUNS[panel] if panel in IN_RUNS else BY_LAYER[VARIANCE if panel == "training" else panel]


def _draw_panel(axis: Any, panel: str, shown: pd.DataFrame, styles: dict[str, tuple[str, str, str]]) -> None:
    quantity = _quantity(panel)
    deepest = shown["n_layers"].max()
    for (setting, depth), line in groups(shown, "setting", "n_layers"):
        colour, marker, dashes = styles[setting]
        full = depth == deepest
        axis.plot(
            line["x"], line["mean"], color=colour, linestyle=dashes, alpha=1 if full else 0.4,
            linewidth=1.4 if full else 1.0, marker=marker if full else "", markersize=2.8, markeredgewidth=0,
            markevery=-(-len(line) // MOST_MARKERS),
        )  # fmt: skip
        if full:
            axis.fill_between(line["x"], line["low"], line["high"], color=colour, alpha=0.14, linewidth=0)
    axis.set_xlabel(ALONG_TRAINING.get(panel, "layer"))
    axis.set_ylabel(quantity.axis_label)
    axis.tick_params(labelbottom=True, labelleft=True)
    if shown.empty:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=GREY, fontsize=8)
        return
    if panel in ALONG_TRAINING:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        layer_ticks(axis.xaxis)
