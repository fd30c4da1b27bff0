"""The evidence for each link of the chain, and the verdict it supports. (For the evidence level of a recipe, from its
held-out tests, see `sparsedepth.recipe.card.earned_word`.)

    associated  the rank correlation within depth has a 95% interval that excludes 0 and is significant after Holm's
                correction over all links (see `chain`)
    predicts    associated, and held-out depths are predicted better than by their own mean:
                skill = 1 - sum_depths SSE(y - b_without_this_depth x) / sum_depths SST(y),  interval > 0,
                x and y the ranks within depth, b the least-squares slope over the other depths; the interval is the
                jackknife's over combinations of settings
    causes      associated, and an intervention moved the cause, left its controls unchanged (within EQUIVALENT of the
                baseline, interval included), and moved the effect: two verdicts of `all_effects.effects_over_depths`,
                over all depths and corrected over all settings

Interventions are fields that set one quantity directly: LayerNorm scaling damps residual variance without any
sparsity; a random mask makes weights sparse without any effect of training. 'causes' means that the link holds under
that intervention in these models, not that every knob acts through it. An intervention that acts on the effect by
another path, such as its tuned lr, looks the same (the exclusion restriction of instrumental variables): only
`controls` are checked.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.all_effects import effects_over_depths, relevant_columns
from sparsedepth.effects.chain import (
    LINKS,
    MIN_UNITS,
    Link,
    given_of_tuning,
    jackknife,
    leave_one_out,
    link,
    link_of,
    links_of,
    midranks,
    units_of,
    usable_runs,
)
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.intervals import holm
from sparsedepth.effects.knobs import Knob, design_of, find_knobs, keys, labels
from sparsedepth.effects.pairs import pairs
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.tuning_roles import result_rows

LinkVerdict = Literal["causes", "predicts", "associated", "not distinguishable"]

EQUIVALENT = 0.1
"""A change within this share of the baseline, interval included, counts as none."""


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A field that sets one quantity of the chain directly. (An alias is the name of a field in cards.)"""

    field: str
    moves: str
    controls: Annotated[tuple[str, ...], Field(alias="leaves")] = ()
    """Other possible causes, which must not change; without any, the intervention is no evidence for a link."""


INTERVENTIONS = tuple(
    Intervention(field=name, moves=role.directly_sets, controls=role.must_stand_still)
    for name, role in roles(RunConfig).items()
    if role.directly_sets
)


@dataclass(frozen=True, kw_only=True)
class InterventionEffect:
    """One setting of an intervention."""

    intervention: Intervention
    moved: Contrast
    """The effect on the cause."""
    controls: Annotated[tuple[Contrast, ...], Field(alias="left")]
    """The effects on the controls that were measured."""
    effect: Contrast

    @property
    def is_alone(self) -> bool:
        """Whether the cause moved and no control did."""
        all_measured = len(self.controls) == len(self.intervention.controls)
        return self.moved.verdict != "not distinguishable" and all_measured and all(map(is_unchanged, self.controls))

    @property
    def confirms(self) -> bool:
        """Whether the effect moved with the cause alone."""
        return self.is_alone and self.effect.verdict != "not distinguishable"


def is_unchanged(contrast: Contrast) -> bool:
    """Whether the interval lies within EQUIVALENT of the baseline's mean on either side."""
    effect, baseline = contrast.effect, contrast.baseline_mean
    if effect.lo is None or effect.hi is None or baseline is None:
        return False
    margin = np.log1p(EQUIVALENT) if contrast.unit == "ln ratio" else EQUIVALENT * abs(baseline)
    return bool(max(-effect.lo, effect.hi) <= margin)


@dataclass(frozen=True, kw_only=True)
class Skill:
    """How well held-out depths are predicted: 1 is perfect, 0 no better than their mean."""

    value: float | None
    lo: float | None
    hi: float | None
    depths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LinkEvidence:
    """All evidence for one link."""

    cause: str
    effect: str
    verdict: Annotated[LinkVerdict, Field(alias="word")]
    links: tuple[Link, ...]
    """Scopes: pooled; within depth; within depth given lr and tuning, where they vary; within depth given the loss,
    unless it is one side of the link; within each knob; between knobs."""
    skill: Skill
    interventions: tuple[InterventionEffect, ...]

    @property
    def within(self) -> Link:
        return within_depth(self.links)


def within_depth(links: Sequence[Link]) -> Link:
    return next(link for link in links if link.scope == "within depth")


def link_verdict(links: Sequence[Link], skill: Skill, interventions: Sequence[InterventionEffect]) -> LinkVerdict:
    """The strongest verdict that the evidence for a link supports."""
    if within_depth(links).verdict == "not distinguishable":
        return "not distinguishable"
    if any(intervention.confirms for intervention in interventions):
        return "causes"
    return "predicts" if skill.lo is not None and skill.lo > 0 else "associated"


class ChainRuns:
    """The runs of a chain, and what all its links need, computed once."""

    def __init__(self, runs: pd.DataFrame):
        runs = result_rows(runs)
        self.links, self.loss = links_of(runs), loss_of(runs)
        named = {name for pair in (*LINKS, *self.links) for name in pair}
        named |= {name for role in roles(RunConfig).values() for name in role.must_stand_still}
        runs = relevant_columns(runs, *sorted(named), self.loss, "lr")
        self.runs = runs.assign(unit=units_of(runs))
        self.design, self.knobs = design_of(self.runs), find_knobs(self.runs)
        self.pure_knobs = [knob for knob in self.knobs if knob.is_pure]
        self.given_of_tuning = given_of_tuning(self.runs)
        self.effects, self.changes = cache(self._effects), cache(self._changes)

    def _effects(self, outcome: str) -> dict[str, Contrast]:
        """Setting -> its effect on an outcome over all depths."""
        contrasts = effects_over_depths(self.runs, self.knobs, outcome, self.design)
        return {contrast.setting: contrast for contrast in contrasts}

    def _changes(self, outcome: str) -> list[pd.DataFrame]:
        """The `pairs` of runs of each pure knob, in the same order for every outcome."""
        return [pairs(self.runs, knob, outcome, design=self.design) for knob in self.pure_knobs]


def chain_evidence(runs: pd.DataFrame) -> list[LinkEvidence]:
    """The evidence for every measured link of the chain, from the runs that stand for a configuration; p-values are
    Holm's over all links of a scope."""
    chain_runs = ChainRuns(runs)
    chain = [link_evidence(chain_runs, cause, effect) for cause, effect in chain_runs.links]
    by_scope = defaultdict[str, dict[tuple[str, str], float | None]](dict)
    for scope in (scope for evidence in chain for scope in evidence.links):
        by_scope[scope.scope][scope.cause, scope.effect] = scope.p
    p_holm = {scope: dict(zip(p, holm([*p.values()]), strict=True)) for scope, p in by_scope.items()}
    corrected = []
    for evidence in chain:
        links = tuple(replace(scope, p_holm=p_holm[scope.scope][scope.cause, scope.effect]) for scope in evidence.links)
        verdict = link_verdict(links, evidence.skill, evidence.interventions)
        corrected.append(replace(evidence, links=links, verdict=verdict))
    return corrected


def link_evidence(chain_runs: ChainRuns, cause: str, effect: str) -> LinkEvidence:
    """The evidence for one link, without correction for the others."""
    runs, tuning = chain_runs.given_of_tuning
    links = [link(runs, cause, effect, "pooled"), link(runs, cause, effect, "within depth")]
    given = [tuning, [chain_runs.loss] if chain_runs.loss not in (cause, effect) else []]
    links += [link(runs, cause, effect, "within depth", names) for names in given if names]
    links += [link_within(chain_runs, knob, cause, effect) for knob in chain_runs.pure_knobs]
    links.append(link_between(chain_runs, cause, effect))
    predicted, tested = skill(runs, cause, effect), interventions(chain_runs, cause, effect)
    return LinkEvidence(
        cause=cause,
        effect=effect,
        verdict=link_verdict(links, predicted, tested),
        links=tuple(links),
        skill=predicted,
        interventions=tuple(tested),
    )


def link_within(chain: ChainRuns, knob: Knob, cause: str, effect: str) -> Link:
    """One link over runs that differ in one knob and the seed alone; contexts with one setting do not count."""
    context = keys(chain.runs, [name for name in chain.design.chosen if name not in {*knob.fields, "seed"}])
    usable = usable_runs(chain.runs, [cause, effect])
    usable = usable[usable.groupby(context[usable.index])["cell_id"].transform("nunique") > 1]
    stratum_N, settings = pd.factorize(context[usable.index])[0], labels(chain.runs, knob)[usable.index]
    return replace(
        link_of(chain.runs, usable, [cause, effect], f"within {knob.name}", stratum_N, settings), knob=knob.name
    )


def link_between(chain: ChainRuns, cause: str, effect: str) -> Link:
    """One link over settings of all pure knobs: mean paired change in the cause against that in the effect."""
    points, used = list[tuple[str, int, float, float]](), set[str]()
    for x, y in zip(chain.changes(cause), chain.changes(effect), strict=True):
        both = x.assign(other=y["difference"]).dropna(subset=["difference", "other"])
        changes = both.groupby(["setting", "n_layers"])[["difference", "other"]].mean().reset_index()
        points += list(changes.itertuples(index=False, name=None))
        used |= {*both["run_id"], *both["run_id_baseline"]}
    frame = pd.DataFrame(points, columns=["unit", "n_layers", cause, effect]).astype({cause: float, effect: float})
    frame = frame.assign(outcome="ok")
    between = link_of(frame, frame, [cause, effect], "between knobs", frame["n_layers"].to_numpy(), frame["unit"])
    return replace(between, n_runs=len(used))


def interventions(chain_runs: ChainRuns, cause: str, effect: str) -> list[InterventionEffect]:
    """Every setting of an intervention on this cause that has pairs with its baseline, nothing else changed."""
    tested = []
    for intervention in INTERVENTIONS:
        if intervention.moves != cause or not intervention.controls:
            continue
        names = (cause, effect, *intervention.controls)
        pure = (knob for knob in chain_runs.pure_knobs if intervention.field in knob.fields)
        for setting in (setting for knob in pure for setting in list(knob.settings)[1:]):
            on_cause, on_effect, *on_controls = (chain_runs.effects(name).get(setting) for name in names)
            if on_cause is not None and on_effect is not None:
                controls = tuple(contrast for contrast in on_controls if contrast is not None)
                tested.append(
                    InterventionEffect(intervention=intervention, moved=on_cause, controls=controls, effect=on_effect)
                )
    return tested


def skill(runs: pd.DataFrame, cause: str, effect: str) -> Skill:
    """How well each depth is predicted from the others; None with fewer than two depths; no interval with fewer than
    MIN_UNITS combinations of settings."""
    results = result_rows(runs)
    usable = usable_runs(results, [cause, effect])
    depths = tuple(sorted(set(map(int, usable["n_layers"]))))
    unit_N, units = pd.factorize(units_of(results)[usable.index])
    if len(depths) < 2:
        return Skill(value=None, lo=None, hi=None, depths=depths)
    depth_N = usable["n_layers"].to_numpy()
    x_N, y_N = (usable[name].to_numpy(dtype=float) for name in (cause, effect))
    value = float(_skill(x_N, y_N, depth_N, np.ones((1, len(x_N))))[0])
    without_G = _skill(x_N, y_N, depth_N, leave_one_out(len(units))[:, unit_N])
    interval = jackknife(value, without_G, len(units) - 2) if len(units) >= MIN_UNITS else None
    lo, hi = interval[:2] if interval else (None, None)
    return Skill(value=value if np.isfinite(value) else None, lo=lo, hi=hi, depths=depths)


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
