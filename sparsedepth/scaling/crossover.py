"""The budget from which a depth is worth its cost: from there on its loss is below that of every shallower depth.

Losses are compared at equal training FLOPs C, by the fit over depths that `effects` has (`effects.depths`). A depth is
judged at the largest budget that it has in common with all shallower ones; p-values are those of a family, adjusted
over the depths of a setting (Holm):

    worth it        shown to be lower than every shallower depth there (the largest p); from the smallest budget down to
                    which that holds without a gap, where budgets are tested in turn from the largest
    not worth it    shown to be higher than one of them there (the least p times their number)
    not known       all else

Where depths have no budget in common, the losses of a seed at its own budgets are joined by a monotone cubic of ln L in
ln C (PCHIP).

Shapes: S seeds, B budgets of a depth, N budgets compared, D shallower depths."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import BASELINE, Cells, cells_of
from sparsedepth.effects.depths import SettingDepths, at_budgets, with_budgets
from sparsedepth.effects.fit import fit_of
from sparsedepth.effects.verdict import Distribution, adjusted, withheld
from sparsedepth.once import once
from sparsedepth.quantities.levels import ALPHA
from sparsedepth.store.comparable_loss import differing_data
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import MATCHED
from sparsedepth.words.scaling import flops_text, no_depth_shown

SAME = 1 + 2 * MATCHED
"""Budgets that differ by less are equal: sizes are solved for within 1%."""


class Crossover(NamedTuple):
    """A depth against all shallower ones. Budgets are training FLOPs."""

    setting: str
    n_layers: int
    verdict: Literal["worth it", "not worth it", "not known"] = "not known"
    budget: float | None = None
    """from which it is shown to be worth its cost, or at which it is shown not to be"""
    smallest: float | None = None
    largest: float | None = None
    """budgets compared"""
    against: int | None = None
    """the shallower depth with the lowest loss at the largest budget"""
    estimate: float | None = None
    """the loss minus that of `against` there [nat/token]"""
    lo: float | None = None
    hi: float | None = None
    p_adjusted: float | None = None
    """that it is worth it, or that it is not: the smaller one"""
    seeds: int = 0
    """the fewest of a comparison"""
    reason: str = ""

    @property
    def has_one_budget(self) -> bool:
        return self.smallest is None or self.largest is None or self.smallest * SAME >= self.largest


class Comparison(NamedTuple):
    """A depth against a shallower one at a budget."""

    contrast: Distribution
    seeds: int
    withheld: str = ""
    """Why no difference can be shown, such as an optimum beyond the lr tried."""

    def p(self, sign: int) -> float:
        """Two-sided, where the deeper one is lower (-1) or higher (1)."""
        return self.contrast.p if sign * self.contrast.estimate > 0 and not self.withheld else 1.0


class Judged(NamedTuple):
    """A depth at a budget."""

    comparisons: "Comparisons"
    lower_p: float
    """Adjusted, of being lower than every shallower depth."""
    higher_p: float
    """Adjusted, of being higher than one of them."""


Budgets = Mapping[float, SettingDepths]
Comparisons = dict[int, Comparison]
"""By shallower depth."""


def crossovers(cells: Cells) -> list[Crossover]:
    """Every depth but the shallowest of each setting, the baseline first, from cells of a loss at every budget. Raises
    ValueError for one depth only."""
    found = crossovers_of(cells)
    if not found:
        raise ValueError("no setting was run at two depths: run a sweep over n_layers")
    return found


def every_budget(cells: Cells) -> Cells:
    """The cells with the rows of all budgets, where theirs are of one."""
    if not cells.is_one_budget:
        return cells
    return cells_of(cells.runs, cells.outcome, every_budget=True, baseline=cells.asked_baseline)


@once
def baselines_at_budgets(cells: Cells) -> list[Crossover]:
    """Those of the baseline that are judged at a budget, of all budgets."""
    found = crossovers_of(every_budget(cells), [BASELINE]) if "flops" in cells.rows else []
    return [one for one in found if one.largest is not None]


def crossovers_of(cells: Cells, settings: Collection[str] | None = None) -> list[Crossover]:
    """Those of some settings (None: of all), none for one depth only."""
    found: list[Crossover] = []
    rows = with_budgets(cells)
    of_budgets = at_budgets(cells, rows)
    for setting in sorted(settings or {*rows["name"]}, key=lambda name: (name != BASELINE, name)):
        of_setting = rows[rows["name"] == setting]
        depths = sorted({*of_setting["n_layers"]})
        if differ := differing_data(cells.runs.loc[of_setting.index]):
            found += [Crossover(setting, depth, reason=f"depths differ in {differ}") for depth in depths[1:]]
        else:
            budgets = {budget: sides[setting] for budget, sides in of_budgets.items() if setting in sides}
            found += _of_setting(setting, depths, budgets)
    return found


def _of_setting(setting: str, depths: Sequence[int], budgets: Budgets) -> list[Crossover]:
    compared = {depth: _compared(budgets, depth, depths[:number]) for number, depth in enumerate(depths) if number}
    judged = _judged(compared)
    return [
        _verdict(Crossover(setting, depth), judged[depth])
        if judged.get(depth)
        else Crossover(setting, depth, reason=_why_none(budgets, depth, depths))
        for depth in depths[1:]
    ]


def _compared(budgets: Budgets, deep: int, shallower: Sequence[int]) -> dict[float, Comparisons]:
    """By budget, those at which the depth is compared with every shallower one."""
    found: dict[float, Comparisons] = {}
    for budget, depths in budgets.items():
        if {deep, *shallower} <= {*depths.cells}:
            at = {other: one for other in shallower if (one := _comparison(depths, deep, other))}
            if len(at) == len(shallower):
                found[budget] = at
    return found or _between_budgets(budgets, deep, shallower)


def _comparison(depths: SettingDepths, deep: int, shallow: int) -> Comparison | None:
    if (found := depths.contrast(deep, shallow)) is None:
        return None
    own, other = (depths.cells[depth].results for depth in (deep, shallow))
    sides = depths.side(deep), depths.side(shallow)
    return Comparison(found.effect, len(own.keys() & other.keys()), withheld(found.effect.estimate, sides))


def _judged(compared: Mapping[int, Mapping[float, Comparisons]]) -> dict[int, dict[float, Judged]]:
    """By depth and budget; the depths that are compared at a budget are a family."""
    judged = defaultdict[int, dict[float, Judged]](dict)
    for budget in {budget for at in compared.values() for budget in at}:
        family = {depth: at[budget] for depth, at in compared.items() if budget in at}
        lower_J = np.array([max(one.p(-1) for one in at.values()) for at in family.values()])
        higher_J = np.array([min(1.0, len(at) * min(one.p(1) for one in at.values())) for at in family.values()])
        p_XJ = [adjusted(p_J, np.zeros(len(p_J))).tolist() for p_J in (lower_J, higher_J)]
        for depth, lower_p, higher_p in zip(family, *p_XJ, strict=True):
            judged[depth][budget] = Judged(family[depth], lower_p, higher_p)
    return judged


def _verdict(found: Crossover, judged: Mapping[float, Judged]) -> Crossover:
    """At the largest budget; where it is worth it there, down to the last budget without a gap."""
    budgets = sorted(judged, reverse=True)
    at = judged[budgets[0]]
    against = max(at.comparisons, key=lambda other: at.comparisons[other].contrast.estimate)
    best = at.comparisons[against].contrast
    lo, hi = best.interval
    found = found._replace(
        smallest=budgets[-1], largest=budgets[0], against=against, estimate=best.estimate, lo=lo, hi=hi,
        p_adjusted=min(at.lower_p, at.higher_p),
        seeds=min(one.seeds for each in judged.values() for one in each.comparisons.values()),
    )  # fmt: skip
    if at.lower_p < ALPHA:
        down_to = [*itertools.takewhile(lambda budget: judged[budget].lower_p < ALPHA, budgets)][-1]
        return found._replace(verdict="worth it", budget=down_to)
    if at.higher_p < ALPHA:
        return found._replace(verdict="not worth it", budget=budgets[0])
    if reasons := [one.withheld for one in at.comparisons.values() if one.withheld and one.contrast.p < ALPHA]:
        return found._replace(reason=reasons[0])
    lower = [str(other) for other, one in at.comparisons.items() if one.p(-1) < ALPHA]
    return found._replace(reason=no_depth_shown(against, lower, budgets[0]))


def _why_none(budgets: Budgets, deep: int, depths: Sequence[int]) -> str:
    """Why a depth is compared at no budget."""
    own = {depth: [budget for budget, at in budgets.items() if depth in at.cells] for depth in depths if depth <= deep}
    low = max(min(each, default=0.0) for each in own.values())
    high = min(max(each, default=math.inf) for each in own.values())
    if low > high * SAME:
        return f"no budget in common: from {flops_text(low)} and up to {flops_text(high)} FLOPs"
    few = [depth for depth in depths if depth < deep and not _compared(budgets, deep, [depth])] or [*depths]
    pairs = [
        (at.cells[deep].results, at.cells[few[0]].results) for at in budgets.values() if {deep, few[0]} <= {*at.cells}
    ]
    if any(len(own.keys() & other.keys()) > 1 for own, other in pairs):
        return "the runs of different seeds have equal values: there is no noise to judge by"
    return f"fewer than two seeds in common with {few[0]} layers at any budget"


# Budgets that are not those of every depth


def _between_budgets(budgets: Budgets, deep: int, shallower: Sequence[int]) -> dict[float, Comparisons]:
    """At each budget of a depth that lies within those of all of them."""
    order = [deep, *shallower]
    found: dict[float, Comparisons] = {}
    for C in sorted(C for C, depths in budgets.items() if not depths.cells.keys().isdisjoint(order)):
        if any(other * SAME >= C for other in found):
            continue
        losses, variance = {}, {}
        for depth in order:
            losses[depth], variance[depth] = _interpolated(budgets, depth, C)
        fit, at = fit_of(losses), Comparisons()
        for other in shallower:
            seeds = len(losses[deep].keys() & losses[other].keys())
            if seeds > 1 and (one := fit.contrast({deep: 1.0, other: -1.0})):
                at[other] = Comparison(one.effect.widened(math.sqrt(variance[deep] + variance[other])), seeds)
        if len(at) == len(shallower):
            found[C] = at
    return found


def _interpolated(budgets: Budgets, depth: int, C: float) -> tuple[dict[int, float], float]:
    """Seed -> loss of a depth at a budget, of the seeds whose budgets hold it; its variance by the choice of lr."""
    at = {budget: depths for budget, depths in sorted(budgets.items()) if depth in depths.cells}
    if not at:
        return {}, 0.0
    loss_SB = pd.DataFrame({budget: depths.cells[depth].results for budget, depths in at.items()})
    losses = {seed: _between(loss_SB.loc[seed].dropna(), C) for seed in loss_SB.index.tolist()}
    lr_variance = np.interp(math.log(C), np.log([*at]), [depths.lr_variance(depth) for depths in at.values()])
    return {seed: loss for seed, loss in losses.items() if not math.isnan(loss)}, lr_variance


def _between(losses: pd.Series, C: float) -> float:
    """Of losses by budget, the one at another; NaN beyond by more than SAME."""
    from scipy.interpolate import PchipInterpolator  # slow to import, and needed here alone

    C_B, log_B = losses.index.to_numpy(), np.log(losses.to_numpy())
    within = min(max(C, C_B[0]), C_B[-1])
    if not 1 / SAME <= C / within <= SAME:
        return math.nan
    return np.exp(PchipInterpolator(np.log(C_B), log_B)(math.log(within)) if len(C_B) > 1 else log_B[0])


def crossover_table(found: Sequence[Crossover]) -> QueryResult:
    """A row for each depth and setting."""
    return QueryResult(columns=Crossover._fields, rows=tuple(map(tuple, found)))
