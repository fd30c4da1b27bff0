"""Angles between the states of neighbouring layers, and how they shrink with depth (2602.05970).

Left: the mean angle at each layer of one run, and the two ideals. Middle: a sample of its tokens on the first two
principal components of their angles, with the ideals projected, (ideal - mean) . component. Right: the mean angle of
the middle layers of every run against depth, with the power law fitted to each setting (`TurnLaw`).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsedepth.plots.page import Drawing, NothingToDraw
from sparsedepth.plots.runs import all_runs, choose_run, rows_of_run, settings_in_order
from sparsedepth.plots.style import (
    MISSING,
    SERIES,
    caption,
    depth_axis,
    escaped,
    groups,
    log_scale,
    panels,
    setting_styles,
    side_by_side,
    wrapped,
)
from sparsedepth.store.connection import Store
from sparsedepth.store.small_sample import t_critical
from sparsedepth.store.tuning_roles import result_rows

ANGLE = "angular_distance_middle"
IDEALS = {"early_stop_ideal": "early stop", "even_ideal": "even"}
VECTORS = ("trajectory_mean", "trajectory_pc1", "trajectory_pc2", *IDEALS)
COLOURS = {"early stop": SERIES[1][0], "even": SERIES[0][0], "neither": "#aaaaaa"}


@dataclass(frozen=True, kw_only=True)
class RunTrajectories:
    """Layers and tokens of one run."""

    run_id: str
    vectors: pd.DataFrame
    """Index layer, columns VECTORS."""
    tokens: pd.DataFrame
    """The run's rows of `tokens` that have components."""
    ideals: dict[str, tuple[float, float]]
    """class -> (pc1, pc2)"""
    shares: dict[str, float]
    """Share of tokens by class, and of variance by component ('pc1', 'pc2')."""


@dataclass(frozen=True, kw_only=True)
class TurnLaw:
    """ln angle = intercept - b ln L, L the depth, by least squares over the mean of each depth: more seeds bring no
    mean nearer to the line. The interval is Student's, with two degrees of freedom less than depths."""

    b: float
    lo: float | None
    hi: float | None
    """95% interval of b; None of two depths."""
    intercept: float

    def __call__(self, depth: np.ndarray) -> np.ndarray:
        """The fitted angle, rad."""
        return np.exp(self.intercept) * depth**-self.b


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    run: RunTrajectories | None
    """None if no run has trajectories."""
    angles: pd.DataFrame
    """Columns run_id, setting, n_layers, angular_distance_middle: runs of settings with two depths."""
    laws: dict[str, TurnLaw]
    """setting -> its power law"""

    def table(self) -> pd.DataFrame:
        """Every number drawn: panel (layers, tokens, ideals, depth, fit), series, run_id, x, y."""
        parts = []
        if self.run is not None:
            by_layer = self.run.vectors[["trajectory_mean", *IDEALS]].rename_axis("x").reset_index()
            parts.append(by_layer.melt("x", var_name="series", value_name="y").assign(panel="layers"))
            tokens = self.run.tokens.rename(columns={"nearest": "series", "pc1": "x", "pc2": "y"})
            parts.append(tokens[["series", "x", "y"]].assign(panel="tokens"))
            ideals = [(name, *point) for name, point in self.run.ideals.items()]
            parts.append(pd.DataFrame(ideals, columns=["series", "x", "y"]).assign(panel="ideals"))
            parts = [part.assign(run_id=self.run.run_id) for part in parts]
        names = {"setting": "series", "n_layers": "x", ANGLE: "y"}
        parts.append(self.angles.rename(columns=names).assign(panel="depth"))
        for setting, law in self.laws.items():
            depths = np.array(sorted(set(self.angles.loc[self.angles["setting"] == setting, "n_layers"])))
            fit = pd.DataFrame({"series": setting, "x": depths, "y": law(depths.astype(float))})
            parts.append(fit.assign(panel="fit", run_id=None))
        drawn = pd.concat([part for part in parts if len(part)], ignore_index=True)
        return drawn[["panel", "series", "run_id", "x", "y"]]


def trajectories(store: Store, run: str | None = None) -> Drawing:
    """The figure of a run's tokens and of all runs' angles. Raises as `load_trajectories` does."""
    data = load_trajectories(store, run)
    return Drawing(data=data.table(), page=partial(page_of_trajectories, data))


def load_trajectories(store: Store, run: str | None = None) -> Trajectories:
    """The numbers; `run` chooses the run whose tokens are shown (default: the lowest val_loss at the deepest depth).
    Raises ValueError for a run without trajectories, or if there is neither a panel of tokens nor of depth.
    """
    runs = all_runs(store)
    text = "select run_id, max(layer) from layers where metric = 'trajectory_mean' group by run_id"
    depths = dict(store.sql(text).rows)
    if not depths and run is None:
        return trajectory_data(runs, None)
    run_id = choose_run(runs, depths, run)
    row, layers, tokens = (rows_of_run(store, view, run_id) for view in ("runs", "layers", "tokens"))
    return trajectory_data(runs, run_trajectories(row.iloc[0].to_dict(), layers, tokens))


def trajectory_data(runs: pd.DataFrame, run: RunTrajectories | None) -> Trajectories:
    """The numbers, from the rows of `runs`. Raises ValueError if there is nothing to draw."""
    angles = angles_by_depth(runs)
    if run is None and angles.empty:
        raise NothingToDraw(
            "no run has trajectories, and no setting has an angle at two depths; "
            "measure 'trajectories', or 'geometry' at two depths"
        )
    fits = {str(setting): turn_law(members) for (setting,), members in groups(angles, "setting")}
    return Trajectories(
        run=run,
        angles=angles[["run_id", "setting", "n_layers", ANGLE]].reset_index(drop=True),
        laws={setting: law for setting, law in fits.items() if law is not None},
    )


def angles_by_depth(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished runs with an angle above 0 (a model of 2 layers has none), of settings with two depths."""
    results = result_rows(runs)
    angles = pd.to_numeric(results[ANGLE], errors="coerce")
    finished = results[(results["outcome"] == "ok") & (angles > 0)]
    n_depths = finished.groupby("setting")["n_layers"].transform("nunique")
    return finished.loc[n_depths >= 2, ["run_id", "setting", "n_layers", ANGLE]].astype({"n_layers": int, ANGLE: float})


def turn_law(angles: pd.DataFrame) -> TurnLaw | None:
    """The fit over a setting's rows of `angles_by_depth`; None without two depths."""
    means = np.log(angles[ANGLE]).groupby(angles["n_layers"]).mean()
    n = len(means)
    if n < 2:
        return None
    x, y = np.log(means.index.to_numpy(float)), means.to_numpy(float)
    sxx = float(((x - x.mean()) ** 2).sum())
    slope = float((x - x.mean()) @ y) / sxx
    intercept, half = float(y.mean() - slope * x.mean()), math.nan
    if n > 2:
        residual = y - intercept - slope * x
        half = t_critical(n - 2) * math.sqrt(float(residual @ residual) / (n - 2) / sxx)
    lo, hi = (None, None) if n == 2 else (-slope - half, -slope + half)
    return TurnLaw(b=-slope, lo=lo, hi=hi, intercept=intercept)


def run_trajectories(run: dict[Any, Any], layers: pd.DataFrame, tokens: pd.DataFrame) -> RunTrajectories:
    """The numbers of one run, from its row of `runs` and its rows of `layers` and `tokens`."""
    rows = layers[layers["metric"].isin(VECTORS)]
    vectors = rows.pivot(index="layer", columns="metric", values="value").reindex(columns=list(VECTORS))
    components_L2 = vectors[["trajectory_pc1", "trajectory_pc2"]].to_numpy()
    ideals = {}
    for metric, name in IDEALS.items():
        pc1, pc2 = (vectors[metric] - vectors["trajectory_mean"]).to_numpy() @ components_L2
        ideals[name] = (float(pc1), float(pc2))
    early, even = float(run["early_stop_share"]), float(run["even_share"])
    shares = {"early stop": early, "even": even, "neither": 1 - early - even}
    return RunTrajectories(
        run_id=str(run["run_id"]),
        vectors=vectors,
        tokens=tokens[tokens["pc1"].notna()],
        ideals=ideals,
        shares=shares | {pc: float(run[f"trajectory_{pc}_share"]) for pc in ("pc1", "pc2")},
    )


def page_of_trajectories(data: Trajectories) -> Figure:
    """Up to three panels in a row."""
    n_panels = 2 * (data.run is not None) + (not data.angles.empty)
    height = 3.7 + 0.25 * data.angles["setting"].nunique()
    page, axes = panels(n_panels, 3, 3.6, height, least=4.8)
    notes = []
    if data.run is not None:
        _draw_layers(axes.pop(0), data.run)
        _draw_tokens(axes.pop(0), data.run)
        n_tokens = f"{len(data.run.tokens):,} tokens"
        notes.append(
            f"Run {data.run.run_id}: mean over tokens and the two ideals; {n_tokens}, coloured by nearest ideal."
        )
    if not data.angles.empty:
        _draw_depth(axes.pop(0), data)
        notes.append(
            "Points: mean angle of a run's middle layers, those of one depth side by side. Lines: fit "
            "angle ~ depth^-b, 95% interval of b. Grey: b = 1."
        )
    caption(page, *notes)
    return page


def _draw_layers(axis: Any, run: RunTrajectories) -> None:
    for metric, name in IDEALS.items():
        axis.plot(
            run.vectors[metric], color=COLOURS[name], linewidth=1.1, linestyle=(0, (4, 2)), label=f"ideal: {name}"
        )
    axis.plot(run.vectors["trajectory_mean"], color="black", marker="o", markersize=3, linewidth=1.2, label="mean")
    axis.set(xlabel="layer", ylabel="angle between neighbouring states (rad)", ylim=(0, None))
    axis.legend()


def _draw_tokens(axis: Any, run: RunTrajectories) -> None:
    for name in ("neither", "even", "early stop"):
        shown = run.tokens[run.tokens["nearest"] == name]
        label = f"{name}: {run.shares[name]:.1%}"
        axis.scatter(shown["pc1"], shown["pc2"], s=6, alpha=0.5, color=COLOURS[name], linewidth=0, label=label)
    for name, size in (("even", 180), ("early stop", 60)):  # they can overlap
        pc1, pc2 = run.ideals[name]
        axis.scatter(pc1, pc2, s=size, marker="*", color=COLOURS[name], edgecolor="black", linewidth=0.8, zorder=3)
    axis.set_xlabel(f"pc1 (rad), {run.shares['pc1']:.0%} of variance")
    axis.set_ylabel(f"pc2 (rad), {run.shares['pc2']:.0%} of variance")
    axis.set_title("★ ideal", fontsize=8)
    axis.legend(markerscale=2, handletextpad=0.1)


def _draw_depth(axis: Any, data: Trajectories) -> None:
    styles = setting_styles(settings_in_order(data.angles["setting"]))
    depths, angles = sorted(set(data.angles["n_layers"])), data.angles[ANGLE].astype(float)
    shifts = side_by_side([*styles], depths)
    for index, (setting, (colour, marker, dashes)) in enumerate(styles.items()):
        front = 4 + len(styles) - index  # the baseline, which is first, in front
        shown = data.angles[data.angles["setting"] == setting]
        label = escaped(setting)
        if (law := data.laws.get(setting)) is not None:
            ends = "" if law.lo is None or law.hi is None else f" ({law.lo:.2f} to {law.hi:.2f})"
            label += f": b\u00a0=\u00a0{law.b:.2f}{ends}"
            line = np.geomspace(shown["n_layers"].min(), shown["n_layers"].max(), 20)
            axis.plot(line, law(line), color=colour, linestyle=dashes, linewidth=1.1, zorder=front)
        label = wrapped(label, 44)
        axis.scatter(
            shown["n_layers"] * shifts[setting],
            shown[ANGLE],
            s=18,
            color=colour,
            marker=marker,
            label=label,
            zorder=front,
        )
    reference = angles.max() * depths[0] / np.array([depths[0], depths[-1]])
    axis.plot([depths[0], depths[-1]], reference, color=MISSING, linewidth=2.5, zorder=0)
    depth_axis(axis, depths)
    log_scale(axis, "y", [*angles, *reference])
    axis.set(xlabel="n_layers", ylabel="mean angle of the middle layers (rad)")
    axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(-0.02, 1.0))
