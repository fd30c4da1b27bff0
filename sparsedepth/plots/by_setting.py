"""Lines by setting: residual variance, scores and gradients by layer, and the loss during training; by layer at the
baseline, one line per depth; and the loss against the learning rate, tuned or not.

The settings are the baseline and those of the fewest changed fields, up to MOST. A line is the mean over seeds at the
last step measured, with its 95% interval. Panels: the deepest depth, and the shallowest that compares settings.

Against lr all settings are drawn; a point is the mean over the seeds that every lr of its line has. A ring marks the lr
that tuning chose, or without tuning that of the lowest loss; a cross instead if it is the lowest or highest tried."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.once import once
from sparsedepth.plots.facets import Panel, intervals, lines_drawing, metric_intervals, panel_of, range_of
from sparsedepth.plots.page import Drawing, NothingToDraw, line_handle
from sparsedepth.plots.runs import (
    all_runs,
    cells_of_store,
    compared_runs,
    finished_of,
    measured_models,
    n_changed,
    of_selection,
    setting_names,
    settings_in_order,
    shown_settings,
    trained_runs,
    values_of_metrics,
)
from sparsedepth.plots.style import GREY, Style, depth_colours, setting_styles
from sparsedepth.quantities import BY_LAYER, PROFILED
from sparsedepth.quantities.quantity import WATCHED, Named
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import ABSOLUTE_ROWS, SMALL_LOSS, degeneracy, score_rows, sound_layer_metrics
from sparsedepth.store.search import search_of
from sparsedepth.store.setting import BUDGET
from sparsedepth.store.tuning_roles import CHOSEN_ROLES, best_point, is_at_edge
from sparsedepth.words.captions import by_layer_caption, by_setting_caption, rates_caption, rates_marked, to_measure
from sparsedepth.words.degeneracy import layer_metrics_caption, main_reason
from sparsedepth.words.plain_text import counted

VARIANCE = "residual_variance"
SCORES = (
    "causal_effect",
    "affine_loss_increase",
    "affine_loss_added",
    "skip_loss_increase",
    "span_loss_added",
    "jacobian_deviation",
    "angular_distance",
)
GRADIENTS = ("gradient_norm", "stream_gradient")
BY_DEPTH = (VARIANCE, "causal_effect", "affine_loss_increase")
TRAINING = {"train_loss": "tokens", "training": "tokens (last layer)"}
"""Metrics over training, and their axis: the loss, and the residual variance of the last layer."""
QUANTITY = {"training": VARIANCE}
HISTORY = (
    "val_loss",
    "residual_variance_last",
    "causal_score",
    "usefulness_loss_increase",
    "needed_layers",
    "permutation_score",
    "attention_sparsity",
)
"""Scores whose history is drawn."""
ORDER = tuple(dict.fromkeys(("train_loss", *BY_DEPTH, *TRAINING, *SCORES, *ABSOLUTE_ROWS.values(), *GRADIENTS)))
"""Of the panels."""
MOST = 5
"""Settings of a panel."""
OUTLIER = 3.0
"""A loss so many times as far above the lowest as three quarters of the losses leaves the axis."""


def curves(store: Store) -> Drawing:
    """Training loss during training."""
    # Single steps are noise: means of about five, or of a 50th, at their mean place.
    rows = store.frame(
        "select run_id, 'train_loss' as metric, avg(tokens) as x, avg(train_loss) as value from (select *, "
        "max(tokens) over own as last, least(50, greatest(12, count(*) over own // 5)) as bins from curves "
        "where train_loss is not null and tokens > 0 window own as (partition by run_id)) "
        "group by run_id, ceil(bins * tokens / last) order by x, run_id"
    )
    notes = (
        " A point is a mean over neighbouring steps. The axis is that of the loss after the first fifth of training."
    )
    return by_setting(compared_runs(store), rows, "no finished run has a curve of its loss", notes)


def variance(store: Store) -> Drawing:
    """Residual variance by layer, and of the last layer during training."""
    training = store.frame(
        "select run_id, 'training' as metric, step * batch_tokens as x, value from layers join runs using (run_id) "
        f"where metric = '{VARIANCE}' and value > 0 and layer = n_layers "
        "qualify count(*) over (partition by run_id) > 1 order by run_id, step"
    )
    return _layer_lines(store, (VARIANCE,), training)


def _layer_lines(store: Store, metrics: Sequence[str], *further: pd.DataFrame) -> Drawing:
    runs = compared_runs(store)
    layers, notes = sound_values(store, runs, metrics)
    missing = notes.strip() or f"no finished run has {' or '.join(metrics)} by layer; {to_measure(metrics)}"
    return by_setting(runs, pd.concat([layers.rename(columns={"layer": "x"}), *further]), missing, notes)


gradients = partial(_layer_lines, metrics=GRADIENTS)


def scores(store: Store) -> Drawing:
    """By layer, a line per setting; of measured models, a line for each."""
    if (runs := measured_models(store)) is not None:
        return by_depth(runs, *sound_values(store, runs, SCORES), line="name")
    return _layer_lines(store, SCORES)


@once
def _every_value(store: Store) -> pd.DataFrame:
    """The values by layer of all figures of this file: one reading for a report."""
    values = values_of_metrics(store, "layers", {*BY_DEPTH, *ABSOLUTE_ROWS.values(), *SCORES, *GRADIENTS})
    return values[(values["layer"] >= 1) & values["value"].notna()]


def sound_values(store: Store, runs: pd.DataFrame, metrics: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """The values of these metrics by layer, without degenerate ones and those that a logarithmic axis cannot show; and
    a note on degenerate ones."""
    finished = runs[runs["outcome"] == "ok"]
    layers = _every_value(store)
    layers = layers[layers["metric"].isin(metrics)]
    forms = sound_layer_metrics(layers["metric"].unique(), finished)
    notes = layer_metrics_caption(forms, SMALL_LOSS)
    drawn = {*forms.drawn.values()}
    verdicts = {
        score.metric: degeneracy(score.name, score_rows(finished, score.name))
        for score in PROFILED
        if score.metric in drawn
    }
    degenerate = {metric: main_reason(found) for metric, found in verdicts.items() if found.is_degenerate}
    if degenerate:
        notes += f" Degenerate, so not drawn: {', '.join(f'{name} ({why})' for name, why in degenerate.items())}."
    logarithmic = layers["metric"].isin([name for name in metrics if BY_LAYER[name].scale == "log"])
    return layers[layers["metric"].isin(drawn - {*degenerate}) & (~logarithmic | (layers["value"] > 0))], notes


def by_setting(runs: pd.DataFrame, rows: pd.DataFrame, missing: str = "", notes: str = "") -> Drawing:
    """From the result rows of `runs` and run_id, metric, x, value. Its points: metric, n_layers, panel, setting, x,
    mean, lo, hi, n_seeds, lr. Raises NothingToDraw with `missing`."""
    line = ["n_layers", "setting"]
    is_drawn = (runs["outcome"] == "ok") & runs["run_id"].isin(set(rows["run_id"]))
    finished = runs.loc[is_drawn, ["run_id", *line, "seed", "lr"]]
    if finished.empty:
        raise NothingToDraw(missing)
    chosen = _deep_and_shallow(finished)
    points = metric_intervals(
        rows[["run_id", "metric", "x", "value"]].merge(chosen, on="run_id"), [*line, "x"], QUANTITY
    )
    points = points.join(chosen.groupby(line)["lr"].median(), on=line)
    points["panel"] = points["metric"] + "@" + points["n_layers"].astype(str)
    points = points.sort_values(["n_layers", "x"], ascending=[False, True], kind="stable").reset_index(drop=True)
    deepest = points[points["n_layers"] == points["n_layers"].max()]
    if points["metric"].nunique() > 3:
        points = deepest
    labels = _lr_labels(deepest)
    kinds = [
        _panel(str(metric), int(str(depth)), part)
        for depth, of_depth in points.groupby("n_layers", sort=False)
        for metric, part in sorted(of_depth.groupby("metric"), key=lambda of: ORDER.index(of[0]))
    ]
    n_metrics = points["metric"].nunique()
    n_depths = points["n_layers"].nunique()
    notes = by_setting_caption(points, finished, bool(labels)) + notes
    return lines_drawing(points, kinds, notes, labels=labels, columns=n_depths if n_metrics == 1 else min(3, n_metrics))


def _deep_and_shallow(finished: pd.DataFrame) -> pd.DataFrame:
    """The runs at the deepest depth and the shallowest that compares settings, of the settings drawn."""
    n_settings = finished.groupby("n_layers")["setting"].transform("nunique")
    shallow = finished.loc[n_settings > 1, "n_layers"].min() if (n_settings > 1).any() else finished["n_layers"].min()
    chosen = finished[finished["n_layers"].isin([finished["n_layers"].max(), shallow])]
    return chosen[chosen["setting"].isin(shown_settings(chosen["setting"], MOST))]


def _panel(metric: str, depth: int, points: pd.DataFrame) -> Panel:
    late = points[points["x"] >= 0.2 * points["x"].max()] if metric == "train_loss" else points[:0]  # early all fall
    x, label = ("tokens", TRAINING[metric]) if metric in TRAINING else ("whole", "layer")
    return panel_of(
        QUANTITY.get(metric, metric),
        f"{metric}@{depth}",
        title=counted(depth, "layer"),
        x=x,
        x_label=label,
        range=range_of(late),
    )


def _lr_labels(points: pd.DataFrame) -> dict[str, str]:
    """Setting -> 'SETTING, lr 0.003' where settings differ in lr; empty where all have one."""
    lrs = points.dropna(subset="lr").groupby("setting")["lr"].first()
    named = {str(name): f"{name}, lr {lr:g}" for name, lr in lrs.items() if "lr=" not in str(name)}
    return named if lrs.nunique() > 1 else {}


def by_layer(store: Store) -> Drawing:
    """Variance, effect on later layers and usefulness at the baseline, one line per depth; of a search, of its best
    proposal at each depth; of the points of one training, one line per step; of measured models, one for each."""
    metrics = (*BY_DEPTH, *(ABSOLUTE_ROWS[name] for name in BY_DEPTH if name in ABSOLUTE_ROWS))
    if (runs := measured_models(store)) is not None:
        return by_depth(runs, *sound_values(store, runs, metrics), line="name")
    runs = compared_runs(store)
    points, line = _points(store), "n_layers"
    steps = np.array(sorted(points["steps"].unique()))
    is_one = runs["run_id"].isin(points["run_id"]).all() and len(points[[line, "setting"]].drop_duplicates()) == 1
    if is_one and len(steps) > 1:
        chosen = steps[np.linspace(0, len(steps) - 1, min(len(steps), MOST - 1)).round().astype(int)]
        runs, line = points[points["steps"].isin(chosen)], "steps"
    return by_depth(runs, *sound_values(store, runs, metrics), search_of(store.roots) is not None, line)


def by_depth(
    runs: pd.DataFrame, values: pd.DataFrame, notes: str, is_search: bool = False, line: str = "n_layers"
) -> Drawing:
    """From the result rows of `runs`, and the values by layer. Its points: panel (the metric), setting ('4 layers', or
    'step 100' for `line` steps), x (layer / n_layers), layer, mean, lo, hi, n_seeds, lr. Raises NothingToDraw."""
    named = {"n_layers": _layers, "steps": "step {:,.0f}".format}.get(line, str)
    keys = [*dict.fromkeys((line, "n_layers"))]
    finished = runs[runs["outcome"] == "ok"]
    rank = pd.to_numeric(finished[loss_of(runs)], errors="coerce") if is_search else finished["setting"].map(n_changed)
    chosen = finished[rank == rank.groupby(finished[line]).transform("min")]
    rows = values.merge(chosen[["run_id", *keys, "seed"]], on="run_id")
    # The last layer has no later one to affect: its NULL is no missing value.
    rows = rows[(rows["metric"] != "causal_effect") | (rows["layer"] < rows["n_layers"])]
    points = metric_intervals(rows.sort_values(["metric", *keys, "layer"]), [*keys, "layer"])
    if points.empty:
        missing = f"no finished run has {' or '.join(BY_DEPTH)} by layer; {to_measure(BY_DEPTH)}"
        raise NothingToDraw(notes.strip() or missing)
    points = points.rename(columns={"metric": "panel"}).assign(
        x=points["layer"] / points["n_layers"],
        setting=points[line].map(named),
        lr=points[line].map(chosen.groupby(line)["lr"].median()),
    )

    def draw_threshold(axis: Any, _: pd.DataFrame) -> None:
        axis.axhline(0.1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))

    panel = partial(panel_of, x="share", x_label="layer / number of layers")
    threshold: Named = {"decorate": draw_threshold, "note": " Dashed: usefulness threshold."}
    kinds = [
        panel(name, **threshold if name == "affine_loss_increase" else {})
        for name in ORDER
        if (points["panel"] == name).any()
    ]
    text = by_layer_caption(points, is_search) * (line == "n_layers") + notes
    is_named = line == "name"  # models have no order
    styles = setting_styles([*points["setting"].unique()]) if is_named else depth_styles(points[line], named)
    return lines_drawing(points, kinds, text, styles=styles)


def _points(store: Store) -> pd.DataFrame:
    """Of trainings of others: the finished rows of `runs`."""
    runs = all_runs(store)
    return of_selection(store, runs[(runs["origin"] == WATCHED) & (runs["outcome"] == "ok")])


def history(store: Store) -> Drawing:
    """Scores of trainings of others along their steps, a line per setting and depth, or per training where no seed is
    known. Its points: panel (the score), setting, x (tokens, or steps where those are not known), mean, lo, hi,
    n_seeds. Raises NothingToDraw."""
    runs = _points(store)
    names = [name for name in HISTORY if runs[name].notna().any()]
    if not names:
        trained_runs(store)  # where none is complete, that is why
        raise NothingToDraw(
            "there are no points of a training (sparsedepth.watch, measure --revisions), so there is no history to draw"
        )
    setting = runs["cell_id"].map(setting_names(store, BUDGET))
    if runs["cluster"].nunique() > 1:
        setting = setting.where(runs["seed"].notna(), setting + ", " + runs["cluster"])
    if runs["n_layers"].nunique() > 1:
        setting = setting + ", " + runs["n_layers"].map(lambda n: counted(int(n), "layer"))
    unit = "steps" if runs["tokens_trained"].isna().any() else "tokens_trained"
    wide = runs[["seed", *names]].assign(setting=setting, x=runs[unit])
    wide = wide[wide["setting"].isin(shown_settings(wide["setting"], MOST))]
    rows = wide.melt(["setting", "x", "seed"], names, "metric").sort_values(["metric", "setting", "x"])
    points = metric_intervals(rows, ["setting", "x"]).rename(columns={"metric": "panel"})
    look: Named = {"x": "tokens", "x_label": unit.removesuffix("_trained")}
    return lines_drawing(points, [panel_of(name, **look) for name in names])


def _layers(n: int) -> str:
    return counted(n, "layer")


def depth_styles(depths: Iterable[int], named: Callable[[int], str] = _layers) -> dict[str, Style]:
    """A line for each depth, deep ones dark."""
    return {named(depth): (colour, "o", "-") for depth, colour in depth_colours(depths).items()}


def learning_rate(store: Store) -> Drawing:
    """Raises NothingToDraw if no configuration was run at two learning rates."""
    runs = finished_of(all_runs(store))
    cells = cells_of_store(store)
    runs = runs[runs["run_id"].isin(cells.rows["run_id"])] if cells.is_one_budget else runs
    names = setting_names(store, "lr", *[BUDGET] * cells.is_one_budget)
    return by_rate(of_selection(store, runs.assign(setting=runs["cell_id"].map(names))))


def by_rate(runs: pd.DataFrame) -> Drawing:
    """From the rows of `runs` (trained ones, also those that tuning rejected; `setting` without lr). Its points: panel
    (n_layers), setting, x (lr), mean, lo, hi (over the shared seeds; NaN if one diverged), n_seeds, role ('best' or
    'edge' of the chosen lr, or without tuning of that of the lowest loss; else empty), is_tuned."""
    line = ["panel", "setting"]
    at = [*line, "x"]
    frame = runs[["setting", "seed"]].assign(panel=runs["n_layers"], x=runs["lr"])
    frame["value"] = pd.to_numeric(runs[loss_of(runs)], errors="coerce")
    frame["is_diverged"] = (runs["outcome"] != "ok") | frame["value"].isna()
    frame["is_chosen"] = runs["tuning"].isin(CHOSEN_ROLES) if "tuning" in runs else False
    frame["is_chosen"] = frame.groupby(at)["is_chosen"].transform("any")  # by further seeds, too
    n_rates = frame.groupby(line)["x"].transform("nunique")
    frame["is_shared"] = frame.groupby([*line, "seed"])["x"].transform("nunique") == n_rates
    frame = frame[(n_rates > 1) & (frame["is_shared"] | ~frame.groupby(line)["is_shared"].transform("any"))]
    if frame.empty:
        raise NothingToDraw("no configuration has finished runs at two learning rates, so there is no curve to draw")
    points = intervals(frame.sort_values(at).fillna({"value": 0.0}), at)
    points = points.join(frame.groupby(at)[["is_chosen", "is_diverged"]].any(), on=at)
    points.loc[points.pop("is_diverged"), ["mean", "lo", "hi"]] = np.nan
    points["role"] = ""
    for _, part in points.groupby(line):
        losses = dict(zip(part["x"], part["mean"].fillna(math.inf), strict=True))
        best = min(part.loc[part["is_chosen"], "x"], default=best_point(losses))
        points.loc[part.index[part["x"] == best], "role"] = "edge" if is_at_edge(best, losses) else "best"
    points["is_tuned"] = points.groupby(line)["is_chosen"].transform("any")
    return _lines_over_rates(points.drop(columns="is_chosen"), loss_of(runs))


def _lines_over_rates(points: pd.DataFrame, loss: str) -> Drawing:
    """One panel per depth, each with its own range: what differs is the loss of a depth."""
    styles = setting_styles(settings_in_order(points["setting"]))
    kinds = []
    n_beyond = 0
    drawn = points.assign(lo=np.nan, hi=np.nan)  # intervals of two or three seeds would hide the lines
    for depth, part in drawn.groupby("panel"):
        low, usual = part["mean"].quantile([0, 0.75])
        ends = range_of(part[part["mean"] <= low + OUTLIER * (usual - low)])
        top = ends[1] if ends else math.inf
        n_beyond += int((part["mean"] > top).sum())
        kinds.append(
            panel_of(
                loss,
                depth,
                title=counted(int(str(depth)), "layer"),
                x="log",
                x_label="learning rate",
                scale="linear",
                range=ends,
                decorate=partial(_mark_best, styles, top),
            )
        )
    entries = [("o", rates_marked(points)), *[("x", "at the end of the grid")] * ("edge" in {*points["role"]})]
    handles = [line_handle(label, (GREY, mark, ""), markersize=9, markerfacecolor="none") for mark, label in entries]
    text = rates_caption(points, n_beyond)
    drawing = lines_drawing(drawn, kinds, text, size=(2.9, 2.7), extra=handles)

    def of_panels(names: Collection[str]) -> Drawing:
        assert drawing.of_panels is not None
        return replace(drawing.of_panels(names), data=points[points["panel"].astype(str).isin(names)])

    return replace(drawing, data=points, of_panels=of_panels)


def _mark_best(styles: Mapping[str, Style], top: float, axis: Any, points: pd.DataFrame) -> None:
    """Rings and crosses at the chosen lr, at the place of their line; triangles for points above the axis."""
    colours = points["setting"].map(lambda name: styles[name][0])
    best = points[points["role"] == "best"]
    axis.scatter(best["x"], best["mean"], 80, edgecolor=colours[best.index], facecolor="none", linewidth=1.2, zorder=6)
    edge = points[points["role"] == "edge"]
    axis.scatter(edge["x"], edge["mean"], 60, colours[edge.index], marker="x", linewidth=1.2, zorder=6)
    beyond = points[points["mean"] > top]
    at_top = axis.get_xaxis_transform()
    style = {"marker": "^", "transform": at_top, "clip_on": False}
    axis.scatter(beyond["x"], np.ones(len(beyond)), 22, colours[beyond.index], **style)
