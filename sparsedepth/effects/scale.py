"""Does an effect persist with scale? Effects against ln parameters, ln tokens and ln tokens per parameter.

At one depth, over the matched pairs of a setting (`effects.pairs`) at S >= 3 scales x (of the baseline's run) and G
seeds, with y_sg the mean difference of seed g at scale s:

    y_sg = a_g + b_g (ln x_s - mean ln x) + r_s + e_sg

A line through each seed's effects (the seed is the unit); r_s is what the line misses at a scale. The slope, and the
effect at a scale, have the wider of two Student's intervals: over the G lines, and from the scales' own residuals with
S - 2 degrees of freedom. A *prediction* at a size that was not run adds the residual variance of one more scale. For
parameters, tokens are held (each number of tokens has its own level), and for tokens parameters are, unless each size
has its own number of tokens.

    reverses  the effects at the smallest and at the largest scale are significant, with opposite signs
    shrinks   the slope and the effect at the smallest scale are significant, and the slope leads towards no effect
    persists  the effect at the largest scale is significant, with the sign of the smallest's
    undecided none of these; too few scales: fewer than three

Significant: Holm's p of at most 0.05 over the settings of a depth on an axis; slopes, and the effects at either end,
are a family each. A scale is a width and a budget: its size is the mean over the runs there, so that a choice that adds
parameters, such as experts, is not a scale of its own.

Decision accuracy (DataDecide, 2504.11393): the share of pairs of configurations whose order at a smaller scale is that
at the largest, a tie counted half.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import unit_of, values_of
from sparsedepth.effects.intervals import ALPHA, Estimate, holm, t_interval
from sparsedepth.effects.knobs import Knob, find_knobs, keys
from sparsedepth.effects.pairs import pairs
from sparsedepth.store.tuning_roles import result_rows

AXES: Mapping[str, str] = {
    "parameters": "params_total",
    "tokens": "tokens_trained",
    "tokens per parameter": "tokens_per_param",
}
"""Measure of scale -> its column of `runs`."""
HELD: Mapping[str, str] = {"parameters": "tokens", "tokens": "parameters"}
_SIZE = {column: f"{column} of the baseline" for column in AXES.values()}
MIN_SCALES = 3
SCALE_FIELDS = {"d_model", "train_tokens"}
"""The fields that make scales; fields that change with them are no knobs."""

UNKNOWN = Estimate(mean=None, lo=None, hi=None, p=None, n=0)

TrendVerdict = Literal["persists", "shrinks", "reverses", "undecided", "too few scales"]


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One setting's effect at one depth along one axis of scale."""

    knob: str
    setting: str
    baseline: str
    n_layers: int
    outcome: str
    unit: str
    axis: str
    scales: tuple[float, ...]
    """Ascending."""
    effects: tuple[float, ...]
    """Mean over seeds at each scale."""
    n_pairs: int
    n_seeds: int
    slope: Estimate = UNKNOWN
    """Per doubling of the axis."""
    smallest: Estimate = UNKNOWN
    largest: Estimate = UNKNOWN
    at: float | None
    """The size to predict at, if any."""
    predicted: Estimate | None = None
    """The effect there, with its 95% prediction interval."""
    verdict: TrendVerdict = "too few scales"
    n_tested: int = 0
    """Settings in the family that the verdict is corrected for."""


def trends(
    runs: pd.DataFrame, outcome: str, knob: str | None = None, at: Mapping[str, float] | None = None
) -> list[Trend]:
    """Every setting at every depth along every axis that takes several values there. `at`: axis -> size to predict."""
    runs = result_rows(runs)
    sizes = _sizes(runs)
    family: list[Trend] = []
    knobs = _knobs(runs)
    for each in knobs:
        rows = pairs(runs, each, outcome).dropna(subset=["difference"])
        rows = rows.join(sizes, on="run_id_baseline")
        for _, at_depth in rows.groupby(["n_layers", "setting"]):
            depth, setting = at_depth[["n_layers", "setting"]].iloc[0]
            head = {"knob": each.name, "setting": setting, "baseline": each.baseline, "n_layers": int(depth)}
            head |= {"outcome": outcome, "unit": unit_of(outcome, runs)}
            by_axis = (_trend(at_depth, axis, (at or {}).get(axis), head) for axis in AXES)
            family += [trend for trend in by_axis if trend]
    chosen = {each.name for each in knobs if knob is None or knob in each.fields}
    return [trend for trend in _with_verdicts(family) if trend.knob in chosen]


def _sizes(runs: pd.DataFrame) -> pd.DataFrame:
    """By run_id, the size on each axis of the runs of its depth, width and budget: their geometric mean."""
    logs = np.log(runs[list(AXES.values())].apply(pd.to_numeric, errors="coerce").astype(float))
    shape = [runs["n_layers"], runs["d_model"]]
    means = logs.groupby([*shape, runs["train_tokens"]]).transform("mean")
    means["params_total"] = logs["params_total"].groupby(shape).transform("mean")
    sizes = np.exp(means.fillna(logs))  # a run of unknown width or budget is a scale of its own
    return sizes.set_index(pd.Index(runs["run_id"])).rename(columns=_SIZE)


def _with_verdicts(trends: Sequence[Trend]) -> list[Trend]:
    """The trends with their verdicts, corrected over the settings of a depth and axis."""
    families = defaultdict[tuple[int, str], list[int]](list)
    for i, trend in enumerate(trends):
        if trend.slope.p is not None:
            families[trend.n_layers, trend.axis].append(i)
    judged = list(trends)
    for family in families.values():
        columns = ([getattr(trends[i], part).p for i in family] for part in ("slope", "smallest", "largest"))
        for i, *p_values in zip(family, *map(holm, columns), strict=True):
            differs = [p is not None and p <= ALPHA for p in p_values]
            judged[i] = replace(trends[i], verdict=_verdict(trends[i], *differs), n_tested=len(family))
    return judged


def _verdict(trend: Trend, slope_differs: bool, smallest_differs: bool, largest_differs: bool) -> TrendVerdict:
    """`*_differs`: whether it differs significantly from 0."""
    slope, smallest, largest = (part.mean or 0.0 for part in (trend.slope, trend.smallest, trend.largest))
    if smallest_differs and largest_differs and smallest * largest < 0:
        return "reverses"
    if slope_differs and smallest_differs and slope * smallest < 0:
        return "shrinks"
    return "persists" if largest_differs and smallest * largest > 0 else "undecided"


def _knobs(runs: pd.DataFrame) -> list[Knob]:
    """The knobs that make no scale."""
    return [knob for knob in find_knobs(runs) if SCALE_FIELDS.isdisjoint(knob.fields)]


def _levels(values: pd.Series) -> pd.Series:
    """ln, in steps of 2%: sizes that a knob changes slightly are one scale."""
    return (np.log(values) / 0.02).round() * 0.02


def _trend(rows: pd.DataFrame, axis: str, at: float | None, head: Mapping[str, Any]) -> Trend | None:
    """The trend of these pairs, not yet corrected over its family; None where the axis takes one value. `head`: the
    fields that do not come from the pairs."""
    size, other = rows[_SIZE[AXES[axis]]], rows[_SIZE[AXES[HELD.get(axis, axis)]]]
    if size.isna().any():
        return None
    cells = rows.assign(x=_levels(size), held=_levels(other))
    if axis not in HELD or other.isna().any() or len(cells.drop_duplicates(["x", "held"])) == cells["held"].nunique():
        cells["held"] = 0.0  # no two sizes have the same number of tokens: the two effects cannot be separated
    if cells["x"].nunique() < 2:
        return None
    means = _common_seeds(cells.groupby(["x", "held", "seed"])["difference"].agg(["mean", "size"]).reset_index())
    seeds = sorted(means["seed"].unique())
    by_scale = means.groupby("x")["mean"].mean()
    xs = by_scale.index.to_numpy()
    trend = Trend(
        **head, axis=axis, at=at, scales=tuple(np.exp(xs).tolist()), effects=tuple(by_scale.tolist()),
        n_pairs=int(means["size"].sum()), n_seeds=len(seeds),
    )  # fmt: skip
    lines = _lines(means, seeds) if len(xs) >= MIN_SCALES else None
    if lines is None:
        return trend
    slope = lines.estimate(np.array([0.0, 1.0]) * math.log(2))
    smallest, largest = (lines.estimate(np.array([1.0, x - lines.centre])) for x in (xs[0], xs[-1]))
    predicted = None if at is None else lines.estimate(np.array([1.0, math.log(at) - lines.centre]), new_scale=True)
    return replace(trend, slope=slope, smallest=smallest, largest=largest, predicted=predicted, verdict="undecided")


def _common_seeds(means: pd.DataFrame) -> pd.DataFrame:
    """Scales that were run with the same seeds: the largest such block of rows."""
    by_scale = means.groupby(["x", "held"])["seed"].agg(frozenset)
    blocks = []
    for seeds in set(by_scale):
        has_all = [seeds <= by_scale[scale] for scale in zip(means["x"], means["held"], strict=True)]
        blocks.append(means[means["seed"].isin(seeds) & pd.Series(has_all, means.index)])
    return max(blocks, key=lambda block: (len(block), -block["seed"].min()))


@dataclass(frozen=True, kw_only=True)
class _Lines:
    """A line per seed, and the residuals of the scales' means."""

    theta_by_seed: np.ndarray
    """Level at the centre and slope per unit of ln x, of each seed."""
    gram: np.ndarray
    """Inverse of X'X of one seed's scales."""
    residual: float
    """Variance of a scale's mean about the line."""
    df: int
    centre: float

    def estimate(self, weights_2: np.ndarray, new_scale: bool = False) -> Estimate:
        """A weighted sum of level and slope, with the wider of its intervals; for a new scale, to predict."""
        values_G = self.theta_by_seed @ weights_2
        mean, n = float(values_G.mean()), len(values_G)
        extra = self.residual * new_scale
        from_scales = self.residual * float(weights_2 @ self.gram @ weights_2) + extra
        estimates = [t_interval(mean, math.sqrt(from_scales), self.df, n)]
        if n >= 3:
            estimates.append(t_interval(mean, math.sqrt(float(values_G.var(ddof=1)) / n + extra), n - 1, n))
        return max(estimates, key=lambda each: (each.hi or 0.0) - (each.lo or 0.0))


def _lines(means: pd.DataFrame, seeds: Sequence[float]) -> _Lines | None:
    """Least squares per seed on the same scales, with an intercept for each level of the held quantity. None without a
    degree of freedom."""
    centre = float(np.mean(means["x"].unique()))
    thetas, residuals = [], []
    for seed in seeds:
        rows = means[means["seed"] == seed]
        levels = pd.get_dummies(rows["held"]).to_numpy(float)
        slope_N = (rows["x"] - centre).to_numpy()
        design_NP = np.column_stack([levels, slope_N])
        if len(rows) <= design_NP.shape[1] or np.linalg.matrix_rank(design_NP) < design_NP.shape[1]:
            return None
        theta = np.linalg.lstsq(design_NP, rows["mean"].to_numpy(), rcond=None)[0]
        residuals.append(rows["mean"].to_numpy() - design_NP @ theta)
        thetas.append([float((levels @ theta[:-1]).mean()), float(theta[-1])])
    df = len(design_NP) - design_NP.shape[1]
    mean_N = np.mean(residuals, axis=0)
    to_line = np.zeros((2, design_NP.shape[1]))
    to_line[0, :-1], to_line[1, -1] = levels.mean(axis=0), 1.0
    gram = to_line @ np.linalg.inv(design_NP.T @ design_NP) @ to_line.T
    return _Lines(theta_by_seed=np.array(thetas), gram=gram, residual=float(mean_N @ mean_N) / df, df=df, centre=centre)


# Decisions


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How well a smaller scale ranks the configurations of the largest."""

    n_layers: int
    params: float
    tokens: float
    compute: float
    """Of one run, relative to the largest scale."""
    accuracy: float
    n: int


def decision_accuracy(runs: pd.DataFrame, outcome: str) -> list[Decision]:
    """Every scale but the largest of each depth, against the largest; configurations by their mean over seeds."""
    runs = result_rows(runs)
    chosen = [name for knob in _knobs(runs) for name in knob.fields]
    params, tokens, flops = (
        pd.to_numeric(runs[name], errors="coerce").astype(float)
        for name in ("params_total", "tokens_trained", "train_flops")
    )
    frame = pd.DataFrame(
        {
            "n_layers": runs["n_layers"].astype(int),
            "configuration": keys(runs, chosen),
            "width": keys(runs, ["d_model"]),
            "tokens": tokens,
            "params": params,
            "compute": flops.fillna(6 * params * tokens),
            "value": values_of(runs, outcome),
        }
    ).dropna(subset=["value", "compute"])
    by_scale = []
    for _, at_depth in frame.groupby("n_layers"):
        scales = [rows for _, rows in at_depth.groupby(["width", "tokens"])]
        if len(scales) < 2:
            continue
        *smaller, largest = sorted(scales, key=lambda rows: rows["compute"].mean())
        target = largest.groupby("configuration")["value"].mean()
        for rows in smaller:
            values = rows.groupby("configuration")["value"].mean()
            both = values.index.intersection(target.index)
            right, n = decisions(values[both].to_numpy(), target[both].to_numpy())
            if n:
                decision = Decision(
                    n_layers=int(rows["n_layers"].iloc[0]), params=float(rows["params"].mean()),
                    tokens=float(rows["tokens"].iloc[0]), accuracy=right / n, n=n,
                    compute=float(rows["compute"].mean() / largest["compute"].mean()),
                )  # fmt: skip
                by_scale.append(decision)
    return by_scale


def decisions(predicted_C: np.ndarray, measured_C: np.ndarray) -> tuple[float, int]:
    """How many pairs of configurations are ordered as predicted, a predicted tie counted half; and of how many."""
    first, second = np.triu_indices(len(predicted_C), 1)
    truth = np.sign(measured_C[first] - measured_C[second])
    agree = (1 + truth * np.sign(predicted_C[first] - predicted_C[second])) / 2
    return float(agree[truth != 0].sum()), int((truth != 0).sum())
