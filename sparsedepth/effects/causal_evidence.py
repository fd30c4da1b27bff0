"""The evidence for each link of the chain, and the verdict it supports.

    associated  the rank correlation within depth excludes 0 (see `chain`)
    predicts    associated, and held-out depths are predicted better than by their own mean:
                skill = 1 - sum_depths SSE(y - b_without_this_depth x) / sum_depths SST(y),  interval > 0,
                x and y the ranks within depth, b the least-squares slope over the other depths
    causes      associated, and an intervention at some depth moved the cause, left its controls unchanged (within
                EQUIVALENT of the baseline, interval included), and moved the effect: rows of the frame `effects`, the
                effect's p corrected over depths too

Interventions are fields that set one quantity directly: LayerNorm scaling damps residual variance without any
sparsity. An intervention that acts on the effect by another path, such as its tuned lr, looks the same (the exclusion
restriction of instrumental variables): only `controls` are checked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.chain import (
    MIN_UNITS,
    Link,
    jackknife,
    leave_one_out,
    link,
    links_of,
    midranks,
    units_of,
    usable_runs,
)
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.frame import setting_effects
from sparsedepth.effects.verdict import ALPHA, adjusted
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.tuning_roles import result_rows

LinkVerdict = Literal["causes", "predicts", "associated", "not distinguishable"]

EQUIVALENT = 0.1
"""A change within this share of the baseline, interval included, counts as none."""
SHOWN = ("lower", "higher")


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A field that sets one quantity of the chain directly."""

    field: str
    moves: str
    controls: tuple[str, ...] = ()
    """Other possible causes, which must not change; without any, the intervention is no evidence for a link."""


INTERVENTIONS = tuple(
    Intervention(field=name, moves=role.directly_sets, controls=role.must_stand_still)
    for name, role in roles(RunConfig).items()
    if role.directly_sets
)


@dataclass(frozen=True, kw_only=True)
class InterventionEffect:
    """One setting of an intervention at one depth: rows of the frame `effects`."""

    intervention: Intervention
    moved: Effect
    """The effect on the cause."""
    controls: tuple[Effect, ...]
    """The effects on the controls that were measured."""
    effect: Effect

    @property
    def is_alone(self) -> bool:
        """Whether the cause moved and no control did."""
        all_measured = len(self.controls) == len(self.intervention.controls)
        return self.moved.verdict in SHOWN and all_measured and all(map(is_unchanged, self.controls))

    def confirms(self, n_depths: int = 1) -> bool:
        """Whether the effect moved with the cause alone, at one of so many depths."""
        p = self.effect.p_adjusted
        return self.is_alone and self.effect.verdict in SHOWN and p is not None and p * n_depths <= ALPHA


def is_unchanged(effect: Effect) -> bool:
    """Whether the interval lies within EQUIVALENT of the baseline's mean on either side."""
    if effect.lo is None or effect.hi is None or effect.baseline_value is None:
        return False
    margin = np.log1p(EQUIVALENT) if effect.unit == "ln ratio" else EQUIVALENT * abs(effect.baseline_value)
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
    verdict: LinkVerdict
    links: tuple[Link, ...]
    """Scopes: pooled; within depth; within depth given lr, and given the loss unless that is the effect."""
    skill: Skill
    interventions: tuple[InterventionEffect, ...]

    @property
    def within(self) -> Link:
        return next(link for link in self.links if link.scope == "within depth")


def link_verdict(within: Link, skill: Skill, interventions: Sequence[InterventionEffect]) -> LinkVerdict:
    """The strongest verdict that the evidence for a link supports."""
    if within.verdict == "not distinguishable":
        return "not distinguishable"
    depths = {each.effect.n_layers for each in interventions}
    if any(each.confirms(len(depths)) for each in interventions):
        return "causes"
    return "predicts" if skill.lo is not None and skill.lo > 0 else "associated"


def chain_evidence(runs: pd.DataFrame) -> list[LinkEvidence]:
    """The evidence for every measured link of the chain, from the results; p-values are adjusted over the links of a
    scope."""
    results = result_rows(runs)
    results = results.assign(unit=units_of(results))
    given = [name for name in ("lr", loss_of(results)) if results.loc[results["outcome"] == "ok", name].nunique() > 1]
    tested = interventions(runs)
    found = []
    for cause, effect in links_of(results):
        links = [link(results, cause, effect, "pooled"), link(results, cause, effect, "within depth")]
        links += [link(results, cause, effect, "within depth", [name]) for name in given if name != effect]
        found.append((links, skill(results, cause, effect), tuple(tested(cause, effect))))
    adjusted_of: dict[tuple[str, str, str], float] = {}
    for scope in {each.scope for links, *_ in found for each in links}:
        of_scope = [each for links, *_ in found for each in links if each.scope == scope and each.p is not None]
        p_J = adjusted(np.array([each.p for each in of_scope]), np.zeros(len(of_scope)))
        adjusted_of |= {(each.cause, each.effect, scope): float(p) for each, p in zip(of_scope, p_J, strict=True)}
    evidence = []
    for links, skilled, effects in found:
        links = [replace(each, p_adjusted=adjusted_of.get((each.cause, each.effect, each.scope))) for each in links]
        verdict = link_verdict(links[1], skilled, effects)
        evidence.append(
            LinkEvidence(
                cause=links[0].cause, effect=links[0].effect, verdict=verdict,
                links=tuple(links), skill=skilled, interventions=effects,
            )
        )  # fmt: skip
    return evidence


def interventions(runs: pd.DataFrame) -> Any:
    """A function (cause, effect) -> every setting of an intervention on this cause, nothing else changed, by depth."""
    cells = cells_of(runs, loss_of(runs))
    fields = {setting: set(changes) for setting, changes in cells.configs.items()}

    @cache
    def effects_on(outcome: str) -> dict[tuple[str, int], Effect]:
        of_outcome = cells.of_outcome(runs, outcome)
        rows = setting_effects(of_outcome).to_dict("records")
        return {(row["setting"], row["n_layers"]): Effect.of_row(row, outcome, of_outcome.unit) for row in rows}

    def tested(cause: str, effect: str) -> Iterator[InterventionEffect]:
        for intervention in INTERVENTIONS:
            alone = [setting for setting, names in fields.items() if names == {intervention.field}]
            if intervention.moves != cause or not intervention.controls or not alone:
                continue
            controls = [effects_on(name) for name in intervention.controls if runs[name].notna().any()]
            for key, moved in effects_on(cause).items():
                if key[0] in alone and moved.estimate is not None and key in effects_on(effect):
                    yield InterventionEffect(
                        intervention=intervention,
                        moved=moved,
                        controls=tuple(of[key] for of in controls if key in of),
                        effect=effects_on(effect)[key],
                    )

    return tested


def skill(results: pd.DataFrame, cause: str, effect: str) -> Skill:
    """How well each depth is predicted from the others; None with fewer than two depths; no interval with fewer than
    MIN_UNITS settings."""
    usable = usable_runs(results, [cause, effect])
    depths = tuple(sorted(set(map(int, usable["n_layers"]))))
    if len(depths) < 2:
        return Skill(value=None, lo=None, hi=None, depths=depths)
    unit_N, units = pd.factorize(usable["unit"])
    depth_N = usable["n_layers"].to_numpy()
    x_N, y_N = (usable[name].to_numpy(dtype=float) for name in (cause, effect))
    value = float(_skill(x_N, y_N, depth_N, np.ones((1, len(x_N))))[0])
    without_G = _skill(x_N, y_N, depth_N, leave_one_out(unit_N))
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
