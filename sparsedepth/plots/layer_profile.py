"""A layer profile: every metric by layer and every matrix by pair of layers of one run, and their page.

Each metric is taken at the last step at which the run measured it, a thresholded one at its first threshold. NULL is
NaN here and stays missing. `sparsedepth.quantities` has definitions, units and sources of the metrics.

The page has a panel per metric and a heat map per matrix, all with the layer on the x axis. Grey is missing: a NULL, or
a pair that was not sampled. White cells are not pairs of layers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.config.run import MeasureConfig
from sparsedepth.plots.matrices import TRACED, as_matrix, draw_matrix, norm_of, with_traces
from sparsedepth.plots.page import LEAST_WIDTH, Drawing, caption, colour_bar, paper_width
from sparsedepth.plots.runs import AFTER_START, all_runs, at_last_step, choose_run, of_selection
from sparsedepth.plots.style import MISSING, SERIES, layer_ticks, set_layer_scale
from sparsedepth.quantities import BY_LAYER, BY_PAIR, PROFILED, quantity_of_map
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import (
    RELATIVE_ROWS,
    SCORES,
    SMALL_LOSS,
    float_or_none,
    reasons_in,
    sound_layer_metrics,
)
from sparsedepth.store.small_sample import Z
from sparsedepth.words.captions import FACTS, folded, profile_caption, profile_title, title_of_map
from sparsedepth.words.degeneracy import layer_metrics_caption, reason_text

COLUMNS = 4
LEAST_PAGE = 8.0
"""Width in inches of a page of one or two panels, which has its title on one line."""
TITLE = 32
"""Characters per line of a panel's title."""


def _by_part(what: str) -> dict[str, str]:
    return {f"update_{what}": "block", f"attention_{what}": "attention", f"ffn_{what}": "feed-forward"}


def _single(*names: str) -> dict[str, dict[str, str]]:
    return {BY_LAYER[name].display_name.replace("\n", " "): {name: ""} for name in names}


PANELS = {
    **_single("residual_variance", "residual_growth"),
    "variance of branch outputs": {"attention_variance": "attention", "ffn_variance": "feed-forward"},
    "norms": {"state_norm": "stream", **_by_part("norm")},
    "update ratio: ‖added‖ / ‖stream‖": _by_part("ratio"),
    "update cosine: cos(added, stream)": _by_part("cosine"),
    "stream's angle to": {"angular_distance": "previous layer", "angle_to_end": "last layer", "update_angle": "update"},
    "path angle, and ideal ones": {"trajectory_mean": "mean", "early_stop_ideal": "early stop", "even_ideal": "even"},
    "early exit loss": {"lens_loss": "logit lens", "early_exit_loss": "through last block"},
    **_single("block_influence", "causal_effect"),
    "relative loss increase without the block": {
        "affine_loss_increase": "affine map",
        "skip_loss_increase": "left out",
    },
    "Jacobian's deviation from identity": {"jacobian_deviation": "token", "jacobian_deviation_averaged": "mean"},
    "weight sparsity": {"weight_sparsity": "|w| <", "weight_sparsity_rel": "|w| / rms <"},
    "attention sparsity": {"attention_sparsity": "weight <", "attention_sparsity_rel": "weight / uniform <"},
}
"""Title -> metric without threshold -> label. In reading order: the stream, what it does to the loss, the weights."""
LEFT_OUT = {name for name, quantity in BY_LAYER.items() if quantity.measure == "weights"} | {
    *("state_cosine", "trajectory_pc1", "trajectory_pc2", TRACED)
}
"""Without a panel: weight sparsity by kind of matrix (seven lines per threshold, better as a table by `query`), unit
vectors over layers, `state_cosine`, which is 1 - block influence, and the causal trace, which is a map."""
PANELS |= _single(*(name for name in BY_LAYER if name not in LEFT_OUT.union(*PANELS.values())))
"""Every other metric by layer is drawn: a new one comes last, in its own panel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerProfile:
    run: Mapping[str, object]
    """The run's row of `runs`."""
    n_layers: int
    profiles: pd.DataFrame
    """Columns: name (metric without threshold), threshold, layer, value, se (standard error); NaN where missing."""
    matrices: dict[str, np.ndarray]
    """metric -> `as_matrix`"""


def layer_profile(store: Store, run: str | None = None) -> Drawing:
    """The layer profile of a run, by default of the one with the lowest val_loss among the deepest. Raises ValueError
    for an unknown run, or one without values by layer."""
    depths = store.sql(
        f"select run_id, max(depth) from (select run_id, layer as depth from layers where {AFTER_START} "
        f"union all select run_id, other_layer from pairs where {AFTER_START}) group by run_id"
    )
    runs = all_runs(store)
    shown = of_selection(store, runs) if run is None else runs
    run_id = choose_run(shown, dict(depths.rows), run)  # of the store, so hexadecimal digits
    row = runs[runs["run_id"] == run_id].iloc[0].to_dict()
    layers, pairs = (at_last_step(store, view, f"run_id = '{run_id}'") for view in ("layers", "pairs"))
    profile = profile_of(row, layers, pairs)
    cells = [
        {"name": name, "layer": layer, "other_layer": other, "value": values[other, layer]}
        for name, values in profile.matrices.items()
        for other, layer in zip(*(~np.isnan(values)).nonzero(), strict=True)
    ]
    data = pd.concat([profile.profiles, pd.DataFrame(cells)], ignore_index=True)
    return Drawing(data=data, page=partial(layer_profile_page, profile))


def profile_of(run: Mapping[str, object], layers: pd.DataFrame, pairs: pd.DataFrame) -> LayerProfile:
    """The profile, from a run's row of `runs` and its rows of `layers` and `pairs` (`at_last_step`)."""
    n_layers = int(max([*layers["layer"], *pairs["other_layer"]]))
    by_metric = dict([*with_traces(pairs, layers).dropna(subset="value").groupby("metric")])
    matrices = {name: as_matrix(by_metric[name], name, n_layers) for name in (*BY_PAIR, TRACED) if name in by_metric}
    return LayerProfile(run=run, n_layers=n_layers, profiles=_profiles(run, layers, n_layers), matrices=matrices)


def _profiles(run: Mapping[str, object], layers: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    rows = layers.astype({"metric": str, "value": float})
    rows[["name", "threshold"]] = rows["metric"].str.extract("([^@]*)@?(.*)")
    rows["threshold"] = pd.to_numeric(rows["threshold"])
    # The last layer has no later layers to affect: its NULL is not a missing value.
    rows = rows[(rows["name"] != "causal_effect") | (rows["layer"] < n_layers)]
    leading = {
        name: _first_threshold(run.get(field), field, set(rows.loc[rows["name"] == name, "threshold"]))
        for name, quantity in BY_LAYER.items()
        if (field := quantity.threshold)
    }
    rows = rows[~rows["name"].isin([*leading]) | (rows["threshold"] == rows["name"].map(leading))]
    errors = rows.rename(columns={"value": "se"}).assign(name=rows["name"].str.removesuffix("_se"))
    errors = errors.loc[errors["name"] != rows["name"], ["name", "layer", "se"]]
    shown = rows[rows["name"].isin(set().union(*PANELS.values()))].merge(errors, on=["name", "layer"], how="left")
    return shown[["name", "threshold", "layer", "value", "se"]].sort_values(["name", "layer"], ignore_index=True)


def _first_threshold(value: object, field: str, present: set[float]) -> float:
    """The first threshold of the run's field (of its default if NULL) if present, else the largest present."""
    known = json.loads(value) if isinstance(value, str) else ()
    first = float((known or MeasureConfig.model_fields[field].default)[0])
    return first if first in present else max(present, default=first)


def layer_profile_page(profile: LayerProfile) -> Figure:
    """Rows of panels, then rows of matrices; the run above, notes below."""
    rows = profile.profiles
    is_log = rows["name"].isin([name for name, quantity in BY_LAYER.items() if quantity.scale == "log"])
    shown = rows.assign(value=rows["value"].mask(is_log & (rows["value"] <= 0)))
    lines = dict([*shown[rows.groupby("name")["value"].transform("count") > 0].groupby("name")])
    panels = {
        title: {series[name]: lines[name] for name in series if name in lines} for title, series in PANELS.items()
    }
    panels = {title: drawn for title, drawn in panels.items() if drawn}
    page, panel_axes, map_axes = _grid(len(panels), len(profile.matrices))
    for axis, (title, drawn) in zip(panel_axes, panels.items(), strict=True):
        _draw_panel(axis, title, drawn, profile.n_layers)
    for axis, (name, matrix) in zip(map_axes, profile.matrices.items(), strict=True):
        image = draw_matrix(axis, name, matrix, norm_of(matrix, quantity_of_map(name).scale))
        axis.set_title(folded(title_of_map(name), TITLE), fontsize=8.5)
        colour_bar(axis, image)
    degenerate = _degenerate(profile)
    relative = sorted(RELATIVE_ROWS & {*rows["name"], *profile.matrices})
    forms = sound_layer_metrics(relative, pd.DataFrame({"val_loss": [profile.run.get("val_loss")]}))
    notes = layer_metrics_caption(forms, SMALL_LOSS)
    if not paper_width():
        page.suptitle(
            profile_title(profile, degenerate), x=0.01, y=1 - 0.06 / page.get_figheight(), ha="left", fontsize=10
        )
    caption(page, profile_caption(profile, degenerate, notes, int(rows["value"].count() - shown["value"].count())))
    return page


def _grid(n_panels: int, n_maps: int) -> tuple[Figure, list[Any], list[Any]]:
    """A page with rows of panels, then rows of maps; and the axes of each."""
    paper = paper_width()
    most = min(COLUMNS, max(n_panels, n_maps, 1))
    cells: list[tuple[int, int, int]] = []  # row, column, of so many columns
    heights: list[float] = []  # inches
    for n, height in ((n_panels, 1.75), (n_maps, 2.3)):
        n_columns = int(paper / LEAST_WIDTH) or (most - (n % most == 1 < n))  # none is alone in a row
        cells += [(len(heights) + i // n_columns, i % n_columns, n_columns) for i in range(n)]
        heights += [height] * -(-n // n_columns)
    heights = heights or [1.75]
    width = math.lcm(*(n for *_, n in cells))
    page = Figure(figsize=(paper or max(LEAST_PAGE, 11 * most / COLUMNS), sum(heights) + 0.8))
    grid = page.add_gridspec(len(heights), width, height_ratios=heights)
    axes = [page.add_subplot(grid[row, width * i // n : width * (i + 1) // n]) for row, i, n in cells]
    return page, axes[:n_panels], axes[n_panels:]


def _degenerate(profile: LayerProfile) -> dict[str, str]:
    """Score -> why it is degenerate in this run: of those in the title, then of the means of the values drawn."""
    drawn = {*profile.profiles["name"], *profile.matrices}
    names = [*FACTS, *(score.name for score in PROFILED if score.metric in drawn)]
    measured = (name for name in names if name in SCORES and float_or_none(profile.run.get(name)) is not None)
    return {
        name: "; ".join(map(reason_text, reasons)) for name in measured if (reasons := reasons_in(name, profile.run))
    }


def _draw_panel(axis: Any, title: str, lines: Mapping[str, pd.DataFrame], n_layers: int) -> None:
    """The lines of a panel with the bands of their errors; a layer without a value is grey."""
    rows = pd.concat(lines.values())
    axis.set_title(folded(title, TITLE), fontsize=8.5)
    axis.set_ylabel(", ".join(sorted({BY_LAYER[name].unit for name in rows["name"]} - {"1", "share"})), fontsize=8)
    for (label, line), (colour, marker, dashes) in zip(lines.items(), SERIES, strict=False):
        threshold = line["threshold"].iloc[0]
        axis.plot(
            line["layer"], line["value"], label=label if np.isnan(threshold) else f"{label} {threshold:g}",
            color=colour, marker=marker, linestyle=dashes, linewidth=1.2, markersize=3 if n_layers <= 24 else 2,
            markeredgewidth=0,
        )  # fmt: skip
        low = line["value"] - Z * line["se"]
        high = line["value"] + Z * line["se"]
        axis.fill_between(line["layer"], low, high, color=colour, alpha=0.25, linewidth=0)
    for layer in sorted(set(rows.loc[rows["value"].isna(), "layer"])):
        axis.axvspan(layer - 0.5, layer + 0.5, color=MISSING, alpha=0.5, linewidth=0)
    set_layer_scale(axis, BY_LAYER[rows["name"].iloc[0]].scale, rows["value"].dropna())
    layer_ticks(axis.xaxis)
    axis.set_xlim(-0.5, n_layers + 0.5)
    axis.set_xlabel("layer", fontsize=8)
    if labels := axis.get_legend_handles_labels()[1]:
        _legend_above(axis, labels)


def _legend_above(axis: Any, labels: Sequence[str]) -> None:
    """A legend above the lines, with space added for it; in two columns if the labels are short."""
    n_columns = 2 if sum(sorted(map(len, labels))[-2:]) <= 27 else 1  # characters
    scale = axis.yaxis.get_transform()
    low, high = scale.transform(axis.get_ylim())
    room = 0.05 + 0.13 * -(-len(labels) // n_columns)  # as a share of the panel's height
    axis.set_ylim(top=float(scale.inverted().transform(high + (high - low) * room / (1 - room))))
    legend = axis.legend(
        fontsize=6.5, handlelength=1.6, borderaxespad=0.1, labelspacing=0.2, columnspacing=1.0, ncols=n_columns,
        loc="upper left", bbox_to_anchor=(-0.02, 1.0),
    )  # fmt: skip
    legend.set_in_layout(False)  # a wide legend would narrow its whole column of panels
