"""Values by layer and during training, one line per setting of a knob: residual variance, scores, gradients, loss.

One row of panels per knob, with the runs that changed no other knob (or the fewest others, if there are none). A line
is the mean over seeds, the band the range. The deepest runs are dark; pale are those of the shallowest depth that has
several settings of every knob (the shallowest of all, if none has).
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
from sparsedepth.plots.runs import at_last_step, mean_and_range, read_metrics, sources, to_measure, trained_runs
from sparsedepth.plots.style import (
    CHANGES_VARIANCE,
    GREY,
    caption,
    escaped,
    fitting_legend,
    groups,
    layer_ticks,
    line_handle,
    set_layer_scale,
    setting_styles,
    shortened,
)
from sparsedepth.quantities import BY_LAYER, IN_RUNS, PROFILED
from sparsedepth.quantities.record import Quantity
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import RELATIVE_ROWS, degeneracy_caption, sound_layer_metrics

VARIANCE = "residual_variance"
SCORES = ("causal_effect", "affine_loss_increase", "affine_loss_added", "skip_loss_increase", "jacobian_deviation")
GRADIENTS = ("gradient_norm", "stream_gradient")
"""Of the weights of each block at the end of training, and of the stream."""
ALONG_TRAINING = {"training": "tokens (last layer)", "train_loss": "tokens"}
"""Panels over training -> x axis label; the others are over layers."""
MOST_PANELS = 9
"""Per page."""
MOST_MARKERS = 25
"""Per line; with more points, every second or third has a marker, and so on."""
IN_FOLDER = " in "
"""Between a setting and its results folder, if there are several."""
RUN_COLUMNS = ["run_id", "n_layers", "lr"]
ALL_RUNS = "n_layers"
"""Name of the only row if nothing but depth was varied."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    rows: pd.DataFrame
    """Columns: knob, setting, n_layers, panel, x, mean, low, high, n_runs, lr (NaN if the runs of the line differ in
    it). `panel` is a metric by layer x; or 'training', the residual variance of the last layer, or 'train_loss', both
    by tokens x."""
    settings: dict[str, tuple[str, ...]]
    """Knob -> its settings, the baseline first."""
    other_depths: tuple[int, ...] = ()
    """Depths of runs that are not drawn."""
    degenerate: str = ""
    """A sentence: which summary scores of these values are degenerate, and why."""

    @property
    def panels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.rows["panel"]))


def curves(store: Store) -> Drawing:
    """Training loss during training. Raises NothingToDraw."""
    rows = store.frame("select run_id, tokens as x, train_loss as value from curves where train_loss is not null")
    selected = one_knob_runs(trained_runs(store))
    by_setting = _lines(selected, rows.assign(panel="train_loss").merge(_two_depths(selected), on="run_id"))
    if by_setting.rows.empty:
        raise NothingToDraw("no finished run has a curve of its training loss")
    return Drawing(data=by_setting.rows, page=partial(page_of_lines, by_setting))


def layer_lines(metrics: Sequence[str], store: Store, over_training: bool = False) -> Drawing:
    """These metrics by layer, the residual variance over training too. Raises NothingToDraw."""
    by_setting = lines(trained_runs(store), read_metrics(store, "layers", metrics), over_training)
    if by_setting.rows.empty:
        raise NothingToDraw(f"no finished run has {' or '.join(metrics)} by layer; {to_measure(metrics)}")
    return Drawing(data=by_setting.rows, page=partial(page_of_lines, by_setting))


def lines(runs: pd.DataFrame, layers: pd.DataFrame, over_training: bool = False) -> Lines:
    """The numbers at two depths (`_two_depths`), from the rows of `runs` (trained ones) and `layers`."""
    finished = runs[runs["outcome"] == "ok"]
    selected = one_knob_runs(runs)
    values = layers[(layers["layer"] >= 1) & layers["value"].notna()]
    drawn_forms, relative = sound_layer_metrics(values["metric"], finished[finished["run_id"].isin(selected["run_id"])])
    values = values[values["metric"].isin(drawn_forms.values())]
    parts = [at_last_step(values).rename(columns={"metric": "panel", "layer": "x"})]
    if over_training:
        top = values.merge(finished[["run_id", "n_layers", "batch_tokens"]], on="run_id")
        top = top[(top["layer"] == top["n_layers"]) & (top["metric"] == VARIANCE)]
        top = top.assign(panel="training", x=top["step"] * top["batch_tokens"])
        parts.append(top[["run_id", "panel", "x", "value"]])
    drawn = pd.concat(parts)[["run_id", "panel", "x", "value"]].merge(_two_depths(selected), on="run_id")
    logarithmic = [panel for panel in set(drawn["panel"]) if _quantity(panel).scale == "log"]
    by_setting = _lines(selected, drawn[~drawn["panel"].isin(logarithmic) | (drawn["value"] > 0)])
    scores_of = [  # `relative` has the reason of the metrics that it names
        score.name
        for score in PROFILED
        if score.metric in by_setting.panels and not (relative and score.metric in RELATIVE_ROWS)
    ]
    return replace(by_setting, degenerate=relative + degeneracy_caption(scores_of, finished))


def _two_depths(selected: pd.DataFrame) -> pd.DataFrame:
    """The runs of the deepest depth, and of the shallowest that compares settings of every knob."""
    n_settings = selected.groupby(["n_layers", "knob"])["setting"].nunique().unstack()
    compared = n_settings.index[n_settings.gt(1).all(axis=1)]
    shallow = compared.min() if len(compared) else selected["n_layers"].min()
    return selected[selected["n_layers"].isin([shallow, selected["n_layers"].max()])]


def _lines(selected: pd.DataFrame, drawn: pd.DataFrame) -> Lines:
    """Mean and range of the values of each setting; `selected` are the rows of `one_knob_runs`."""
    rows = mean_and_range(drawn, ["knob", "setting", "n_layers", "panel", "x"])
    settings = {str(knob): tuple(dict.fromkeys(part["setting"])) for knob, part in selected.groupby("knob", sort=False)}
    order = {panel: i for i, panel in enumerate((*SCORES, VARIANCE, "training"))}
    rows = rows.sort_values(["panel", "x"], key=lambda c: c.map(order) if c.name == "panel" else c, kind="stable")
    line = ["knob", "setting", "n_layers"]
    lrs = selected.groupby(line)["lr"].agg(lambda lr: lr.iloc[0] if lr.nunique() == 1 else math.nan)
    rows = rows.join(lrs.astype(float), on=line)
    other_depths = sorted({*selected["n_layers"]} - {*drawn["n_layers"]})
    return Lines(rows=rows.reset_index(drop=True), settings=settings, other_depths=tuple(other_depths))


def one_knob_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Per knob, the finished runs that changed no other knob: columns run_id, n_layers, lr, knob, setting; settings in
    the knob's order, with their folder if there are several. Without a knob, all finished runs as ALL_RUNS. Raises
    NothingToDraw without a finished run."""
    finished = runs[runs["outcome"] == "ok"]
    if finished.empty:
        raise NothingToDraw("no run is finished, apart from runs that tune")
    folders = sources(finished).map(lambda name: f"{IN_FOLDER}{name}" if name else "")
    knobs = find_knobs(runs)
    if not knobs:
        depths = finished.sort_values("n_layers")
        settings = depths["n_layers"].map("n_layers={}".format) + folders.loc[depths.index]
        return depths[RUN_COLUMNS].assign(knob=ALL_RUNS, setting=settings)
    changes = changed(finished, knobs)
    parts = []
    for knob in knobs:
        n_others = changes.map(lambda names, knob=knob: len(set(names) - {knob.name}))
        fewest = finished[n_others == n_others.groupby(finished["n_layers"]).transform("min")]
        part = fewest[RUN_COLUMNS].assign(knob=knob.name, setting=labels(fewest, knob))
        order = {setting: i for i, setting in enumerate(knob.settings)}
        part = part.sort_values("setting", key=lambda column, order=order: column.map(order), kind="stable")
        parts.append(part.assign(setting=part["setting"] + folders.loc[part.index]))
    return pd.concat(parts, ignore_index=True)


def shown_knobs(by_setting: Lines, most: int) -> list[str]:
    """The knobs with lines, in order; of too many, those whose settings differ most at the deepest depth: the median
    over x of the settings' spread, relative to the median size, in the panel where it is largest."""
    rows = by_setting.rows[by_setting.rows["n_layers"] == by_setting.rows["n_layers"].max()]
    spread: dict[str, float] = {}
    for (knob, _), part in groups(rows, "knob", "panel"):
        means = part.groupby("x")["mean"]
        size = float(part["mean"].abs().median()) or 1.0
        spread[knob] = max(spread.get(knob, 0.0), float((means.max() - means.min()).median()) / size)
    drawable = [knob for knob in by_setting.settings if (by_setting.rows["knob"] == knob).any()]
    widest = sorted(drawable, key=lambda knob: -spread.get(knob, 0.0))[:most]
    return [knob for knob in drawable if knob in widest]


def page_of_lines(by_setting: Lines) -> Figure:
    """A row of panels for each knob (`shown_knobs`), a line for each of its settings."""
    panels = by_setting.panels
    knobs = shown_knobs(by_setting, MOST_PANELS // len(panels))
    rows = by_setting.rows[by_setting.rows["knob"].isin(knobs)]
    own_lrs = rows.loc[~rows["setting"].str.contains(r"\blr="), "lr"].nunique() > 1
    page = Figure(figsize=(max(6.8, 3.1 * len(panels)), 2.6 * len(knobs) + 0.8), layout="constrained")
    axes = page.subplots(len(knobs), len(panels), squeeze=False, sharex="col", sharey="col")
    for i, knob in enumerate(knobs):
        of_knob, settings = rows[rows["knob"] == knob], by_setting.settings[knob]
        styles = setting_styles(settings)
        for axis, panel in zip(axes[i], panels, strict=True):
            _draw_panel(axis, panel, of_knob[of_knob["panel"] == panel], styles)
        lrs = _lr_labels(of_knob) if own_lrs else {}
        handles = [
            line_handle(escaped(_setting_label(setting) + lrs.get(setting, "")), styles[setting])
            for setting in settings
        ]
        legend, n_columns = fitting_legend(  # on the left, above its row: a narrow window shows it
            page, axes[i][0], handles, 2 if len(settings) < 5 else 3, indent=0.7,
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), fontsize=7.5, borderaxespad=0.2,
        )  # fmt: skip
        legend.set_in_layout(False)
        height = -(-len(settings) // n_columns)
        axes[i][0].set_title("\n".join(" " * height), fontsize=8.5)  # room for the legend, which can be wider
    for column, panel in zip(axes.T, panels, strict=True):
        shown = rows[rows["panel"] == panel]
        if len(shown):  # one scale for all rows of the column
            set_layer_scale(column[0], _quantity(panel).scale, [*shown["low"], *shown["high"]])
    depths = sorted(set(rows["n_layers"]))
    most = int(rows["n_runs"].max())
    text = f"Mean and range over up to {most} runs that changed no other knob." if most > 1 else "One run each."
    text += f" Dark: {depths[-1]} layers; pale: {depths[0]}" if len(depths) > 1 else f" {depths[0]} layers"
    text += f"; not drawn: {', '.join(map(str, by_setting.other_depths))}." if by_setting.other_depths else "."
    if own_lrs:
        text += " Each line has its own lr (in the legend: that of the dark lines)"
        text += f"{CHANGES_VARIANCE}." if VARIANCE in panels else "."
    elif len(lr := set(rows["lr"].dropna())) == 1:
        text += f" lr {lr.pop():g} throughout."
    if left_out := [knob for knob in by_setting.settings if knob not in knobs]:
        text += f" Not shown, since their settings differ less: {', '.join(map(escaped, left_out))}."
    caption(page, text + by_setting.degenerate)
    return page


def _lr_labels(of_knob: pd.DataFrame) -> dict[str, str]:
    """Setting -> ', lr 0.003' at the deepest depth, unless its name has it."""
    deepest = of_knob[of_knob["n_layers"] == of_knob["n_layers"].max()].drop_duplicates("setting").dropna(subset="lr")
    deepest = deepest[~deepest["setting"].str.contains(r"\blr=")]
    return {str(setting): f", lr {lr:g}" for setting, lr in zip(deepest["setting"], deepest["lr"], strict=True)}


def _setting_label(setting: str) -> str:
    """A setting in a legend, shortened; its folder in full."""
    name, _, folder = setting.partition(IN_FOLDER)
    return f"{shortened(name)}{IN_FOLDER}{folder}" if folder else shortened(name)


def _quantity(panel: str) -> Quantity:
    return IN_RUNS[panel] if panel in IN_RUNS else BY_LAYER[VARIANCE if panel == "training" else panel]


def _draw_panel(axis: Any, panel: str, shown: pd.DataFrame, styles: dict[str, tuple[str, str, str]]) -> None:
    quantity = _quantity(panel)
    deepest = shown["n_layers"].max()
    for (setting, depth), line in groups(shown, "setting", "n_layers"):
        colour, marker, dashes = styles[setting]
        is_deepest = depth == deepest
        axis.plot(
            line["x"], line["mean"], color=colour, linestyle=dashes, alpha=1 if is_deepest else 0.4,
            linewidth=1.4 if is_deepest else 1.0, marker=marker if is_deepest else "", markersize=2.8,
            markeredgewidth=0, markevery=-(-len(line) // MOST_MARKERS),
        )  # fmt: skip
        if is_deepest:
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
