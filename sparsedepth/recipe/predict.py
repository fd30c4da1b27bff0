"""The effect of each setting at a depth: measured there or predicted from other depths, then shrunk towards 0.

Measured: the paired contrast of that depth (`effects.contrast`). Predicted: with x = ln L, for each seed s = 1..S the
least-squares line through its paired differences at depths l = 1..D, evaluated at the new depth,

    d_s = mean_l d_sl + b_s (x - mean x_l),      effect = mean_s d_s,     se^2 = var_s(d_s) / S + tau^2 (1 + h)
    h = 1 / D + (x - mean x_l)^2 / sum_l (x_l - mean x_l)^2

so that the interval widens with the distance from the depths that were run. tau^2 is the variance between depths: the
scatter of effects about their line beyond seed noise, for instance from tuning at each depth. With r_sl the residual of
seed s at depth l, over the settings j of three depths or more,

    tau^2 = mean_j max(0, S sum_l (mean_s r_sl)^2 / (D - 2) - sum_sl (r_sl - mean_s r_sl)^2 / ((S - 1) (D - 2))) / S

of sum_j (D - 2) degrees of freedom, added to those of the seeds by Satterthwaite's rule. Settings of two depths, whose
line misses neither, take that tau^2, too. Only where no setting has three depths are r_sl the residuals of two depths
from their mean, with one degree of freedom, so that a slope counts as scatter. Settings without two seeds that were run
at every depth have no part in tau^2. The variance from choosing tuned values (`effects.tuning_error`), by the pairs'
weights in the line, is used instead where it is larger. b is the interaction of knob and depth: one depth cannot
estimate it, so nothing is predicted from one.

Shrunk (empirical Bayes): the true effects of a store's settings are taken as draws from N(0, tau^2); an effect e_j with
standard error se_j is multiplied by its reliability,

    shrunk_j = e_j tau^2 / (tau^2 + se_j^2),     tau^2: sum_j e_j^2 / (tau^2 + se_j^2) = number of settings, or 0

(Paule and Mandel 1982; Morris 1983).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.optimize import bisect

from sparsedepth.effects.all_effects import judge
from sparsedepth.effects.contrast import Contrast, effect_fields, noise_and_floor, over_depths
from sparsedepth.effects.intervals import ExtraVariance
from sparsedepth.effects.knobs import Knob, design_of
from sparsedepth.effects.pairs import pairs
from sparsedepth.effects.tuning_error import tuning_of

SIDES = ["difference", "value", "value_baseline"]


def predicted(runs: pd.DataFrame, knobs: Iterable[Knob], objective: str, depth: int) -> list[Contrast]:
    """Each setting's effect at a depth, from the runs at others; ratios and counts are over all their pairs.

    Its interval is None where its pairs are at one depth only.
    """
    design = design_of(runs)
    lines = list[tuple[Contrast, pd.DataFrame]]()
    for knob in knobs:
        rows = pairs(runs, knob, objective, design=design)
        for contrast in over_depths(runs, knob, objective, design):
            usable = rows[rows["setting"] == contrast.setting].dropna(subset=["difference"])
            lines.append((_predicted(contrast, usable, depth), usable))
    scatter = scatter_of_depths(usable for _, usable in lines)
    return judge([_with_scatter(contrast, scatter, leverage(rows["n_layers"], depth)) for contrast, rows in lines])


def _with_scatter(contrast: Contrast, scatter: ExtraVariance | None, h: float) -> Contrast:
    """The prediction with the larger of two variances: tau^2 (1 + h), or that from choosing tuned values."""
    if scatter is None or math.isinf(h):
        return contrast
    variance, of_tuning = scatter.variance * (1 + h), sum(term.variance for term in contrast.extra_variances)
    return (
        replace(contrast, extra_variances=(replace(scatter, variance=variance),)) if variance > of_tuning else contrast
    )


def _predicted(contrast: Contrast, rows: pd.DataFrame, depth: int) -> Contrast:
    weights = line_weights(rows, depth)
    by_seed = at_depth(rows, weights)
    noise, floor = noise_and_floor(by_seed, contrast.least_sd)
    tuning = tuning_of(rows.loc[weights.index], weights / max(len(by_seed), 1))
    fields = effect_fields(by_seed["difference"], contrast.effect.n, contrast.least_sd, tuning)
    return replace(contrast, n_layers=depth, **fields, noise=noise, floor=floor)


def at_depth(rows: pd.DataFrame, weights: pd.Series) -> pd.DataFrame:
    """SIDES by seed, each on its line in ln n_layers, at the depth of these `line_weights`."""
    return rows.loc[weights.index, SIDES].mul(weights, axis=0).groupby(rows["seed"]).sum()


def line_weights(rows: pd.DataFrame, depth: int) -> pd.Series:
    """The weight of each pair in its seed's line at a depth; seeds that were run at one depth only are absent."""
    x = np.log(rows["n_layers"].astype(float))
    grouped = x.groupby(rows["seed"])
    off = x - grouped.transform("mean")
    sxx = (off**2).groupby(rows["seed"]).transform("sum")
    weight = 1 / grouped.transform("size") + off * (math.log(depth) - grouped.transform("mean")) / sxx
    return weight[sxx > 0]


def leverage(depths: Iterable[int], depth: int) -> float:
    """h of a depth, given those that were run."""
    x_D = np.log(sorted({float(each) for each in depths}))
    if len(x_D) < 2:
        return math.inf
    return 1 / len(x_D) + (math.log(depth) - x_D.mean()) ** 2 / float(((x_D - x_D.mean()) ** 2).sum())


def scatter_of_depths(settings: Iterable[pd.DataFrame]) -> ExtraVariance | None:
    """tau^2 over the pairs of each setting: of those of three depths or more, without any of those of two."""
    by_depths = defaultdict[bool, list[tuple[float, int]]](list)
    for rows in settings:
        if (tau2 := between_depths(rows)) is not None:
            by_depths[rows["n_layers"].nunique() > 2].append(tau2)
    if not by_depths:
        return None
    tau2s, dfs = zip(*(by_depths[True] or by_depths[False]), strict=True)
    return ExtraVariance(variance=float(np.mean(tau2s)), df=sum(dfs))


def between_depths(rows: pd.DataFrame) -> tuple[float, int] | None:
    """tau^2 of one setting and its degrees of freedom, from the seeds that were run at every depth; None with fewer
    than two such seeds, or one depth."""
    d_SD = rows.pivot_table(index="seed", columns="n_layers", values="difference").dropna()
    n_seeds, n_depths = d_SD.shape
    if n_seeds < 2 or n_depths < 2:
        return None
    x_D = np.log(d_SD.columns.to_numpy(dtype=float))
    design_DP = np.column_stack([np.ones(n_depths), x_D])[:, : n_depths - 1]
    df = n_depths - design_DP.shape[1]
    r_SD = d_SD.to_numpy() @ (np.eye(n_depths) - design_DP @ np.linalg.pinv(design_DP))
    between = n_seeds * float((r_SD.mean(0) ** 2).sum()) / df
    within = float(((r_SD - r_SD.mean(0)) ** 2).sum()) / ((n_seeds - 1) * df)
    return max(0.0, between - within) / n_seeds, df


def spread_of_effects(effects: Sequence[float], errors: Sequence[float]) -> float:
    """tau: the estimated standard deviation of true effects around 0; 0 if noise explains the estimates."""
    square_J, error_J = np.asarray(effects, float) ** 2, np.asarray(errors, float) ** 2

    def excess(tau2: float) -> float:
        total_J = tau2 + error_J
        return float(np.divide(square_J, total_J, out=np.where(square_J > 0, np.inf, 0.0), where=total_J > 0).sum())

    if not len(square_J) or excess(0.0) <= len(square_J):
        return 0.0
    high = float(square_J.sum())  # excess(high) <= number of settings
    return math.sqrt(bisect(lambda tau2: excess(tau2) - len(square_J), 0.0, high, xtol=1e-15 * high))


def reliability(tau: float, error: float) -> float:
    """The factor by which an estimate is shrunk."""
    return tau**2 / (tau**2 + error**2) if tau else 0.0
