"""The budget from which a depth is worth its cost: from there on its loss is below that of every shallower depth.

Losses are compared at equal training FLOPs C, over the budgets that both depths have, between two of them by a monotone
cubic of ln L in ln C (PCHIP) for each seed. At every C the difference of two depths has Student's test over the seeds
of both, with the error of the choice of lr (`points`); a seed is one unit with all its budgets, which are branches of
one trunk or runs of one seed.

    lower: significantly below every shallower depth;   higher: significantly above one of them;   else open

    worth it        lower from some budget up to the largest; the estimate is where the mean loss becomes the lowest for
                    good, its interval the open budgets: from the last that is 'higher' to the first 'lower' for good
    not worth it    higher up to some budget, and lower at none above it;       not known   all else
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator

from sparsedepth.scaling.points import BASELINE, SAME_BUDGET, blocks_of, finished, flops_text, losses_by_budget
from sparsedepth.store.comparable_loss import differing_data
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.small_sample import t_critical

N_BUDGETS = 201
"""Budgets at which depths are compared, equally spaced in ln C."""
SAME = 1.02
"""Budgets that differ by less are equal: sizes are solved for within 1%."""


class Crossover(NamedTuple):
    """A depth against all shallower ones. Budgets are training FLOPs."""

    setting: str
    n_layers: int
    verdict: Literal["worth it", "not worth it", "not known"] = "not known"
    budget: float | None = None
    """from which it is worth its cost, or up to which it is not"""
    lo: float | None = None
    """None: it may be the best below the smallest budget compared"""
    hi: float | None = None
    smallest: float | None = None
    largest: float | None = None
    """budgets compared"""
    seeds: int = 0
    reason: str = ""

    @property
    def text(self) -> str:
        """'worth its cost from 2e12 FLOPs (1e12 to 5e12)', 'not worth it up to 3e13 FLOPs', 'not known'."""
        if self.verdict == "not known" or self.budget is None or self.smallest is None:
            return f"not known ({self.reason})" if self.reason else "not known"
        if self.verdict == "not worth it":
            return f"not worth it up to {flops_text(self.budget)} FLOPs"
        if self.hi is None or self.hi <= self.smallest * SAME:
            return f"worth its cost from {flops_text(self.budget)} FLOPs, the smallest budget"
        least = "below " * (self.lo is None) + flops_text(self.lo or self.smallest)
        return f"worth its cost from {flops_text(self.budget)} FLOPs ({least} to {flops_text(self.hi)})"

    @property
    def sentence(self) -> str:
        """'n_layers=16: worth its cost from 2e12 FLOPs (1e12 to 5e12); compared from 1e12 to 2e13 FLOPs, 5 seeds'"""
        text = f"n_layers={self.n_layers}{'' if self.setting == BASELINE else f', {self.setting}'}: {self.text}"
        if self.smallest is None or self.largest is None:
            return text
        ends = f"from {flops_text(self.smallest)} to" if self.smallest * SAME < self.largest else "at"
        return f"{text}; compared {ends} {flops_text(self.largest)} FLOPs, {self.seeds} seeds"


class DepthCurve:
    """The loss of one depth and setting against ln C, for each seed."""

    def __init__(self, rows: pd.DataFrame) -> None:
        done = finished(rows)
        losses = losses_by_budget(done)
        # Of blocks of three seeds or more that of the most budgets, of these that of the most seeds.
        rank = sorted(
            (min(len(seeds), 3), len(budgets), len(seeds), seeds, budgets) for seeds, budgets in blocks_of(losses)
        )
        *_, self.seeds, budgets = rank[-1]
        self.budgets = np.array(budgets)
        self.loss_SB = np.array([[losses[budget][seed] for budget in self.budgets] for seed in self.seeds])
        at_B = [(done["train_flops"] / budget - 1).abs() < SAME_BUDGET for budget in self.budgets]
        self.lr_variance_B = np.array([done["lr_variance"][at].mean() for at in at_B])

    def at(self, x_G: np.ndarray, seeds: Sequence[int]) -> np.ndarray:
        """Losses of these seeds at ln C within its budgets (beyond by at most SAME), (S, G)."""
        log_SB = np.log(self.loss_SB[[self.seeds.index(seed) for seed in seeds]])
        x_B = np.log(self.budgets)
        if len(x_B) == 1:
            return np.exp(np.repeat(log_SB, len(x_G), axis=1))
        return np.exp(PchipInterpolator(x_B, log_SB, axis=1)(np.clip(x_G, x_B[0], x_B[-1])))

    def lr_variance(self, x_G: np.ndarray) -> np.ndarray:
        """Of the loss at ln C, by the choice of lr, (G,)."""
        return np.interp(x_G, np.log(self.budgets), self.lr_variance_B)


def crossovers(rows: pd.DataFrame) -> list[Crossover]:
    """Every depth but the shallowest of each setting (`points.budget_rows`). Raises ValueError for one depth only."""
    found: list[Crossover] = []
    for setting in sorted(set(rows["setting"]), key=lambda name: (name != BASELINE, name)):
        runs = rows[rows["setting"] == setting]
        curves = {int(depth): DepthCurve(at_depth) for depth, at_depth in runs.groupby("n_layers")}
        depths, names = sorted(curves), differing_data(runs)
        for number, depth in enumerate(depths[1:], start=1):
            shallower = {other: curves[other] for other in depths[:number]}
            fields = {"reason": f"depths differ in {names}"} if names else _compared(curves[depth], shallower)
            found.append(Crossover(setting, depth, **fields))
    if not found:
        raise ValueError("no setting was run at two depths: run a sweep over n_layers")
    return found


def _compared(deep: DepthCurve, shallower: Mapping[int, DepthCurve]) -> dict[str, Any]:
    """The verdict on one depth, as fields of Crossover."""
    common = {depth: sorted(set(deep.seeds) & set(curve.seeds)) for depth, curve in shallower.items()}
    if few := [depth for depth, seeds in common.items() if len(seeds) < 2]:
        return {"reason": f"fewer than two seeds in common with {few[0]} layers, at the budgets that most seeds have"}
    seeds = min(map(len, common.values()))
    curves = (deep, *shallower.values())
    low, high = max(curve.budgets[0] for curve in curves), min(curve.budgets[-1] for curve in curves)
    if low > high * SAME:
        reason = f"no budget in common: from {flops_text(low)} and up to {flops_text(high)} FLOPs"
        return {"seeds": seeds, "reason": reason}
    x_G = np.linspace(math.log(low), math.log(high), N_BUDGETS) if high > low * SAME else np.log([low])
    differences = [deep.at(x_G, common[depth]) - curve.at(x_G, common[depth]) for depth, curve in shallower.items()]
    ends = {"seeds": seeds, "smallest": float(low), "largest": float(max(low, high))}
    by_lr_DG = np.array([deep.lr_variance(x_G) + curve.lr_variance(x_G) for curve in shallower.values()])
    return ends | _verdict(np.exp(x_G), differences, by_lr_DG, [*shallower])


def _verdict(
    C_G: np.ndarray, differences: Sequence[np.ndarray], by_lr_DG: np.ndarray, shallower: Sequence[int]
) -> dict[str, Any]:
    """From the losses of the seeds minus those of each shallower depth, (S, G), at each budget, and the variance of
    their mean by the choice of lr."""
    mean_DG = np.array([one_SG.mean(axis=0) for one_SG in differences])
    sizes = np.array([[len(one_SG), t_critical(len(one_SG) - 1)] for one_SG in differences])
    seeds_DG = np.array([one_SG.std(axis=0, ddof=1) for one_SG in differences]) / np.sqrt(sizes[:, :1]) * sizes[:, 1:]
    half_DG = np.hypot(seeds_DG, sizes[:, 1:] * np.sqrt(by_lr_DG))  # as `effects` has it
    below_G, lower_G = np.all(mean_DG < 0, axis=0), np.all(mean_DG < -half_DG, axis=0)
    higher_G = np.any(mean_DG > half_DG, axis=0)
    if lower_G[-1]:
        first = _first_for_good(lower_G)
        is_higher = np.flatnonzero(higher_G[:first])
        return {
            "verdict": "worth it",
            "budget": float(C_G[_first_for_good(below_G)]),
            "lo": float(C_G[is_higher[-1]]) if len(is_higher) else None,
            "hi": float(C_G[first]),
        }
    if not higher_G.any():
        is_lower_D = mean_DG[:, -1] < -half_DG[:, -1]
        lower, others = (", ".join(np.array(shallower)[of_D].astype(str)) for of_D in (is_lower_D, ~is_lower_D))
        beside = f"to {others} layers is shown at the largest budget, only to {lower}"
        return {"reason": f"no difference {beside}" if lower else "no difference is shown at the largest budget"}
    last = float(C_G[np.flatnonzero(higher_G)[-1]])
    if lower_G.any():
        return {"reason": f"better at some budgets, worse at {flops_text(last)} FLOPs"}
    return {"verdict": "not worth it", "budget": last}


def _first_for_good(holds_G: np.ndarray) -> int:
    """The first place from which on it holds up to the end, where it does."""
    fails = np.flatnonzero(~holds_G)
    return int(fails[-1]) + 1 if len(fails) else 0


def crossover_lines(found: Sequence[Crossover]) -> list[str]:
    """A sentence for each depth and setting."""
    head = "worth its cost: less loss than every shallower depth at equal training FLOPs"
    return [f"{head} (95%: seeds, and the choice of lr where it was tuned)", *(one.sentence for one in found)]


def crossover_table(found: Sequence[Crossover]) -> QueryResult:
    """A row for each depth and setting."""
    return QueryResult(columns=Crossover._fields, rows=tuple(map(tuple, found)))
