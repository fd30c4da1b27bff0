"""What must be shown before a link of the chain is said to be more than a coincidence: the one place with the rules.
A recipe earns the same words by other rules, from its held-out tests (`sparsedepth.recipe.card.earned_word`).

    associated  the rank correlation within depth has a 95% interval that excludes 0, and so has it among all links, by
                Holm's correction (see `chain`)
    predicts    associated, and depths that were held out are predicted better than by their own mean:
                skill = 1 - sum_depths SSE(y - b_without_this_depth x) / sum_depths SST(y),  interval > 0,
                x and y the ranks within depth, b the least-squares slope over the other depths; the interval is the
                jackknife's over combinations of settings
    causes      associated, and an intervention moved the cause, did not move what else could be behind it (by more than
                EQUIVALENT of the baseline, interval included), and moved the effect: two verdicts of
                `all_effects.effects_over_depths`, over all depths and corrected over all settings

The interventions are fields that set one quantity directly: LayerNorm scaling damps residual variance without any
sparsity; a random mask makes weights sparse without training having done so. 'causes' says that the link acts, under
that intervention, at the models that were run; not that it is the way by which every knob acts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.chain import (
    MIN_UNITS,
    Link,
    jackknife,
    leave_one_out,
    link,
    midranks,
    units_of,
)
from sparsedepth.effects.chain_runs import ChainRuns, link_between, link_within
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.holm import holm
from sparsedepth.store.tuning_roles import result_rows

LinkWord = Literal["causes", "predicts", "associated", "not distinguishable"]

EQUIVALENT = 0.1
"""A quantity that moved by less than this share of its baseline, interval included, stood still."""


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A field that sets one quantity of the chain directly, without the others."""

    field: str
    moves: str
    leaves: tuple[str, ...] = ()
    """What could act in its place, and must stand still; without any, it is no evidence for a link by itself."""


INTERVENTIONS = tuple(
    Intervention(field=name, moves=role.directly_sets, leaves=role.must_stand_still)
    for name, role in roles(RunConfig).items()
    if role.directly_sets
)


@dataclass(frozen=True, kw_only=True)
class InterventionEffect:
    """One setting of an intervention."""

    intervention: Intervention
    moved: Contrast
    """The cause."""
    left: tuple[Contrast, ...]
    """What should stand still, as far as it was measured."""
    effect: Contrast

    @property
    def is_alone(self) -> bool:
        """Whether the cause moved, and all else that was to stand still did."""
        still = [stood_still(contrast) for contrast in self.left]
        all_measured = len(still) == len(self.intervention.leaves)
        return self.moved.verdict != "not distinguishable" and all_measured and all(still)

    @property
    def shows(self) -> bool:
        return self.is_alone and self.effect.verdict != "not distinguishable"


def stood_still(contrast: Contrast) -> bool:
    """Whether the interval lies within EQUIVALENT of the baseline's mean on either side."""
    effect, baseline = contrast.effect, contrast.baseline_mean
    if effect.lo is None or effect.hi is None or baseline is None:
        return False
    margin = np.log1p(EQUIVALENT) if contrast.unit == "ln ratio" else EQUIVALENT * abs(baseline)
    return bool(max(-effect.lo, effect.hi) <= margin)


@dataclass(frozen=True, kw_only=True)
class Skill:
    """How well depths that were held out are predicted: 1 is perfect, 0 no better than their mean."""

    value: float | None
    lo: float | None
    hi: float | None
    depths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LinkEvidence:
    """All there is on one link."""

    cause: str
    effect: str
    word: LinkWord
    links: tuple[Link, ...]
    """Pooled, within depth, that given lr and tuning (where they differ), that given the loss (unless the loss is part
    of it), within each knob, between knobs."""
    skill: Skill
    interventions: tuple[InterventionEffect, ...]

    @property
    def within(self) -> Link:
        return within_depth(self.links)


def within_depth(links: Sequence[Link]) -> Link:
    return next(link for link in links if link.scope == "within depth")


def word_of(links: Sequence[Link], skill: Skill, interventions: Sequence[InterventionEffect]) -> LinkWord:
    """The word that the evidence on a link earns."""
    if within_depth(links).verdict == "not distinguishable":
        return "not distinguishable"
    if any(tried.shows for tried in interventions):
        return "causes"
    return "predicts" if skill.lo is not None and skill.lo > 0 else "associated"


def weigh(runs: pd.DataFrame) -> list[LinkEvidence]:
    """The evidence on every link of the chain that was measured, from the runs that stand for a configuration; p-values
    are Holm's over all links of a scope."""
    known = ChainRuns(runs)
    chain = [weigh_link(known, cause, effect) for cause, effect in known.links]
    p_at: dict[str, dict[tuple[int, int], float]] = {}
    for i, each in enumerate(chain):
        for k, one in enumerate(each.links):
            if one.p is not None:
                p_at.setdefault(one.scope, {})[i, k] = one.p
    p_holm_at: dict[tuple[int, int], float] = {}
    for p_values in p_at.values():
        p_holm_at |= dict(zip(p_values, holm(list(p_values.values())), strict=True))
    corrected = []
    for i, each in enumerate(chain):
        links = tuple(replace(one, p_holm=p_holm_at.get((i, k), one.p_holm)) for k, one in enumerate(each.links))
        corrected.append(replace(each, links=links, word=word_of(links, each.skill, each.interventions)))
    return corrected


def weigh_link(known: ChainRuns, cause: str, effect: str) -> LinkEvidence:
    """The evidence on one link, as if it were the only one."""
    runs, tuning = known.given_of_tuning
    links = [link(runs, cause, effect, "pooled"), link(runs, cause, effect, "within depth")]
    given = [tuning, [known.loss] if known.loss not in (cause, effect) else []]
    links += [link(runs, cause, effect, "within depth", names) for names in given if names]
    links += [link_within(known, knob, cause, effect) for knob in known.pure_knobs]
    links.append(link_between(known, cause, effect))
    predicted, tried = skill(runs, cause, effect), interventions(known, cause, effect)
    return LinkEvidence(
        cause=cause,
        effect=effect,
        word=word_of(links, predicted, tried),
        links=tuple(links),
        skill=predicted,
        interventions=tuple(tried),
    )


def interventions(known: ChainRuns, cause: str, effect: str) -> list[InterventionEffect]:
    """Every setting of every intervention on this cause that was run beside its baseline, nothing else changed."""
    tried = []
    for intervention in INTERVENTIONS:
        if intervention.moves != cause or not intervention.leaves:
            continue
        names = (cause, effect, *intervention.leaves)
        pure = (knob for knob in known.pure_knobs if intervention.field in knob.fields)
        for setting in (setting for knob in pure for setting in list(knob.settings)[1:]):
            moved, moving, *left = (known.effects(name).get(setting) for name in names)
            if moved is not None and moving is not None:
                still = tuple(contrast for contrast in left if contrast is not None)
                tried.append(InterventionEffect(intervention=intervention, moved=moved, left=still, effect=moving))
    return tried


def skill(runs: pd.DataFrame, cause: str, effect: str) -> Skill:
    """How well each depth is predicted by the others; None with fewer than two depths; no interval with fewer than
    MIN_UNITS combinations of settings."""
    known = result_rows(runs)
    usable = known[known["outcome"] == "ok"].dropna(subset=[cause, effect])
    depths = tuple(sorted(set(map(int, usable["n_layers"]))))
    unit_N, units = pd.factorize(units_of(known)[usable.index])
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
