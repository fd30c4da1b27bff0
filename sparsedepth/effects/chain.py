"""Do sparsity, residual variance, effectiveness and loss move together? Rank correlations per link of the chain.

    rho = Pearson(rank x, rank y)    (Spearman 1904; ties share their mean rank)
    rho given z = -P_xy / sqrt(P_xx P_yy),   P the inverse of the rank correlations of x, y and all of z    (Yule 1907)

'pooled' ranks all runs together, so that depth drives it; 'within depth' ranks them within each depth, as a share of
its runs. Replicates and depths are no independent observations: the unit is the setting (`effects.cells`), with all
its runs. The interval is the jackknife's over G settings, on Fisher's scale, each left out in turn (Tukey 1958):

    z = artanh rho          se^2 = (G - 1) / G sum_g (z_without_g - mean)^2          tanh(z +- t(G - 2, 0.975) se)

A link is associated where that excludes 0 and its adjusted p is below ALPHA. Association is not causation
(`causal_evidence`): 2603.15389 itself shows a case where variance falls and usefulness falls with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.verdict import ALPHA
from sparsedepth.quantities import of_stage
from sparsedepth.quantities.record import Stage
from sparsedepth.store import degeneracy
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.small_sample import t_critical, two_sided_p

Scope = Literal["pooled", "within depth"]

STAGES: tuple[Stage, ...] = ("sparsity", "variance", "effectiveness", "loss")
LINKS: tuple[tuple[str, str], ...] = tuple(
    link for cause, effect in pairwise(STAGES) for link in product(of_stage(cause), of_stage(effect))
)
"""val_loss: replaced by the loss that compares the runs (`links_of`)."""

MIN_UNITS = 6
"""Fewer settings get no interval."""


@dataclass(frozen=True, kw_only=True)
class Link:
    cause: str
    effect: str
    scope: str
    """A Scope, or one with 'given QUANTITY'."""
    rho: float | None
    """None where it is undefined: fewer than three runs, or one of the two does not vary."""
    lo: float | None
    hi: float | None
    p: float | None
    n_runs: int
    n_units: int
    """Settings."""
    n_missing: int
    """Finished runs left out because one of the two was not measured."""
    n_diverged: int
    p_adjusted: float | None = None
    """Over the links of one scope; None for a link alone."""

    @property
    def verdict(self) -> Literal["associated", "not distinguishable"]:
        p = self.p if self.p_adjusted is None else self.p_adjusted
        excludes = self.lo is not None and self.hi is not None and (self.lo > 0 or self.hi < 0)
        return "associated" if excludes and p is not None and p <= ALPHA else "not distinguishable"


def links_of(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """The links with both sides measured in these runs; a degenerate score is replaced by its sound form, or left out
    (`store.degeneracy`)."""
    measured = {name for name in runs.columns if runs[name].notna().any()}
    scores = [score for score in of_stage("effectiveness") if score in measured]
    forms = {score: degeneracy.sound_form(score, degeneracy.score_rows(runs, score)) for score in scores}
    named = (with_loss(loss_of(runs), pair) for pair in LINKS)
    sound = dict.fromkeys((forms.get(cause, cause), forms.get(effect, effect)) for cause, effect in named)
    return [(a, b) for a, b in sound if a is not None and b is not None and {a, b} <= measured]


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


def units_of(runs: pd.DataFrame) -> pd.Series:
    """Each run's setting, whatever its depth, seed and tuned values; from column `unit`, if present."""
    if "unit" in runs.columns:
        return runs["unit"]
    return cells_of(runs, loss_of(runs)).rows["setting"].reindex(runs.index)


def usable_runs(runs: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The finished runs that have all these numbers, with their unit."""
    return runs.assign(unit=units_of(runs))[runs["outcome"] == "ok"].dropna(subset=[*names, "unit"])


def link(runs: pd.DataFrame, cause: str, effect: str, scope: Scope, given: Sequence[str] = ()) -> Link:
    """One link over the finished runs that have all numbers; a partial correlation with `given`."""
    names = [cause, effect, *given]
    usable = usable_runs(runs, names)
    stratum_N = usable["n_layers"].to_numpy() if scope == "within depth" else np.zeros(len(usable))
    values = [usable[name].to_numpy(dtype=float) for name in names]
    unit_N, units = pd.factorize(usable["unit"])
    rho = lo = hi = p = None
    if len(usable) >= 3:
        value = float(rank_correlations(values, stratum_N, np.ones((1, len(usable))))[0])
        rho = value if math.isfinite(value) else None
    if rho is not None and len(units) >= MIN_UNITS:
        without_G = rank_correlations(values, stratum_N, leave_one_out(unit_N))
        z, z_G = (np.arctanh(np.clip(each, -0.999, 0.999)) for each in (rho, without_G))  # of a rho of 1 it is infinite
        if interval := jackknife(float(z), z_G, len(units) - len(values)):
            lo, hi, p = math.tanh(interval[0]), math.tanh(interval[1]), interval[2]
    return Link(
        cause=cause,
        effect=effect,
        scope=f"{scope}, given {' and '.join(given)}" if given else scope,
        rho=rho,
        lo=lo,
        hi=hi,
        p=p,
        n_runs=len(usable),
        n_units=len(units),
        n_missing=int(runs.loc[runs["outcome"] == "ok", names].isna().any(axis=1).sum()),
        n_diverged=int((runs["outcome"] == "diverged").sum()),
    )


def leave_one_out(unit_N: np.ndarray) -> np.ndarray:
    """Weights of the runs, (G, N): each row leaves a unit out."""
    return (unit_N != np.arange(unit_N.max() + 1)[:, None]).astype(float)


def jackknife(value: float, without_G: np.ndarray, df: int) -> tuple[float, float, float] | None:
    """The 95% interval of a value and its p against 0, from its values without each unit; None where one of these is
    undefined, which means that a single unit decides."""
    n = len(without_G)
    if not np.isfinite(without_G).all():
        return None
    error = math.sqrt((n - 1) ** 2 / n * float(without_G.var(ddof=1)))
    p = two_sided_p(value / error, df) if error else 0.0
    return value - t_critical(df) * error, value + t_critical(df) * error, max(p, 2 / math.factorial(n))


def rank_correlations(values: Sequence[np.ndarray], stratum_N: np.ndarray, weight_BN: np.ndarray) -> np.ndarray:
    """Spearman's rho of the first two variables within strata, partial given the others, one per row of weights. A
    given variable that does not vary is ignored; NaN where undefined."""
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
    partial_B = np.full(len(weight_BN), np.nan)
    inverse_BVV = np.linalg.inv(rho_BVV[known_B])
    partial_B[known_B] = -inverse_BVV[:, 0, 1] / np.sqrt(inverse_BVV[:, 0, 0] * inverse_BVV[:, 1, 1])
    return partial_B


def midranks(value_N: np.ndarray, stratum_N: np.ndarray, weight_BN: np.ndarray) -> np.ndarray:
    """The share of a run's stratum, by weight, that lies below it, ties counted half, minus 1/2 (the mean)."""
    share_BN = np.full(weight_BN.shape, 0.5)
    for stratum in np.unique(stratum_N):
        at_N = stratum_N == stratum
        value, weight_BM = value_N[at_N], weight_BN[:, at_N]
        below_MM = (value[:, None] < value) + (value[:, None] == value) / 2
        total_B1 = weight_BM.sum(axis=1, keepdims=True)
        share_BN[:, at_N] = np.where(total_B1 > 0, weight_BM @ below_MM / np.maximum(total_B1, 1e-300), 0.5)
    return share_BN - 0.5
