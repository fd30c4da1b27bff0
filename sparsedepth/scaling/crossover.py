"""The budget from which a depth is worth its cost: from there on its loss is below that of every shallower depth.

Losses are compared at equal training FLOPs C: at every budget the difference of two depths has Student's test over the
seeds that both have there, with the error of the choice of lr (`points`). Between two budgets the means follow a
monotone cubic of ln L in ln C (PCHIP), and half the interval's width a line: enough, however the budgets depend.

    lower: significantly below every shallower depth;   higher: significantly above one of them;   else open

    worth it        lower from some budget up to the largest; the estimate is where the mean loss becomes the lowest for
                    good, its interval the open budgets: from the last that is 'higher' to the first 'lower' for good
    not worth it    higher up to some budget, and lower at none above it;       not known   all else

Shapes: S seeds, B budgets of a depth, N of two depths, G of a grid, D shallower depths.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator

from sparsedepth.scaling.points import BASELINE, finished, losses_by_budget
from sparsedepth.store.comparable_loss import differing_data
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import MATCHED
from sparsedepth.store.small_sample import t_critical
from sparsedepth.words.scaling import flops_text

N_BUDGETS = 201
"""Budgets at which depths are compared, equally spaced in ln C."""
SAME = 1 + 2 * MATCHED
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
    """the fewest of a comparison"""
    reason: str = ""

    @property
    def is_from_smallest(self) -> bool:
        """Whether it is worth its cost from the smallest budget on."""
        return self.hi is None or self.smallest is None or self.hi <= self.smallest * SAME

    @property
    def has_one_budget(self) -> bool:
        return self.smallest is None or self.largest is None or self.smallest * SAME >= self.largest


class DepthCurve:
    """The loss of one depth and setting at its budgets, for each seed."""

    def __init__(self, rows: pd.DataFrame) -> None:
        done = finished(rows)
        self.loss_SB = pd.DataFrame(losses_by_budget(done))
        self.budgets = self.loss_SB.columns.to_numpy()
        at_B = [(done["train_flops"] / budget - 1).abs() < MATCHED for budget in self.budgets]
        self.lr_variance_B = [done["lr_variance"][at].mean() for at in at_B]

    def at(self, C_N: np.ndarray) -> pd.DataFrame:
        """The losses of each seed, (S, N); NaN beyond its own budgets."""
        losses = {seed: _between(loss_B.dropna(), C_N) for seed, loss_B in self.loss_SB.iterrows()}
        return pd.DataFrame.from_dict(losses, orient="index")

    def lr_variance(self, C_N: np.ndarray) -> np.ndarray:
        """Of the loss, by the choice of lr, (N,)."""
        return np.interp(np.log(C_N), np.log(self.budgets), self.lr_variance_B) if len(self.budgets) else 0.0 * C_N


def _between(losses: pd.Series, C_G: np.ndarray) -> np.ndarray:
    """Of losses by budget, those at other budgets; NaN beyond by more than SAME."""
    C_B, log_B = losses.index.to_numpy(), np.log(losses.to_numpy())
    within_G = np.clip(C_G, C_B[0], C_B[-1])
    curve = PchipInterpolator(np.log(C_B), log_B) if len(C_B) > 1 else lambda x_G: np.repeat(log_B, len(x_G))
    return np.where(np.abs(np.log(C_G / within_G)) <= math.log(SAME), np.exp(curve(np.log(within_G))), np.nan)


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
    pairs = [_differences(deep, curve) for curve in shallower.values()]
    few = [depth for depth, pair in zip(shallower, pairs, strict=True) if pair.empty]
    budgets = [curve.budgets for curve in (deep, *shallower.values())] if few else [pair.index for pair in pairs]
    low, high = max(min(each, default=0.0) for each in budgets), min(max(each, default=math.inf) for each in budgets)
    if low > high * SAME:
        return {"reason": f"no budget in common: from {flops_text(low)} and up to {flops_text(high)} FLOPs"}
    if few:
        return {"reason": f"fewer than two seeds in common with {few[0]} layers at any budget"}
    C_G = np.geomspace(low, high, N_BUDGETS) if high > low * SAME else np.array([low])
    mean_DG = np.array([_between(pair["deep"], C_G) - _between(pair["shallow"], C_G) for pair in pairs])
    half_DG = np.array([np.interp(np.log(C_G), np.log(pair.index), pair["half"]) for pair in pairs])
    seeds = min(int(pair["seeds"][low / SAME : high * SAME].min()) for pair in pairs)
    ends = {"seeds": seeds, "smallest": float(low), "largest": float(max(low, high))}
    return ends | _verdict(C_G, mean_DG, half_DG, [*shallower])


def _differences(deep: DepthCurve, shallow: DepthCurve) -> pd.DataFrame:
    """Two depths at the budgets at which two seeds or more have both: their means, half the width of the interval of
    the difference, and the number of seeds."""
    C_N = np.unique(np.concatenate([deep.budgets, shallow.budgets]))
    C_N = C_N[np.append(True, C_N[1:] > C_N[:-1] * SAME)]
    deep_SN, shallow_SN = deep.at(C_N).align(shallow.at(C_N), join="inner", axis=0)
    difference_SN = deep_SN - shallow_SN
    seeds_N = difference_SN.count()
    t_N = seeds_N.map(lambda n: t_critical(n - 1) if n > 1 else math.nan)
    by_lr_N = deep.lr_variance(C_N) + shallow.lr_variance(C_N)
    half_N = t_N * np.sqrt(difference_SN.var() / seeds_N + by_lr_N)  # as `effects` has it
    shallow_N = shallow_SN[difference_SN.notna()].mean()
    found = {"deep": shallow_N + difference_SN.mean(), "shallow": shallow_N, "half": half_N, "seeds": seeds_N}
    return pd.DataFrame(found).set_index(C_N).dropna()


def _verdict(C_G: np.ndarray, mean_DG: np.ndarray, half_DG: np.ndarray, shallower: Sequence[int]) -> dict[str, Any]:
    """From the loss minus that of each shallower depth, and half of the interval's width, at each budget."""
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
        beside = f"to {others} layers is shown at the largest budget in common, only to {lower}"
        return {
            "reason": f"no difference {beside}" if lower else "no difference is shown at the largest budget in common"
        }
    last = float(C_G[np.flatnonzero(higher_G)[-1]])
    if lower_G.any():
        return {"reason": f"better at some budgets, worse at {flops_text(last)} FLOPs"}
    return {"verdict": "not worth it", "budget": last}


def _first_for_good(holds_G: np.ndarray) -> int:
    """The first place from which on it holds up to the end, where it does."""
    fails = np.flatnonzero(~holds_G)
    return int(fails[-1]) + 1 if len(fails) else 0


def crossover_table(found: Sequence[Crossover]) -> QueryResult:
    """A row for each depth and setting."""
    return QueryResult(columns=Crossover._fields, rows=tuple(map(tuple, found)))
