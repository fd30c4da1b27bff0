"""The numbers of a model's card of depth: every profile by layer and every matrix by pair of layers of one run.

Each metric is taken at the last step at which the run measured it, a thresholded one at its leading threshold. NULL is
NaN here, and stays missing. Definitions, units and sources of the metrics are in `sparsedepth.quantities`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from sparsedepth.config.run import MeasureConfig
from sparsedepth.effects.knobs import plain
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.store.comparable_loss import loss_of

if TYPE_CHECKING:
    from sparsedepth.store.connection import Store

Scale = Literal["linear", "log", "symlog"]
"""symlog is for relative increases of the loss, which span decades and may be negative."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    series: Mapping[str, str]
    """Metric without threshold -> label. The panel is drawn if one of them was measured."""
    scale: Scale = "linear"


@dataclass(frozen=True, kw_only=True)
class Map:
    title: str
    first: int = 1
    """The first layer that has pairs."""
    diagonal: bool = False
    """Whether a layer makes a pair with itself."""
    scale: Scale = "linear"
    later: str = "later layer"
    """What `other_layer` is."""
    layer: str = "layer"


PANELS: tuple[Panel, ...] = (
    Panel(title="residual variance", series={"residual_variance": ""}, scale="log"),
    Panel(
        title="variance of what is added",
        series={"attention_variance": "attention", "ffn_variance": "feed-forward"},
        scale="log",
    ),
    Panel(title="growth of residual variance", series={"residual_growth": ""}, scale="log"),
    Panel(
        title="norms",
        series={
            "state_norm": "stream",
            "update_norm": "update",
            "attention_norm": "attention",
            "ffn_norm": "feed-forward",
        },
        scale="log",
    ),
    Panel(
        title="update ratio: ‖added‖ / ‖stream‖",
        series={"update_ratio": "block", "attention_ratio": "attention", "ffn_ratio": "feed-forward"},
        scale="log",
    ),
    Panel(
        title="update cosine: cos(added, stream)",
        series={"update_cosine": "block", "attention_cosine": "attention", "ffn_cosine": "feed-forward"},
    ),
    Panel(title="block influence", series={"block_influence": ""}),
    Panel(
        title="angles of the stream",
        series={"angular_distance": "layer before", "angle_to_end": "last layer", "update_angle": "next update"},
    ),
    Panel(
        title="loss when leaving early",
        series={"lens_loss": "logit lens", "early_exit_loss": "through last block"},
    ),
    Panel(title="causal effect on later layers", series={"causal_effect": ""}),
    Panel(
        title="loss increase without the block",
        series={"affine_loss_increase": "affine map instead", "skip_loss_increase": "left out"},
        scale="symlog",
    ),
    Panel(
        title="Jacobian's deviation from identity",
        series={"jacobian_deviation": "per token", "jacobian_deviation_averaged": "of the mean"},
    ),
    Panel(title="Jacobian deviation, released code", series={"jacobian_deviation_released": ""}),
    Panel(title="weight sparsity", series={"weight_sparsity": "|w| <", "weight_sparsity_rel": "|w| / rms <"}),
    Panel(
        title="attention sparsity",
        series={"attention_sparsity": "weight <", "attention_sparsity_rel": "weight / uniform <"},
    ),
    Panel(title="attention entropy / uniform", series={"attention_entropy_rel": ""}),
    Panel(title="attention entropy", series={"attention_entropy": ""}),
    Panel(title="attention on the first token", series={"attention_sink": ""}),
    Panel(title="effective experts", series={"effective_experts": ""}),
    Panel(title="variation of expert load", series={"expert_load_variation": ""}),
    Panel(title="router entropy", series={"router_entropy": ""}),
)
"""In reading order: the stream, what it does to the loss, the weights. Left out: `state_cosine`, which is 1 - block
influence, and weight sparsity by kind of matrix, seven lines per threshold that `query` tabulates better; and
trajectories, a figure of their own."""

MAPS: dict[str, Map] = {
    "causal_effect": Map(title="causal effect", scale="log", layer="skipped layer"),
    "permutation_effect": Map(title="permutation: loss increase", scale="symlog", later="swapped with layer"),
    "removal_drop": Map(
        title="removal: loss increase", diagonal=True, scale="symlog", layer="first removed", later="last removed"
    ),
    "angular_distance": Map(title="angular distance (rad)", first=0),
    "angular_distance_last_token": Map(title="angular distance, last token (rad)", first=0),
    "causal_maximum": Map(title="largest causal effect, later tokens", scale="log", layer="skipped layer"),
    "causal_maximum_current": Map(title="largest causal effect, all tokens", scale="log", layer="skipped layer"),
}

LEADING: Mapping[str, str] = {
    "weight_sparsity": "weight_eps",
    "weight_sparsity_rel": "weight_rel_eps",
    "attention_sparsity": "attention_tau",
    "attention_sparsity_rel": "attention_rel_tau",
}
"""Thresholded metric -> config field whose first entry is its leading threshold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Card:
    run: Mapping[str, object]
    """The run's row of `runs`."""
    n_layers: int
    profiles: pd.DataFrame
    """Columns: name (metric without threshold), threshold, layer, value, se (standard error); NaN where missing."""
    matrices: dict[str, np.ndarray]
    """By metric: [L + 1, L + 1], row `other_layer`, column `layer`, layer 0 first; NaN where missing or no pair."""


def pairs_that_exist(name: str, n_layers: int) -> np.ndarray:
    """Which cells of a matrix are pairs of layers at all: bool [L + 1, L + 1]."""
    kind = MAPS[name]
    other, layer = np.indices((n_layers + 1, n_layers + 1))
    return (layer >= kind.first) & ((layer <= other) if kind.diagonal else (layer < other))


def load_card(store: "Store", run: str | None = None) -> Card:
    """The card of a run of the store; by default, of the run with the lowest val_loss among the deepest.

    Raises ValueError for an unknown run, or one without values by layer.
    """
    runs = store.frame("select * from runs")
    depths = store.frame(
        "select run_id, max(depth) as depth from (select run_id, layer as depth from layers "
        "union all select run_id, other_layer from pairs) group by run_id"
    )
    run_id = choose_run(runs, dict(zip(depths["run_id"], depths["depth"].astype(int), strict=True)), run)
    layers, pairs = (
        store.frame(f"select * from {view} where run_id = '{run_id.replace(chr(39), chr(39) * 2)}'")
        for view in ("layers", "pairs")
    )
    return card(runs[runs["run_id"] == run_id].iloc[0].to_dict(), layers, pairs)


def choose_run(runs: pd.DataFrame, depths: Mapping[str, int], run: str | None) -> str:
    """The wanted run, or the best one; `depths` holds the number of layers of each run that has values by layer."""
    ids = sorted(runs["run_id"])
    if run is None:
        # Not '== ok': a model that was measured, not trained, has no outcome.
        candidates = runs[(runs["outcome"] != "diverged") & runs["run_id"].isin(list(depths))]
        if candidates.empty:
            raise NothingToDraw(
                f"none of the {len(runs)} runs has values by layer and did not diverge: no card to draw"
            )
        ranked = candidates.assign(depth=candidates["run_id"].map(depths))
        loss = loss_of(runs)
        ranked[loss] = pd.to_numeric(ranked[loss], errors="coerce")
        order = ranked.sort_values(["depth", loss, "run_id"], ascending=[False, True, True])  # NaN last
        return str(order["run_id"].iloc[0])
    if run not in ids:
        near = difflib.get_close_matches(run, ids, n=3, cutoff=0.0)
        raise ValueError(f"run {run!r} is not in this store; the nearest of its {len(ids)} run ids: {', '.join(near)}")
    if run not in depths:
        raise NothingToDraw(f"run {run!r} has no values by layer; its measures were left out, or it ended before them")
    return run


def card(run: Mapping[str, object], layers: pd.DataFrame, pairs: pd.DataFrame) -> Card:
    """The card of one run, from its row of `runs` and its rows of `layers` and `pairs`."""
    n_layers = int(max(0, *layers["layer"], *pairs["other_layer"]))
    return Card(
        run=run, n_layers=n_layers, profiles=_profiles(run, layers, n_layers), matrices=_matrices(pairs, n_layers)
    )


def _profiles(run: Mapping[str, object], layers: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    rows = _at_last_step(layers)
    named = [metric.partition("@") for metric in rows["metric"]]
    thresholds = [float(text) if text else np.nan for _, _, text in named]
    rows = rows.assign(
        name=pd.array([name for name, _, _ in named], dtype=object), threshold=np.array(thresholds, float)
    )
    # The last layer has no later one to affect: its NULL is no missing value.
    rows = rows[(rows["name"] != "causal_effect") | (rows["layer"] < n_layers)]
    for name, field in LEADING.items():
        here = rows["name"] == name
        leading = _leading(run.get(field), field, rows.loc[here, "threshold"])
        rows = rows[~here | (rows["threshold"] == leading)]
    drawn = [name for panel in PANELS for name in panel.series]
    errors = rows[rows["name"].isin([f"{name}_se" for name in drawn])]
    errors = errors.assign(name=errors["name"].str.removesuffix("_se"), se=errors["value"].astype(float))
    shown = rows[rows["name"].isin(drawn)].merge(errors[["name", "layer", "se"]], on=["name", "layer"], how="left")
    shown["value"] = shown["value"].astype(float)
    ordered = shown[["name", "threshold", "layer", "value", "se"]].sort_values(["name", "layer"])
    return ordered.reset_index(drop=True)


def _leading(chosen: object, field: str, present: pd.Series) -> float | None:
    """The first threshold of the run's field (of the default where it is NULL), or the largest there is."""
    thresholds = plain(chosen) or MeasureConfig.model_fields[field].default
    first = float(thresholds[0]) if isinstance(thresholds, tuple) else None
    if first in set(present) or present.empty:
        return first
    return float(present.max())


def _matrices(pairs: pd.DataFrame, n_layers: int) -> dict[str, np.ndarray]:
    rows = _at_last_step(pairs)
    found = {}
    for name in MAPS:
        here = rows[rows["metric"] == name]
        if here["value"].notna().any():
            found[name] = np.full((n_layers + 1, n_layers + 1), np.nan)
            found[name][here["other_layer"], here["layer"]] = here["value"].astype(float)
    return found


def _at_last_step(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["step"] == rows.groupby("metric")["step"].transform("max")]
