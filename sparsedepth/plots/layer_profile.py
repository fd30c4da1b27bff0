"""The numbers of a layer profile: every metric by layer and every matrix by pair of layers of one run.

Each metric is taken at the last step at which the run measured it, a thresholded one at its first threshold. NULL is
NaN here and stays missing. `sparsedepth.quantities` has definitions, units and sources of the metrics.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.config.run import MeasureConfig
from sparsedepth.effects.knobs import plain
from sparsedepth.plots.runs import at_last_step, choose_run, read_depths, rows_of_run
from sparsedepth.quantities import BY_LAYER, BY_PAIR
from sparsedepth.quantities.record import Scale
from sparsedepth.store.connection import Store


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


_FIRST: tuple[Panel, ...] = (
    _single("residual_variance"),
    Panel({"attention_variance": "attention", "ffn_variance": "feed-forward"}, "variance of branch outputs"),
    _single("residual_growth"),
    Panel(
        {"state_norm": "stream", "update_norm": "update", "attention_norm": "attention", "ffn_norm": "feed-forward"},
        "norms",
    ),
    Panel(
        {"update_ratio": "block", "attention_ratio": "attention", "ffn_ratio": "feed-forward"},
        "update ratio: ‖added‖ / ‖stream‖",
    ),
    Panel(
        {"update_cosine": "block", "attention_cosine": "attention", "ffn_cosine": "feed-forward"},
        "update cosine: cos(added, stream)",
    ),
    _single("block_influence"),
    Panel(
        {"angular_distance": "previous layer", "angle_to_end": "last layer", "update_angle": "next update"},
        "angles of the stream",
    ),
    Panel({"lens_loss": "logit lens", "early_exit_loss": "through last block"}, "early exit loss"),
    _single("causal_effect"),
    Panel(
        {"affine_loss_increase": "affine map instead", "skip_loss_increase": "left out"},
        "loss increase without the block",
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
    HeatMap(name="causal_maximum", layer="skipped layer"),
    HeatMap(name="causal_maximum_current", layer="skipped layer"),
)
HEAT_MAPS: dict[str, HeatMap] = {kind.name: kind for kind in _SPECIAL_HEAT_MAPS}
HEAT_MAPS |= {name: HeatMap(name=name) for name in BY_PAIR if name not in HEAT_MAPS}
"""Every metric by pair of layers is drawn."""

THRESHOLD_FIELDS: Mapping[str, str] = {
    name: quantity.threshold for name, quantity in BY_LAYER.items() if quantity.threshold
}
"""Thresholded metric -> config field; its first entry is the threshold that is drawn."""


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
    depths = read_depths(
        store,
        "select run_id, max(depth) from (select run_id, layer as depth from layers "
        "union all select run_id, other_layer from pairs) group by run_id",
    )
    run_id = choose_run(store.frame("select * from runs"), depths, run)
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
    for name, field in THRESHOLD_FIELDS.items():
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
    thresholds = plain(value) or MeasureConfig.model_fields[field].default
    first = float(thresholds[0]) if isinstance(thresholds, tuple) else None
    if first in set(present) or present.empty:
        return first
    return float(present.max())


def as_matrix(pairs: pd.DataFrame, n_layers: int) -> np.ndarray:
    """Rows of one metric as a matrix [L + 1, L + 1], row `other_layer`, column `layer`; NaN if missing."""
    matrix = np.full((n_layers + 1, n_layers + 1), np.nan)
    matrix[pairs["other_layer"], pairs["layer"]] = pairs["value"].astype(float)
    return matrix
