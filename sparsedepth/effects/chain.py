"""Do sparsity, residual variance, effectiveness and loss move together? The evidence for every link of this chain.

    rho = Pearson(rank x, rank y)    (Spearman 1904; ties share their mean rank)
    rho given z = -P_xy / sqrt(P_xx P_yy),   P the inverse of the rank correlations of x, y and all of z    (Yule 1907)

'pooled' ranks all runs together, so that depth drives it; 'within depth' ranks them within each depth, as a share of
its runs. Replicates and depths are no independent observations: the unit is the setting (`effects.cells`), with all
its runs. The interval is the jackknife's over G settings, on Fisher's scale, each left out in turn (Tukey 1958):

    z = artanh rho          se^2 = (G - 1) / G sum_g (z_without_g - mean)^2          tanh(z +- t(G - 2, 0.975) se)

    associated  rho within depth excludes 0, and its p, adjusted over the links, is at most ALPHA
    predicts    associated, and held-out depths are predicted better than by their own mean:
                skill = 1 - sum_depths SSE(y - b_without_this_depth x) / sum_depths SST(y),  interval > 0,
                x and y the ranks within depth, b the least-squares slope over the other depths
    causes      associated, and an intervention at some depth moved the cause, left its controls unchanged (within
                EQUIVALENT of the baseline, interval included), and moved the effect: rows of the frame `effects`, the
                effect's p corrected over depths too

Association is not causation: 2603.15389 itself shows a case where variance falls and usefulness falls with it.
Interventions are fields that set one quantity directly: LayerNorm scaling damps residual variance without any
sparsity. One that acts on the effect by another path, such as its tuned lr, looks the same (the exclusion restriction
of instrumental variables): only its controls are checked."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.sparse import csr_array

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import Cells
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.frame import as_records, compared, setting_effects
from sparsedepth.effects.verdict import adjusted
from sparsedepth.once import once
from sparsedepth.quantities import OF_STAGE
from sparsedepth.quantities.levels import ALPHA
from sparsedepth.quantities.quantity import Stage
from sparsedepth.store import degeneracy
from sparsedepth.store.comparable_loss import loss_of, with_loss
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.small_sample import t_critical, two_sided_p
from sparsedepth.words.degeneracy import caution, grounds, in_some_runs

Scope = Literal["pooled", "within depth"]
STAGES: tuple[Stage, ...] = ("sparsity", "variance", "effectiveness", "loss")
LINKS: tuple[tuple[str, str], ...] = tuple(
    link for cause, effect in pairwise(STAGES) for link in product(OF_STAGE[cause], OF_STAGE[effect])
)
"""val_loss: replaced by the loss that compares the runs (`links_of`)."""
INTERVENTIONS = {name: role for name, role in roles(RunConfig).items() if role.directly_sets}
"""Fields that set one quantity of the chain directly; without controls (`must_stand_still`) they are no evidence."""
MIN_UNITS = 6
"""Fewer settings get no interval."""
EQUIVALENT = 0.1
"""A change within this share of the baseline, interval included, counts as none."""


@dataclass(kw_only=True)
class Link:
    """A rank correlation over finished runs."""

    cause: str
    effect: str
    scope: str
    """A Scope, or one with ', given QUANTITY'."""
    rho: float | None = None
    """None where it is undefined: fewer than three runs, or one of the two does not vary."""
    lo: float | None = None
    hi: float | None = None
    p: float | None = None
    p_adjusted: float | None = None
    """Over the links of one scope; None for a link alone."""
    n_runs: int
    n_settings: int
    n_missing: int
    """Finished runs left out because one of the two was not measured."""
    n_diverged: int

    @property
    def is_associated(self) -> bool:
        p = self.p if self.p_adjusted is None else self.p_adjusted
        return p is not None and p <= ALPHA and self.lo is not None and self.hi is not None and self.lo * self.hi > 0


class Skill(NamedTuple):
    """How well held-out depths are predicted: 1 is perfect, 0 no better than their mean."""

    value: float | None
    lo: float | None
    hi: float | None
    depths: tuple[int, ...]


class Intervention(NamedTuple):
    """One setting of an intervention at one depth: its effects on the cause, on the controls, and on the effect."""

    moved: Effect
    controls: tuple[Effect | None, ...]
    """None where a control was not measured."""
    effect: Effect

    @property
    def is_alone(self) -> bool:
        """Whether the cause moved and no control did."""
        return self.moved.is_shown and all(map(is_unchanged, self.controls))

    def confirms(self, n_depths: int = 1) -> bool:
        """Whether the effect moved with the cause alone, at one of so many depths."""
        p = self.effect.p_adjusted
        return self.is_alone and self.effect.is_shown and p is not None and p * n_depths <= ALPHA


class LinkEvidence(NamedTuple):
    links: tuple[Link, ...]
    """Pooled; within depth; within depth given lr, and given the loss unless that is the effect."""
    skill: Skill
    interventions: tuple[Intervention, ...]

    @property
    def within(self) -> Link:
        return self.links[1]

    @property
    def verdict(self) -> Literal["causes", "predicts", "associated", "not distinguishable"]:
        """The strongest that the evidence supports."""
        if not self.within.is_associated:
            return "not distinguishable"
        depths = {each.effect.n_layers for each in self.interventions}
        if any(each.confirms(len(depths)) for each in self.interventions):
            return "causes"
        return "predicts" if self.skill.lo is not None and self.skill.lo > 0 else "associated"


def chain_evidence(cells: Cells) -> list[LinkEvidence]:
    """The evidence for every measured link of the chain, from the results; p-values are adjusted over the links of a
    scope."""
    results = compared(cells).assign(unit=cells.rows["setting"])
    pairs = links_of(results)
    finished = results[results["outcome"] == "ok"]
    known = [[name] for name in ("lr", loss_of(results)) if finished[name].nunique() > 1]
    scopes: list[tuple[Scope, list[str]]] = [("pooled", []), *(("within depth", given) for given in ([], *known))]
    links = []
    for scope, given in scopes:
        of_scope = {pair: link(results, *pair, scope, given) for pair in pairs if pair[1] not in given}
        tested = [each for each in of_scope.values() if each.p is not None]
        p_J = adjusted(np.array([each.p for each in tested]), np.zeros(len(tested)))
        for each, p in zip(tested, p_J.tolist(), strict=True):
            each.p_adjusted = p
        links.append(of_scope)
    return [
        LinkEvidence(
            links=tuple(of_scope[pair] for of_scope in links if pair in of_scope),
            skill=skill(results, *pair),
            interventions=tuple(interventions(cells, *pair)),
        )
        for pair in pairs
    ]


def links_of(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """The links with both sides measured in these runs; a degenerate score is replaced by its sound form, or left out
    (`store.degeneracy`)."""
    measured = {name for name in runs.columns if runs[name].notna().any()}
    scores = [score for score in OF_STAGE["effectiveness"] if score in measured]
    forms = {score: degeneracy.sound_form(score, degeneracy.score_rows(runs, score)) for score in scores}
    named = (with_loss(loss_of(runs), pair) for pair in LINKS)
    sound = dict.fromkeys((forms.get(cause, cause), forms.get(effect, effect)) for cause, effect in named)
    return [(a, b) for a, b in sound if a is not None and b is not None and {a, b} <= measured]


def cautions(runs: pd.DataFrame) -> list[str]:
    """A line for each degenerate score of the chain, and one for all scores that are degenerate in some runs only."""
    found: list[str] = []
    in_some: dict[str, list[str]] = {}
    for score in OF_STAGE["effectiveness"]:
        rows = degeneracy.score_rows(runs, score) if score in runs.columns else []
        judged = degeneracy.degeneracy(score, rows)
        if (why := grounds(judged)) and not judged.is_degenerate:
            in_some.setdefault(why, []).append(score)
        elif line := caution(degeneracy.usable_form(score, rows)):
            found.append(line)
    return [*found, in_some_runs(in_some)] if in_some else found


class Chain(NamedTuple):
    """All links, as `effects --part chain` prints them."""

    links: Sequence[LinkEvidence]
    table: QueryResult
    """A row for each link."""
    cautions: Sequence[str]
    min_settings: int = MIN_UNITS


def chain_of(cells: Cells) -> Chain:
    links = chain_evidence(cells)
    names = ("cause", "effect", "rho", "lo", "hi", "skill", "intervention", "verdict")
    return Chain(links, QueryResult(columns=names, rows=tuple(map(_row, links))), cautions(compared(cells)))


def _row(evidence: LinkEvidence) -> tuple[str | float | None, ...]:
    within, verdict, tried = evidence.within, evidence.verdict, evidence.interventions
    shown = verdict if verdict != "not distinguishable" else "too few" if within.lo is None else "-"
    intervention = "confounded" if tried else "none"
    if any(each.is_alone for each in tried):
        intervention = "confirms" if verdict == "causes" else "no effect"
    return within.cause, within.effect, within.rho, within.lo, within.hi, evidence.skill.value, intervention, shown


def chain_table(chain: Sequence[LinkEvidence]) -> QueryResult:
    """One row per link and scope, and one for the skill; `word` is the link's verdict."""
    columns = ("cause", "effect", "word", "scope", "rho", "lo", "hi", "p_adjusted", "runs", "settings")
    columns += ("missing", "diverged")
    rows = []
    for evidence in chain:
        head, skill = (evidence.within.cause, evidence.within.effect, evidence.verdict), evidence.skill
        scopes = [(link.scope, link.rho, link.lo, link.hi, link.p_adjusted, link) for link in evidence.links]
        for *numbers, link in [*scopes, ("held-out skill", skill.value, skill.lo, skill.hi, None, evidence.within)]:
            rows.append((*head, *numbers, link.n_runs, link.n_settings, link.n_missing, link.n_diverged))
    return QueryResult(columns=columns, rows=tuple(rows))


def _usable(runs: pd.DataFrame, names: Sequence[str]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Of the finished runs that have all these numbers: these, their n_layers, and the number of their unit."""
    columns = runs[[*dict.fromkeys(["n_layers", "unit", *names])]]  # of 150 that a copy would have
    usable = columns[runs["outcome"] == "ok"].dropna(subset=[*names, "unit"])
    values = [usable[name].to_numpy(dtype=float) for name in names]
    return values, usable["n_layers"].to_numpy(), pd.factorize(usable["unit"])[0]


# Association


def link(runs: pd.DataFrame, cause: str, effect: str, scope: Scope, given: Sequence[str] = ()) -> Link:
    """One link over the finished runs that have all numbers and a `unit`, their setting; a partial correlation with
    `given`."""
    names = [cause, effect, *given]
    values, depth_N, unit_N = _usable(runs, names)
    n_runs, n_units = len(unit_N), len({*unit_N})
    found = Link(
        cause=cause,
        effect=effect,
        scope=f"{scope}, given {' and '.join(given)}" if given else scope,
        n_runs=n_runs,
        n_settings=n_units,
        n_missing=int(runs.loc[runs["outcome"] == "ok", names].isna().any(axis=1).sum()),
        n_diverged=int((runs["outcome"] == "diverged").sum()),
    )
    stratum_N = depth_N if scope == "within depth" else np.zeros(n_runs)
    rho = rank_correlations(values, stratum_N, np.ones((1, n_runs)))[0] if n_runs >= 3 else math.nan
    found.rho = rho if math.isfinite(rho) else None
    if found.rho is not None and n_units >= MIN_UNITS:
        without_G = rank_correlations(values, stratum_N, leave_one_out(unit_N))
        z, z_G = (np.arctanh(np.clip(each, -0.999, 0.999)) for each in (rho, without_G))  # of a rho of 1 it is infinite
        if interval := jackknife(float(z), z_G, n_units - len(values)):
            found.lo, found.hi, found.p = math.tanh(interval[0]), math.tanh(interval[1]), interval[2]
    return found


def leave_one_out(unit_N: np.ndarray) -> np.ndarray:
    """Weights of the runs, (G, N): each row leaves a unit out."""
    return (unit_N != np.arange(unit_N.max() + 1)[:, None]).astype(float)


def jackknife(value: float, without_G: np.ndarray, df: int) -> tuple[float, float, float] | None:
    """The 95% interval of a value and its p against 0, from its values without each unit; None where one of these is
    undefined, which means that a single unit decides."""
    n = len(without_G)
    if not np.isfinite(without_G).all():
        return None
    error = math.sqrt((n - 1) ** 2 / n * without_G.var(ddof=1))
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
        below_BM = below_MM.sum(axis=0) - csr_array(1 - weight_BM) @ below_MM  # few weights of a jackknife are not 1
        share_BN[:, at_N] = np.where(total_B1 > 0, below_BM / np.maximum(total_B1, 1e-300), 0.5)
    return share_BN - 0.5


# Prediction and intervention


def skill(results: pd.DataFrame, cause: str, effect: str) -> Skill:
    """How well each depth is predicted from the others; None with fewer than two depths; no interval with fewer than
    MIN_UNITS settings."""
    (x_N, y_N), depth_N, unit_N = _usable(results, [cause, effect])
    depths = tuple(map(int, np.unique(depth_N)))
    if len(depths) < 2:
        return Skill(None, None, None, depths)
    n_units = len({*unit_N})
    value = _skill(x_N, y_N, depth_N, np.ones((1, len(x_N))))[0]
    without_G = _skill(x_N, y_N, depth_N, leave_one_out(unit_N))
    interval = jackknife(value, without_G, n_units - 2) if n_units >= MIN_UNITS else None
    return Skill(value if np.isfinite(value) else None, *(interval[:2] if interval else (None, None)), depths)


def _skill(x_N: np.ndarray, y_N: np.ndarray, depth_N: np.ndarray, weight_BN: np.ndarray) -> np.ndarray:
    x_BN, y_BN = (midranks(values_N, depth_N, weight_BN) for values_N in (x_N, y_N))
    at_ND = depth_N[:, None] == np.unique(depth_N)
    xx_BD, xy_BD, yy_BD = (
        (weight_BN * a_BN * b_BN) @ at_ND for a_BN, b_BN in ((x_BN, x_BN), (x_BN, y_BN), (y_BN, y_BN))
    )
    others_xx_BD = xx_BD.sum(axis=1, keepdims=True) - xx_BD
    others_xy_BD = xy_BD.sum(axis=1, keepdims=True) - xy_BD
    b_BD = np.divide(others_xy_BD, others_xx_BD, out=np.zeros_like(xx_BD), where=others_xx_BD > 1e-12)
    error_B = (yy_BD - 2 * b_BD * xy_BD + b_BD**2 * xx_BD).sum(axis=1)
    total_B = yy_BD.sum(axis=1)
    return 1 - np.divide(error_B, total_B, out=np.full_like(total_B, np.nan), where=total_B > 1e-12)


def interventions(cells: Cells, cause: str, effect: str) -> Iterator[Intervention]:
    """Every setting of an intervention on this cause, nothing else changed, by depth."""
    for field, role in INTERVENTIONS.items():
        alone = [setting for setting, changes in cells.changes.items() if {*dict(changes)} == {field}]
        if role.directly_sets != cause or not role.must_stand_still or not alone:
            continue
        of_effect = _effects_on(cells, effect)
        of_controls = [_effects_on(cells, name) for name in role.must_stand_still]
        for key, moved in _effects_on(cells, cause).items():
            if key[0] in alone and moved.estimate is not None and key in of_effect:
                yield Intervention(moved, tuple(control.get(key) for control in of_controls), of_effect[key])


@once  # several links have an outcome as cause, effect or control
def _effects_on(cells: Cells, outcome: str) -> dict[tuple[str, int | None], Effect]:
    """(setting, depth) -> its effect; empty for an outcome that was not measured."""
    if cells.runs[outcome].isna().all():
        return {}
    effects = as_records(setting_effects(cells.of_outcome(outcome)))
    return {(effect.setting, effect.n_layers): effect for effect in effects}


def is_unchanged(effect: Effect | None) -> bool:
    """Whether the interval lies within EQUIVALENT of the baseline's mean on either side."""
    if effect is None or effect.lo is None or effect.hi is None or effect.baseline_value is None:
        return False
    margin = np.log1p(EQUIVALENT) if effect.unit == "ln ratio" else EQUIVALENT * abs(effect.baseline_value)
    return bool(max(-effect.lo, effect.hi) <= margin)
