"""Do sparsity, residual variance, effectiveness and loss move together? Rank correlations per link of the chain.

    rho = Pearson(rank x, rank y)    (Spearman 1904; ties share their mean rank)
    rho given z = -P_xy / sqrt(P_xx P_yy),   P the inverse of the rank correlations of x, y and all of z    (Yule 1907)

Scopes. 'pooled' ranks all runs together, so that depth drives it. 'within depth' correlates ranks within each depth, as
a share of its number of runs. 'within K' does so among runs that differ in knob K (and the seed) alone. 'between knobs'
correlates paired effects, ranked within depth, where all share a baseline: one point per setting of any knob and depth,
its mean change in x and in y. Do the knobs that move x more also move y more?

Replicates are not independent observations of the chain, nor are the runs of one combination of settings at several
depths, since a setting acts alike at all of them. The unit is the combination: all fields but depth, seed and tuned
ones ('within K', where contexts repeat the same few settings, and 'between knobs': the setting). The interval is the
jackknife's over G units, on Fisher's scale, each unit with all its runs left out in turn (Tukey 1958):

    z = artanh rho          se^2 = (G - 1) / G sum_g (z_without_g - mean)^2          tanh(z +- t(G - 2, 0.975) se)

one df less for each quantity that is given. p is Student's, and at least 2 / G!, the p of the most extreme of all
orders of G units. A link is 'associated' only if that interval excludes 0 and Holm's p over the links of its scope is
at most ALPHA. Association is not causation (`causal_evidence`): 2603.15389 itself shows a case (weight decay 1.0 and
3.0) where variance falls and usefulness falls with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import numpy as np
import pandas as pd

from sparsedepth.effects.intervals import ALPHA, t_interval
from sparsedepth.effects.knobs import NEVER_KNOBS, design_of, keys, tuned_fields
from sparsedepth.quantities import of_stage
from sparsedepth.quantities.record import Stage
from sparsedepth.store import degeneracy
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.tuning_roles import result_rows

Scope = Literal["pooled", "within depth"]

STAGES: tuple[Stage, ...] = ("sparsity", "variance", "effectiveness", "loss")
LINKS: tuple[tuple[str, str], ...] = tuple(
    link for cause, effect in pairwise(STAGES) for link in product(of_stage(cause), of_stage(effect))
)
"""val_loss: replaced by the loss that compares the runs (`links_of`)."""

MIN_UNITS = 6
"""Fewer get no interval."""
AT_EDGE = "tuning at the edge"
"""Column: whether the tuned value is at the edge of the values tried, to hold fixed (`given_of_tuning`)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    cause: str
    effect: str
    scope: str
    """A Scope, 'within KNOB', 'between knobs', or a Scope with 'given QUANTITY'."""
    rho: float | None
    """None where it is undefined: fewer than three runs, or one of the two does not vary."""
    lo: float | None
    hi: float | None
    p: float | None
    n_runs: int
    n_units: int
    """Configurations; settings of scope 'within KNOB' and 'between knobs'."""
    n_missing: int
    """Finished runs left out because one of the two was not measured."""
    n_diverged: int
    knob: str | None = None
    """Of scope 'within KNOB'."""
    p_holm: float | None = None
    """Holm's p over the links of one scope; None for a link alone."""

    @property
    def verdict(self) -> Literal["associated", "not distinguishable"]:
        p = self.p if self.p_holm is None else self.p_holm
        excludes = self.lo is not None and self.hi is not None and (self.lo > 0 or self.hi < 0)
        return "associated" if excludes and p is not None and p <= ALPHA else "not distinguishable"


def links_of(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """The links with both sides measured in these runs; a degenerate score is replaced by its sound form, or left out
    (`store.degeneracy`)."""
    loss = loss_of(runs)
    measured = (score for score in of_stage("effectiveness") if _is_measured(runs, score))
    forms = {score: degeneracy.sound_form(score, degeneracy.score_rows(runs, score)) for score in measured}
    named = (with_loss(loss, pair) for pair in LINKS)
    sound = ((forms.get(cause, cause), forms.get(effect, effect)) for cause, effect in named)
    return [
        (cause, effect)
        for cause, effect in dict.fromkeys(sound)
        if cause and effect and _is_measured(runs, cause) and _is_measured(runs, effect)
    ]


def _is_measured(runs: pd.DataFrame, name: str) -> bool:
    return name in runs.columns and bool(runs[name].notna().any())


def cautions(runs: pd.DataFrame) -> list[str]:
    """A line for each degenerate score of the chain, and one for all scores that are degenerate in some runs only."""
    lines: list[str] = []
    in_some: dict[str, list[str]] = {}
    for score in of_stage("effectiveness"):
        rows = degeneracy.score_rows(runs, score) if score in runs.columns else []
        judged = degeneracy.degeneracy(score, rows)
        if judged.grounds and not judged.is_degenerate:
            in_some.setdefault(judged.grounds, []).append(score)
        elif line := degeneracy.degeneracy_note(score, rows):
            lines.append(line)
    if in_some:
        parts = (f"{', '.join(scores)}, because {grounds}" for grounds, scores in in_some.items())
        lines.append(f"Degenerate in some runs: {'; '.join(parts)}")
    return lines


def link(runs: pd.DataFrame, cause: str, effect: str, scope: Scope, given: Sequence[str] = ()) -> Link:
    """One link over the finished runs that have all numbers; a partial correlation with `given`."""
    names = [cause, effect, *given]
    usable = usable_runs(runs, names)
    stratum_N = usable["n_layers"].to_numpy() if scope == "within depth" else np.zeros(len(usable))
    unit = units_of(runs)[usable.index]
    return link_of(runs, usable, names, f"{scope}, given {' and '.join(given)}" if given else scope, stratum_N, unit)


def units_of(runs: pd.DataFrame) -> pd.Series:
    """Each run's combination of settings, whatever its depth, seed and tuned values; from column `unit`, if present."""
    if "unit" in runs.columns:
        return runs["unit"]
    return keys(runs, [name for name in design_of(runs).beside_depth if name not in NEVER_KNOBS])


def given_of_tuning(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The runs with column AT_EDGE, and the columns through which tuning may confound a knob: tuned fields, lr, and
    AT_EDGE, as far as they vary."""
    at_edge = runs["tuning"] == "edge" if "tuning" in runs.columns else False
    runs = runs.assign(**{AT_EDGE: at_edge}).astype({AT_EDGE: float})
    names = [name for name in (*sorted({"lr", *tuned_fields(result_rows(runs))}), AT_EDGE) if name in runs.columns]
    return runs, [name for name in names if runs.loc[runs["outcome"] == "ok", name].nunique() > 1]


def usable_runs(runs: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The finished runs that have all these numbers."""
    return runs[runs["outcome"] == "ok"].dropna(subset=list(names))


def link_of(
    runs: pd.DataFrame, usable: pd.DataFrame, names: Sequence[str], scope: str, stratum_N: np.ndarray, unit: pd.Series
) -> Link:
    """`names`: cause, effect, and what is given; `unit`: that of each usable run."""
    finished = runs[runs["outcome"] == "ok"]
    values = [usable[name].to_numpy(dtype=float) for name in names]
    unit_N, units = pd.factorize(unit)
    rho = lo = hi = p = None
    if len(usable) >= 3:
        rho = _number(rank_correlations(values, stratum_N, unit_N, np.ones((1, len(units))))[0])
    if rho is not None and len(units) >= MIN_UNITS:
        without_G = rank_correlations(values, stratum_N, unit_N, leave_one_out(len(units)))
        z, z_G = (np.arctanh(np.clip(each, -0.999, 0.999)) for each in (rho, without_G))  # of a rho of 1 it is infinite
        if interval := jackknife(float(z), z_G, len(units) - len(values)):
            lo, hi, p = math.tanh(interval[0]), math.tanh(interval[1]), interval[2]
    return Link(
        cause=names[0],
        effect=names[1],
        scope=scope,
        rho=rho,
        lo=lo,
        hi=hi,
        p=p,
        n_runs=len(usable),
        n_units=len(units),
        n_missing=int(finished[list(names)].isna().any(axis=1).sum()),
        n_diverged=int((runs["outcome"] == "diverged").sum()),
    )


def leave_one_out(n_units: int) -> np.ndarray:
    """Weights of the units, (G, G): each row leaves one out."""
    return 1 - np.eye(n_units)


def jackknife(value: float, without_G: np.ndarray, df: int) -> tuple[float, float, float] | None:
    """The 95% interval of a value and its p against 0, from its values without each unit; None where one of these is
    undefined, which means that a single unit decides."""
    n, variance = len(without_G), jackknife_variance(without_G)
    if variance is None:
        return None
    estimate = t_interval(value, math.sqrt(variance), df, n)
    assert estimate.lo is not None and estimate.hi is not None and estimate.p is not None
    return estimate.lo, estimate.hi, max(estimate.p, 2 / math.factorial(n))


def jackknife_variance(without_G: np.ndarray) -> float | None:
    """The variance of a value, from its values without each unit; None where one of these is undefined."""
    n = len(without_G)
    return (n - 1) ** 2 / n * float(without_G.var(ddof=1)) if np.isfinite(without_G).all() else None


def rank_correlations(
    values: Sequence[np.ndarray], stratum_N: np.ndarray, unit_N: np.ndarray, times_BG: np.ndarray
) -> np.ndarray:
    """Spearman's rho of the first two variables within strata, partial given the others, one per row of the units'
    weights `times_BG`. A given variable that does not vary is ignored; NaN where undefined."""
    weight_BN = times_BG[:, unit_N]
    ranks = np.stack([midranks(value_N, stratum_N, weight_BN) for value_N in values])
    moment_BVV = np.einsum("bn,vbn,wbn->bvw", weight_BN, ranks, ranks, optimize=True)
    size_BV = np.sqrt(np.einsum("bvv->bv", moment_BVV))
    norm_BVV = size_BV[:, :, None] * size_BV[:, None, :]
    rho_BVV = np.divide(moment_BVV, norm_BVV, out=np.zeros_like(norm_BVV), where=norm_BVV > 1e-12 * len(stratum_N))
    varies_B = (rho_BVV[:, 0, 0] > 0) & (rho_BVV[:, 1, 1] > 0)
    if len(values) == 2:
        return np.where(varies_B, rho_BVV[:, 0, 1], np.nan)
    rho_BVV[:, range(2, len(values)), range(2, len(values))] = 1.0
    known_B = varies_B & (np.linalg.det(rho_BVV) > 1e-9)
    partial_B = np.full(len(times_BG), np.nan)
    inverse_BVV = np.linalg.inv(rho_BVV[known_B])
    partial_B[known_B] = -inverse_BVV[:, 0, 1] / np.sqrt(inverse_BVV[:, 0, 0] * inverse_BVV[:, 1, 1])
    return partial_B


def midranks(values_N: np.ndarray, stratum_N: np.ndarray, weight_BN: np.ndarray) -> np.ndarray:
    """The share of a run's stratum, by weight, that lies below it, ties counted half, minus 1/2 (the mean)."""
    order_N = np.lexsort((values_N, stratum_N))
    stratum, value = stratum_N[order_N], values_N[order_N]
    new_stratum = np.concatenate([[True], stratum[1:] != stratum[:-1]])
    new_tie = new_stratum | np.concatenate([[True], value[1:] != value[:-1]])
    ties_BT = np.add.reduceat(weight_BN[:, order_N], np.flatnonzero(new_tie), axis=1)  # T: groups of equal values
    below_BT = np.cumsum(ties_BT, axis=1) - ties_BT
    first_S = np.flatnonzero(new_stratum[new_tie])
    stratum_T = np.cumsum(new_stratum[new_tie]) - 1
    total_BS = np.add.reduceat(ties_BT, first_S, axis=1)
    share_BT = below_BT - below_BT[:, first_S][:, stratum_T] + ties_BT / 2
    total_BT = total_BS[:, stratum_T]
    share_BT = np.divide(share_BT, total_BT, out=np.full_like(share_BT, 0.5), where=total_BT > 0) - 0.5
    tie_N = np.empty(len(order_N), dtype=int)
    tie_N[order_N] = np.cumsum(new_tie) - 1
    return share_BT[:, tie_N]


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
