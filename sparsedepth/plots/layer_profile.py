"""A layer profile: every metric by layer and every matrix by pair of layers of one run, and their page.

Each metric is taken at the last step at which the run measured it, a thresholded one at its first threshold. NULL is
NaN here and stays missing. `sparsedepth.quantities` has definitions, units and sources of the metrics.

The page has a panel per metric and a heat map per matrix, all with the layer on the x axis. Grey is missing: a NULL, or
a pair that was not sampled. White cells are not pairs of layers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from sparsedepth.config.run import MeasureConfig
from sparsedepth.plots.page import Drawing
from sparsedepth.plots.runs import at_last_step, choose_run, rows_of_run
from sparsedepth.plots.style import (
    DEGENERATE,
    LINEAR_BELOW,
    MISSING,
    SERIES,
    caption,
    escaped,
    layer_ticks,
    linear_below,
    set_layer_scale,
    wrapped,
)
from sparsedepth.quantities import BY_LAYER, BY_PAIR, PROFILED
from sparsedepth.quantities.record import Scale
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import RELATIVE_ROWS, SCORES, float_or_none, reasons_in, sound_layer_metrics

COLUMNS = 4
TITLE = 32
"""Characters per line of a panel's title."""
FACTS = {"val_loss": " nat/token", "residual_variance_last": "", "usefulness": ""}
"""Column of `runs` in the page's title -> its unit."""
PROFILE_HEIGHT, MATRIX_HEIGHT = 1.75, 2.3
"""Inches."""
LEGEND_ROW, LEGEND_WIDTH = 0.09, 27
"""Share of a panel's height; characters of two labels side by side."""


@dataclass(frozen=True)
class Panel:
    """One plot; drawn if one of its series was measured."""

    series: Mapping[str, str]
    """metric without threshold -> label"""
    title: str

    @property
    def scale(self) -> Scale:
        return BY_LAYER[next(iter(self.series))].scale


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    name: str
    first: int = 1
    """First layer with pairs."""
    diagonal: bool = False
    """Whether a layer forms a pair with itself."""
    later: str = "later layer"
    """Axis label of `other_layer`."""
    layer: str = "layer"
    """Axis label of `layer`."""

    @property
    def title(self) -> str:
        return BY_PAIR[self.name].axis_label.replace("\n", " ")

    @property
    def scale(self) -> Scale:
        return BY_PAIR[self.name].scale


def _single(name: str) -> Panel:
    return Panel({name: ""}, BY_LAYER[name].display_name.replace("\n", " "))


def _by_part(what: str) -> dict[str, str]:
    return {f"update_{what}": "block", f"attention_{what}": "attention", f"ffn_{what}": "feed-forward"}


_FIRST: tuple[Panel, ...] = (
    _single("residual_variance"),
    Panel({"attention_variance": "attention", "ffn_variance": "feed-forward"}, "variance of branch outputs"),
    _single("residual_growth"),
    Panel({"state_norm": "stream", **_by_part("norm"), "update_norm": "update"}, "norms"),
    Panel(_by_part("ratio"), "update ratio: ‖added‖ / ‖stream‖"),
    Panel(_by_part("cosine"), "update cosine: cos(added, stream)"),
    _single("block_influence"),
    Panel(
        {"angular_distance": "previous layer", "angle_to_end": "last layer", "update_angle": "next update"},
        "angles of the stream",
    ),
    Panel({"lens_loss": "logit lens", "early_exit_loss": "through last block"}, "early exit loss"),
    _single("causal_effect"),
    Panel(
        {"affine_loss_increase": "affine map instead", "skip_loss_increase": "left out"},
        "relative loss increase without the block",
    ),
    Panel(
        {"jacobian_deviation": "per token", "jacobian_deviation_averaged": "of the mean"},
        "Jacobian's deviation from identity",
    ),
    _single("jacobian_deviation_released"),
    Panel({"weight_sparsity": "|w| <", "weight_sparsity_rel": "|w| / rms <"}, "weight sparsity"),
    Panel({"attention_sparsity": "weight <", "attention_sparsity_rel": "weight / uniform <"}, "attention sparsity"),
)
"""In reading order: the stream, what it does to the loss, the weights."""
LEFT_OUT = {name for name, quantity in BY_LAYER.items() if quantity.measure in ("weights", "trajectories")} | {
    "state_cosine"
}
"""Without a panel: weight sparsity by kind of matrix (seven lines per threshold, better as a table by `query`),
trajectories (a separate figure), and `state_cosine`, which is 1 - block influence."""
PANELS: tuple[Panel, ...] = (
    *_FIRST,
    *(_single(name) for name in BY_LAYER if name not in LEFT_OUT.union(*(panel.series for panel in _FIRST))),
)
"""Every other metric by layer is drawn: a new one comes last, in its own panel."""

_SPECIAL_HEAT_MAPS = (
    HeatMap(name="causal_effect", layer="skipped layer"),
    HeatMap(name="permutation_effect", later="swapped with layer"),
    HeatMap(name="removal_drop", diagonal=True, layer="first removed", later="last removed"),
    HeatMap(name="angular_distance", first=0),
    HeatMap(name="angular_distance_last_token", first=0),
)
HEAT_MAPS: dict[str, HeatMap] = {kind.name: kind for kind in _SPECIAL_HEAT_MAPS}
HEAT_MAPS |= {name: HeatMap(name=name) for name in BY_PAIR if name not in HEAT_MAPS}
"""Every metric by pair of layers is drawn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerProfile:
    run: Mapping[str, object]
    """The run's row of `runs`."""
    n_layers: int
    profiles: pd.DataFrame
    """Columns: name (metric without threshold), threshold, layer, value, se (standard error); NaN where missing."""
    matrices: dict[str, np.ndarray]
    """metric -> [L + 1, L + 1], row `other_layer`, column `layer`, layer 0 first; NaN if missing or no pair"""


def pairs_that_exist(name: str, n_layers: int) -> np.ndarray:
    """Which cells of a matrix are pairs of layers: bool [L + 1, L + 1]."""
    kind = HEAT_MAPS[name]
    other, layer = np.indices((n_layers + 1, n_layers + 1))
    return (layer >= kind.first) & ((layer <= other) if kind.diagonal else (layer < other))


def load_layer_profile(store: Store, run: str | None = None) -> LayerProfile:
    """The profile of a run; by default of the one with the lowest val_loss among the deepest.

    Raises ValueError for an unknown run, or one without values by layer.
    """
    depths = store.sql(
        "select run_id, max(depth) from (select run_id, layer as depth from layers "
        "union all select run_id, other_layer from pairs) group by run_id"
    )
    run_id = choose_run(store.frame("select * from runs"), dict(depths.rows), run)
    runs, layers, pairs = (rows_of_run(store, view, run_id) for view in ("runs", "layers", "pairs"))
    return layer_profile(runs.iloc[0].to_dict(), layers, pairs)


def layer_profile(run: Mapping[str, object], layers: pd.DataFrame, pairs: pd.DataFrame) -> LayerProfile:
    """The profile, from a run's row of `runs` and its rows of `layers` and `pairs`."""
    n_layers = int(max(0, *layers["layer"], *pairs["other_layer"]))
    last = at_last_step(pairs)
    measured = [name for name in HEAT_MAPS if last.loc[last["metric"] == name, "value"].notna().any()]
    return LayerProfile(
        run=run,
        n_layers=n_layers,
        profiles=_profiles(run, layers, n_layers),
        matrices={name: as_matrix(last[last["metric"] == name], n_layers) for name in measured},
    )


def _profiles(run: Mapping[str, object], layers: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    rows = at_last_step(layers)
    named = [metric.partition("@") for metric in rows["metric"]]
    thresholds = [float(text) if text else np.nan for _, _, text in named]
    rows = rows.assign(
        name=pd.array([name for name, _, _ in named], dtype=object), threshold=np.array(thresholds, float)
    )
    # The last layer has no later layers to affect: its NULL is not a missing value.
    rows = rows[(rows["name"] != "causal_effect") | (rows["layer"] < n_layers)]
    fields = {name: quantity.threshold for name, quantity in BY_LAYER.items() if quantity.threshold}
    for name, field in fields.items():
        of_metric = rows["name"] == name
        threshold = _first_threshold(run.get(field), field, rows.loc[of_metric, "threshold"])
        rows = rows[~of_metric | (rows["threshold"] == threshold)]
    drawn = [name for panel in PANELS for name in panel.series]
    errors = rows[rows["name"].isin([f"{name}_se" for name in drawn])]
    errors = errors.assign(name=errors["name"].str.removesuffix("_se"), se=errors["value"].astype(float))
    shown = rows[rows["name"].isin(drawn)].merge(errors[["name", "layer", "se"]], on=["name", "layer"], how="left")
    shown["value"] = shown["value"].astype(float)
    ordered = shown[["name", "threshold", "layer", "value", "se"]].sort_values(["name", "layer"])
    return ordered.reset_index(drop=True)


def _first_threshold(value: object, field: str, present: pd.Series) -> float | None:
    """The first threshold of the run's field (of its default if NULL) if present, else the largest present."""
    thresholds = json.loads(value) if isinstance(value, str) else value
    if not isinstance(thresholds, list | tuple | np.ndarray) or not len(thresholds):
        thresholds = MeasureConfig.model_fields[field].default
    first = float(thresholds[0])
    if first in set(present) or present.empty:
        return first
    return float(present.max())


def as_matrix(pairs: pd.DataFrame, n_layers: int) -> np.ndarray:
    """Rows of one metric as a matrix [L + 1, L + 1], row `other_layer`, column `layer`; NaN if missing."""
    matrix = np.full((n_layers + 1, n_layers + 1), np.nan)
    matrix[pairs["other_layer"], pairs["layer"]] = pairs["value"].astype(float)
    return matrix


def one_run(store: Store, run: str | None = None) -> Drawing:
    """The layer profile of a run. Raises ValueError for an unknown run, or one without values by layer."""
    profile = load_layer_profile(store, run)
    pairs = [
        {"name": name, "layer": layer, "other_layer": other, "value": values[other, layer]}
        for name, values in profile.matrices.items()
        for other, layer in zip(*(~np.isnan(values)).nonzero(), strict=True)
    ]
    data = pd.concat([profile.profiles, pd.DataFrame(pairs)], ignore_index=True)
    return Drawing(data=data, page=partial(layer_profile_page, profile))


def layer_profile_page(profile: LayerProfile) -> Figure:
    """Rows of panels, then rows of matrices; the run above, notes below."""
    measured = set(profile.profiles.loc[profile.profiles["value"].notna(), "name"])
    panels = [panel for panel in PANELS if measured & set(panel.series)]
    n_rows, n_map_rows = -(-len(panels) // COLUMNS), -(-len(profile.matrices) // COLUMNS)
    heights = [PROFILE_HEIGHT] * n_rows + [MATRIX_HEIGHT] * n_map_rows
    page = Figure(figsize=(11, sum(heights) + 0.8), layout="constrained")
    grid = page.add_gridspec(max(len(heights), 1), COLUMNS, height_ratios=heights or None)
    for i, panel in enumerate(panels):
        _draw_panel(page.add_subplot(grid[divmod(i, COLUMNS)]), panel, profile)
    for i, name in enumerate(profile.matrices):
        _draw_map(page, page.add_subplot(grid[n_rows + i // COLUMNS, i % COLUMNS]), name, profile)
    page.suptitle(_title(profile), x=0.01, ha="left", fontsize=10)
    caption(page, _caption(profile))
    return page


def _title(profile: LayerProfile) -> str:
    model = profile.run.get("model")
    name = escaped(model) if isinstance(model, str) else f"run {profile.run['run_id']}"
    facts = [name, f"{profile.n_layers} layers"]
    degenerate = _degenerate(profile)
    for name, unit in FACTS.items():
        value = profile.run.get(name)
        if isinstance(value, float) and not np.isnan(value):
            facts.append(f"{name} {value:#.4g}{unit}{f' {DEGENERATE}' * (name in degenerate)}")
    if profile.run.get("outcome") == "diverged":
        facts.append("diverged")
    return "   ".join(facts)


def _degenerate(profile: LayerProfile) -> dict[str, str]:
    """Score -> why it is degenerate in this run: of those in the title, then of the means of the values drawn."""
    drawn = {*profile.profiles["name"], *profile.matrices}
    names = [*FACTS, *(score.name for score in PROFILED if score.metric in drawn)]
    measured = (name for name in names if name in SCORES and float_or_none(profile.run.get(name)) is not None)
    return {name: "; ".join(reasons) for name in measured if (reasons := reasons_in(name, profile.run))}


def _caption(profile: LayerProfile) -> str:
    text = "x: layer; 0 is the embedding's output. Grey: missing (NULL, or a pair that was not sampled)."
    if profile.profiles["se"].notna().any():
        text += " Band: ± 1 standard error over the random probes."
    logarithmic = {name for panel in PANELS if panel.scale == "log" for name in panel.series}
    relative = RELATIVE_ROWS & {*profile.profiles["name"], *profile.matrices}
    text += sound_layer_metrics(sorted(relative), pd.DataFrame({"val_loss": [profile.run.get("val_loss")]}))[1]
    scores: dict[str, list[str]] = {}
    for name, reasons in _degenerate(profile).items():
        scores.setdefault(reasons, []).append(f"{name}{f' {DEGENERATE}' * (name in FACTS)}")
    marked = [f"{', '.join(names)} ({reasons})" for reasons, names in scores.items()]
    text += f" Degenerate, so no evidence: {', '.join(marked)}." if marked else ""
    n_hidden = int((profile.profiles["name"].isin(logarithmic) & (profile.profiles["value"] <= 0)).sum())
    if n_hidden:
        text += f" Not shown on logarithmic axes: {n_hidden} values that are not positive."
    return text


def _draw_panel(axis: Any, panel: Panel, profile: LayerProfile) -> None:
    lines = list(_lines(panel, profile))
    axis.set_title(wrapped(panel.title, TITLE), fontsize=8.5)
    units = {BY_LAYER[name].unit for name in panel.series} - {"1", "share"}
    axis.set_ylabel(", ".join(sorted(units)), fontsize=8)
    for (label, line), (colour, marker, dashes) in zip(lines, SERIES, strict=False):
        axis.plot(
            line["layer"], line["value"], color=colour, marker=marker, linestyle=dashes, label=label,
            linewidth=1.2, markersize=3 if profile.n_layers <= 24 else 2, markeredgewidth=0,
        )  # fmt: skip
        low, high = line["value"] - line["se"], line["value"] + line["se"]
        axis.fill_between(line["layer"], low, high, color=colour, alpha=0.25, linewidth=0)
    for layer in sorted({layer for _, line in lines for layer in line.loc[line["value"].isna(), "layer"]}):
        axis.axvspan(layer - 0.5, layer + 0.5, color=MISSING, alpha=0.5, linewidth=0)
    shown = pd.concat([line["value"] for _, line in lines]).dropna()
    set_layer_scale(axis, panel.scale, shown)
    layer_ticks(axis.xaxis)
    axis.set_xlim(-0.5, profile.n_layers + 0.5)
    if any(label for label, _ in lines):
        _legend_above(axis, [label for label, _ in lines])


def _legend_above(axis: Any, labels: Sequence[str]) -> None:
    """A legend above the lines, with space added for it; in two columns if the labels are short."""
    n_columns = 2 if sum(sorted(map(len, labels))[-2:]) <= LEGEND_WIDTH else 1
    scale = axis.yaxis.get_transform()
    low, high = scale.transform(axis.get_ylim())
    room = 0.04 + LEGEND_ROW * -(-len(labels) // n_columns)
    axis.set_ylim(top=float(scale.inverted().transform(high + (high - low) * room / (1 - room))))
    legend = axis.legend(
        fontsize=6.5, handlelength=1.6, borderaxespad=0.1, labelspacing=0.2, columnspacing=1.0, ncols=n_columns,
        loc="upper left", bbox_to_anchor=(-0.02, 1.0),
    )  # fmt: skip
    legend.set_in_layout(False)  # a wide legend would narrow its whole column of panels


def _lines(panel: Panel, profile: LayerProfile) -> Iterator[tuple[str, pd.DataFrame]]:
    """(label, rows) of every measured series; NaN for values that a logarithmic axis cannot show."""
    for name, label in panel.series.items():
        line = profile.profiles[profile.profiles["name"] == name]
        if line["value"].notna().any():
            threshold = line["threshold"].iloc[0]
            values = line["value"].where(line["value"] > 0) if panel.scale == "log" else line["value"]
            yield (label if np.isnan(threshold) else f"{label} {threshold:g}"), line.assign(value=values)


def _draw_map(page: Figure, axis: Any, name: str, profile: LayerProfile) -> None:
    exists = pairs_that_exist(name, profile.n_layers)
    drawn = np.where(exists, profile.matrices[name], np.nan)
    image = draw_matrix(axis, name, drawn, exists, norm_of(drawn[np.isfinite(drawn)], HEAT_MAPS[name].scale))
    axis.set_title(wrapped(HEAT_MAPS[name].title, TITLE), fontsize=8.5)
    colour_bar(page, image, axis)


def colour_bar(page: Figure, image: Any, axes: Any) -> Any:
    """A small colour bar next to a matrix, or a row of them."""
    bar = page.colorbar(image, ax=axes, shrink=0.85, aspect=18, pad=0.02)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    return bar


def draw_matrix(axis: Any, name: str, values: np.ndarray, exists: np.ndarray, norm: Normalize) -> Any:
    """Draw one of HEAT_MAPS, [L + 1, L + 1], row `other_layer`; pairs that exist but are NaN are grey. Returns the
    image, which the colour bar needs."""
    from seaborn import heatmap  # its import takes a second: only the figures with matrices wait for it

    kind = HEAT_MAPS[name]
    shown, is_missing = values[kind.first :, kind.first :], (exists & np.isnan(values))[kind.first :, kind.first :]
    layers = range(kind.first, len(values))
    look: Any = {"ax": axis, "cbar": False, "square": True, "xticklabels": "auto", "yticklabels": "auto"}
    heatmap(pd.DataFrame(1.0, layers, layers), mask=~is_missing, cmap=[MISSING], vmin=0, vmax=1, **look)
    heatmap(pd.DataFrame(shown, layers, layers), mask=np.isnan(shown), cmap="viridis_r", norm=norm, **look)
    axis.invert_yaxis()
    axis.tick_params(rotation=0, length=2)
    axis.set_xlabel(kind.layer, size=8)
    axis.set_ylabel(kind.later, size=8)
    axis.grid(False)
    return axis.collections[-1]


def norm_of(values: np.ndarray, scale: Scale) -> Normalize:
    """Colour scale from the lowest to the highest value; a linear one includes 0."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if scale == "log" and low > 0:
        return LogNorm(low, high if high > low else 2 * low)
    low = min(low, 0.0)
    high = high if high > low else low + 1
    if scale == "symlog" and (threshold := linear_below(values) or (high > 10 * LINEAR_BELOW and LINEAR_BELOW)):
        return SymLogNorm(threshold, vmin=low, vmax=high)
    return Normalize(low, high)
