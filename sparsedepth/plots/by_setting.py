"""Values by layer and during training, one line per setting: residual variance, scores, gradients, loss; and by layer
at the baseline, one line per depth.

Settings: the baseline and those of the fewest changed fields, up to MOST. A line is the mean over seeds at the last
step at which each was measured, with its 95% interval. Panels: the deepest depth, and the shallowest that compares
settings.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.plain_text import counted
from sparsedepth.plots.facets import Panel, draw_facets, intervals, range_of, seeds_text
from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import (
    lr_labels,
    n_changed,
    nearest_to_baseline,
    settings_in_order,
    shown_settings,
    to_measure,
    trained_runs,
    values_of_metrics,
)
from sparsedepth.plots.style import CHANGES_VARIANCE, GREY, LINEAR_BELOW, caption, depth_colours, setting_styles
from sparsedepth.quantities import BY_LAYER, IN_RUNS, PROFILED
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import ABSOLUTE_ROWS, degeneracy, score_rows, sound_layer_metrics
from sparsedepth.store.search import search_of

VARIANCE = "residual_variance"
BY_DEPTH = (VARIANCE, "causal_effect", "affine_loss_increase")
TRAINING = {"train_loss": "tokens", "training": "tokens"}
"""Panels over training: the loss, and the residual variance of the last layer."""
MOST = 5
"""Settings of a panel."""
BINS = 50
"""Points of a curve."""
EARLY = 0.2
"""Share of training that the axis of the loss may cut: all runs fall alike there."""
THRESHOLD = 0.1


def curves(store: Store) -> Drawing:
    """Training loss during training. Raises NothingToDraw."""
    width = f"(max(tokens) over (partition by run_id) / {BINS})"  # single steps are noise
    binned = f"select run_id, train_loss, ceil(tokens / {width}) * {width} as x from curves"
    rows = store.frame(
        f"select run_id, x, avg(train_loss) as value from ({binned}) where x > 0 group by all order by 2"
    )
    rows = rows[rows["value"].notna()]
    return _drawing(trained_runs(store), rows.assign(metric="train_loss"), "no finished run has a curve of its loss")


def layer_lines(metrics: Sequence[str], store: Store) -> Drawing:
    """These metrics by layer, the residual variance over training too. Raises NothingToDraw."""
    runs = trained_runs(store)
    finished = runs[runs["outcome"] == "ok"]
    layers, notes, metrics = _sound(store, metrics, finished)
    rows = [layers.rename(columns={"layer": "x"})]
    if VARIANCE in metrics:
        text = f"select run_id, step, layer, value from layers where metric = '{VARIANCE}' and value > 0"
        top = store.frame(text).merge(finished[["run_id", "n_layers", "batch_tokens"]], on="run_id")
        top = top[top["layer"] == top["n_layers"]]
        rows.append(
            top.assign(metric="training", x=top["step"] * top["batch_tokens"])[["run_id", "metric", "x", "value"]]
        )
    missing = f"no finished run has {' or '.join(metrics)} by layer; {to_measure(metrics)}"
    return _drawing(runs, pd.concat(rows, ignore_index=True), missing, notes)


def _sound(store: Store, metrics: Sequence[str], finished: pd.DataFrame) -> tuple[pd.DataFrame, str, Sequence[str]]:
    """The values of these metrics by layer, without degenerate ones, a note on these, and the metrics."""
    layers = values_of_metrics(store, "layers", metrics)
    layers = layers[(layers["layer"] >= 1) & layers["value"].notna()]
    forms, notes = sound_layer_metrics(layers["metric"], finished)
    scores = {score.metric: score.name for score in PROFILED if score.metric in forms.values()}
    verdicts = {metric: degeneracy(name, score_rows(finished, name)) for metric, name in scores.items()}
    degenerate = {metric: found.reason for metric, found in verdicts.items() if found.is_degenerate}
    if degenerate:
        notes += f" Degenerate, so not drawn: {', '.join(f'{name} ({why})' for name, why in degenerate.items())}."
    shown = layers["metric"].isin(forms.values()) & ~layers["metric"].isin(degenerate)
    logarithmic = [name for name in metrics if BY_LAYER[name].scale == "log"]
    positive = ~layers["metric"].isin(logarithmic) | (layers["value"] > 0)
    return layers[shown & positive], notes, metrics


def _drawing(runs: pd.DataFrame, rows: pd.DataFrame, missing: str, notes: str = "") -> Drawing:
    points, left_out = lines(runs, rows)
    if points.empty:
        raise NothingToDraw(missing)
    return Drawing(data=points, page=partial(page_of_lines, points, left_out + notes))


def lines(runs: pd.DataFrame, rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The points, from the result rows of `runs` and run_id, metric, x, value: metric, n_layers, panel, setting, x,
    mean, lo, hi, n_seeds, lr; and what is left out."""
    finished = runs.loc[runs["outcome"] == "ok", ["run_id", "n_layers", "setting", "seed", "lr"]]
    finished = finished[finished["run_id"].isin(set(rows["run_id"]))]
    if finished.empty:
        return pd.DataFrame(), ""
    n_settings = finished.groupby("n_layers")["setting"].nunique()
    deepest, compared = finished["n_layers"].max(), n_settings.index[n_settings > 1]
    depths = sorted({deepest, compared.min() if len(compared) else finished["n_layers"].min()})
    settings = shown_settings(finished["setting"], {name: n_changed(name) for name in set(finished["setting"])}, MOST)
    chosen = finished[finished["n_layers"].isin(depths) & finished["setting"].isin(settings)]
    values = rows[["run_id", "metric", "x", "value"]].merge(chosen, on="run_id")
    by = ["metric", "n_layers", "setting", "x"]
    parts = [
        intervals(part, by, is_log=_scale(str(metric)) == "log" and bool((part["value"] > 0).all()))
        for metric, part in values.groupby("metric", sort=False)
    ]
    points = pd.concat(parts, ignore_index=True)
    lrs = chosen.groupby(["n_layers", "setting"])["lr"].median().rename("lr")
    points = points.join(lrs, on=["n_layers", "setting"])
    points["panel"] = points["metric"] + "@" + points["n_layers"].astype(str)
    others = sorted({*finished["n_layers"]} - {*depths})
    notes = f" Not drawn: {', '.join(map(str, others))} layers." if others else ""
    if n_left_out := finished["setting"].nunique() - len(settings):
        notes += f" Not shown: {counted(n_left_out, 'further setting')}."
    return points.sort_values(["n_layers", "x"], ascending=[False, True], kind="stable").reset_index(drop=True), notes


def _scale(metric: str) -> Any:
    return (IN_RUNS.get(metric) or BY_LAYER[VARIANCE if metric == "training" else metric]).scale


def page_of_lines(points: pd.DataFrame, notes: str = "") -> Figure:
    """A panel for each metric and depth; of many metrics, the deepest depth alone."""
    known = ("train_loss", VARIANCE, "causal_effect", "affine_loss_increase", *dict.fromkeys(points["metric"]))
    metrics = [name for name in dict.fromkeys(known) if (points["metric"] == name).any()]
    depths = sorted(set(points["n_layers"]), reverse=True)
    if len(metrics) > 3:
        points, depths = points[points["n_layers"] == depths[0]], depths[:1]
    kinds = [
        _panel(metric, depth, points[points["panel"] == f"{metric}@{depth}"])
        for depth in depths
        for metric in metrics
        if (points["panel"] == f"{metric}@{depth}").any()
    ]
    columns = len(depths) if len(metrics) == 1 else min(3, len(metrics))
    labels = lr_labels(points[points["n_layers"] == depths[0]])
    styles = setting_styles(settings_in_order(points["setting"]))
    page, _ = draw_facets(points, kinds, styles, labels=labels, columns=columns)
    text = f"Mean over {seeds_text(points)}, 95% interval." if points["n_seeds"].max() > 1 else "One run each."
    if labels:
        text += f" lr: that of {depths[0]} layers{CHANGES_VARIANCE if VARIANCE in metrics else ''}."
    elif len(lr := set(points["lr"].dropna())) == 1:
        text += f" lr {lr.pop():g} throughout."
    text += " The loss of the first fifth of training is beyond the axis." * ("train_loss" in metrics)
    caption(page, text + notes)
    return page


def _panel(metric: str, depth: int, points: pd.DataFrame) -> Panel:
    quantity = IN_RUNS.get(metric) or BY_LAYER[VARIANCE if metric == "training" else metric]
    late = points[points["x"] >= EARLY * points["x"].max()] if metric == "train_loss" else points[:0]
    return Panel(
        key=f"{metric}@{depth}",
        title=counted(depth, "layer"),
        x="tokens" if metric in TRAINING else "whole",
        x_label="tokens (last layer)" if metric == "training" else TRAINING.get(metric, "layer"),
        y_label=quantity.axis_label,
        scale=quantity.scale,
        range=range_of(late),
    )


# By layer, one line per depth


def by_layer(store: Store) -> Drawing:
    """Variance, effect on later layers and usefulness at the baseline; of a search, of its best proposal at each depth.
    Raises NothingToDraw."""
    runs = trained_runs(store)
    points, notes = lines_by_depth(runs, values_of(store, runs), search_of(store.roots) is not None)
    if points.empty:
        raise NothingToDraw(f"no finished run has {' or '.join(BY_DEPTH)} by layer; {to_measure(BY_DEPTH)}")
    return Drawing(data=points, page=partial(page_by_depth, points, notes))


def values_of(store: Store, runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The values by layer that `lines_by_depth` needs, and a note on degenerate ones."""
    metrics = (*BY_DEPTH, *(ABSOLUTE_ROWS[name] for name in BY_DEPTH if name in ABSOLUTE_ROWS))
    return _sound(store, metrics, runs[runs["outcome"] == "ok"])[:2]


def lines_by_depth(
    runs: pd.DataFrame, values: tuple[pd.DataFrame, str], is_search: bool = False
) -> tuple[pd.DataFrame, str]:
    """panel (the metric), setting ('N layers'), x (layer / n_layers), layer, mean, lo, hi, n_seeds, lr; and notes."""
    chosen = nearest_to_baseline(runs)
    if is_search:
        finished = runs[runs["outcome"] == "ok"]
        loss = pd.to_numeric(finished[loss_of(runs)], errors="coerce")
        chosen = finished[loss == loss.groupby(finished["n_layers"]).transform("min")]
    rows = values[0].merge(chosen[["run_id", "n_layers", "seed"]], on="run_id").rename(columns={"metric": "panel"})
    # The last layer has no later one to affect: its NULL is no missing value.
    rows = rows[(rows["panel"] != "causal_effect") | (rows["layer"] < rows["n_layers"])]
    by = ["panel", "n_layers", "layer"]
    parts = [
        intervals(part.sort_values(by), by, is_log=_scale(str(metric)) == "log")
        for metric, part in rows.groupby("panel")
    ]
    if not parts:
        return pd.DataFrame(), ""
    points = pd.concat(parts, ignore_index=True)
    points = points.assign(
        x=points["layer"] / points["n_layers"], setting=points["n_layers"].map(lambda n: counted(n, "layer"))
    )
    points["lr"] = points["n_layers"].map(chosen.groupby("n_layers")["lr"].median())
    shown = "the proposal with the lowest loss" if is_search else "the baseline, or the settings nearest to it"
    seeds = f"mean and 95% interval of {seeds_text(points)}" if points["n_seeds"].max() > 1 else "one run each"
    return points, f" By layer: {shown}; {seeds}. Dashed: usefulness threshold." + values[1]


def depth_styles(points: pd.DataFrame) -> Mapping[str, tuple[str, str, str]]:
    """A line for each depth, deep ones dark."""
    return {counted(depth, "layer"): (colour, "o", "-") for depth, colour in depth_colours(points["n_layers"]).items()}


def panels_by_depth(points: pd.DataFrame) -> list[Panel]:
    """A panel for each metric that was measured."""

    def draw_threshold(axis: Any) -> None:
        if axis.get_yscale() == "linear":  # the threshold is small
            axis.set_yscale("symlog", linthresh=LINEAR_BELOW)
        axis.axhline(THRESHOLD, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))

    return [
        Panel(
            key=metric,
            x="share",
            x_label="layer / number of layers",
            y_label=BY_LAYER[metric].axis_label,
            scale=BY_LAYER[metric].scale,
            decorate=draw_threshold if metric == "affine_loss_increase" else None,
        )
        for metric in dict.fromkeys((*BY_DEPTH, *points["panel"]))
        if (points["panel"] == metric).any()
    ]


def page_by_depth(points: pd.DataFrame, notes: str) -> Figure:
    """A panel for each metric."""
    page, _ = draw_facets(points, panels_by_depth(points), depth_styles(points))
    lrs = points.drop_duplicates("n_layers")["lr"].dropna()
    if lrs.nunique() > 1:
        notes += f" Depths differ in lr ({lrs.min():g} to {lrs.max():g}){CHANGES_VARIANCE}."
    caption(page, notes.strip())
    return page
