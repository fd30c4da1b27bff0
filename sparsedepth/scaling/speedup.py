"""What a setting is worth in compute: how much more the baseline would need to reach the setting's loss.

    L_base(C) = L_inf + A C^-alpha
    compute multiplier    = ((L_base - L_inf) / (L_setting - L_inf))^(1 / alpha) x C_base / C_setting
    wall-clock multiplier = compute multiplier x FLOPs per second of the setting / the baseline's

Losses are paired by seed at the baseline's nearest budget, each side at its optimum of lr (`points`). At a given L_inf
ln of the first factor is a ratio of means over seeds, N / alpha, with Student's interval of its linear terms and the
error of the choice of lr. The interval is the hull over every L_inf that the data allow; it is withheld where one of
them is not below the setting's losses.

Shapes: S seeds, B budgets."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.scaling.points import BASELINE, BUDGET, blocks_of, budget_rows, finished, losses_by_budget
from sparsedepth.store.comparable_loss import differing_data
from sparsedepth.store.connection import Store
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import MATCHED
from sparsedepth.store.small_sample import Z, t_critical
from sparsedepth.store.tuning_roles import IS_RESULT
from sparsedepth.words.plain_text import counted
from sparsedepth.words.scaling import above_losses, not_identified

MIN_BUDGETS = 3
N_GRID = 400
NEAREST = 1e-4
"""The highest L_inf tried lies below the lowest loss by this share of it."""
NUMBERS = ("multiplier", "lo", "hi", "time_multiplier", "time_lo", "time_hi", "L_inf", "L_inf_lo", "L_inf_hi", "alpha")
COLUMNS = ("n_layers", "setting", BUDGET, "train_flops", *NUMBERS, "seeds", "diverged", "reason")

SHOWN = ("n_layers", BUDGET, "train_flops", "multiplier", "lo", "hi", "time_multiplier", "seeds", "setting")

Worths = Mapping[tuple[int, str, int], tuple[float, float | None, float | None]]
"""(depth, setting, tokens) -> compute multiplier, lo, hi."""
_THREE_BUDGETS = (
    f"SELECT 1 FROM runs WHERE {IS_RESULT} GROUP BY n_layers HAVING count(DISTINCT {BUDGET}) >= {MIN_BUDGETS} LIMIT 1"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PowerLaw:
    """At a given L_inf the law is a line for each seed s, whose slope is its exponent and whose curvature is 0 at the
    right L_inf, positive below and negative above:

        ln(L_s - L_inf) = ln A_s - alpha_s ln C + q_s (ln C)^2

    The estimate of L_inf has mean q_s = 0. The data allow every L_inf from 0 at which Student's test over seeds does
    not reject that. Seeds are the unit: branches of one trunk share its seed."""

    C: np.ndarray
    """Budgets, ascending, (B,)."""
    loss: np.ndarray
    """[nat/token], (S, B)."""
    seeds: tuple[int, ...]

    @cached_property
    def L_inf(self) -> float:  # noqa: N802 - the symbol of the formula
        """nat/token; 0 where a law with L_inf = 0 is still too straight."""
        from scipy.optimize import brentq  # slow to import, and recipes of one budget do without

        highest = float(self.loss.min()) * (1 - NEAREST)
        ends = [float(self._curvature(end).mean()) for end in (0.0, highest)]
        if ends[0] <= 0:
            return 0.0
        return highest if ends[1] > 0 else float(brentq(lambda end: self._curvature(end).mean(), 0.0, highest))

    @property
    def alpha(self) -> float:
        return float(self.alphas(self.L_inf).mean())

    @cached_property
    def allowed(self) -> np.ndarray:
        """Values of L_inf that the data allow, ascending, the estimate included."""
        n = len(self.seeds)
        if n < 2:
            return np.array([self.L_inf])
        grid = float(self.loss.min()) * (1 - np.geomspace(1, NEAREST, N_GRID))
        q_GS = np.array([self._curvature(L_inf) for L_inf in grid])
        half_G = t_critical(n - 1) * q_GS.std(axis=1, ddof=1) / np.sqrt(n)
        refused = grid[np.abs(q_GS.mean(axis=1)) > half_G]
        # The nearest ones: close to the lowest loss one seed's curvature is too uncertain to refuse anything.
        least = refused[refused < self.L_inf].max(initial=-1.0)
        most = refused[refused > self.L_inf].min(initial=np.inf)
        return np.unique([self.L_inf, *grid[(least < grid) & (grid < most)]])

    @property
    def is_identified(self) -> bool:
        """Whether the data bound L_inf on both sides."""
        return self.allowed[0] > 0 and self.allowed[-1] < self.loss.min() * (1 - 2 * NEAREST)

    def alphas(self, L_inf: float) -> np.ndarray:
        """The exponent of each seed at an L_inf, (S,)."""
        return -np.log(self.loss - L_inf) @ self._x / (self._x @ self._x)

    def _curvature(self, L_inf: float) -> np.ndarray:
        square = self._x**2 - (self._x**2).mean()
        square = square - self._x * (self._x @ square) / (self._x @ self._x)  # without what is linear in ln C
        return np.log(self.loss - L_inf) @ square / (square @ square)

    @cached_property
    def _x(self) -> np.ndarray:
        """ln C less its mean, (B,)."""
        return np.log(self.C) - np.log(self.C).mean()


def power_law(losses: Mapping[float, Mapping[int, float]]) -> PowerLaw:
    """The law from budget -> seed -> loss [nat/token], of the seeds that have most budgets in common. Raises ValueError
    for fewer than three budgets, and for a loss that rises with the budget."""
    blocks = [block for block in blocks_of(losses) if len(block[1]) >= MIN_BUDGETS]
    if not blocks:
        needed = f"{counted(len(losses), 'budget')}, and {MIN_BUDGETS} of one seed are needed"
        raise ValueError(f"{needed}; schedule: wsd with branch_at: [0.25, 0.5] gives three from one run")
    seeds, budgets = max(blocks, key=lambda block: (len(block[0]) * len(block[1]), block))
    loss_SB = np.array([[losses[budget][seed] for budget in budgets] for seed in seeds])
    if not (loss_SB > 0).all() or budgets[0] <= 0:
        raise ValueError("a budget or a loss that is not positive")
    first, last = loss_SB[:, 0].mean(), loss_SB[:, -1].mean()
    if last >= first:
        at_ends = f"{first:.4g} at {budgets[0]:.3g} FLOPs, {last:.4g} at {budgets[-1]:.3g}"
        raise ValueError(f"a loss that does not fall with the budget ({at_ends}); tune lr at each budget")
    return PowerLaw(C=np.array(budgets), loss=loss_SB, seeds=tuple(seeds))


@dataclass(frozen=True, kw_only=True)
class Speedup:
    multiplier: float | None
    """compute of the baseline at the same loss / compute of the setting; None: withheld, see `reason`"""
    lo: float | None = None
    hi: float | None = None
    n_pairs: int = 0
    reason: str = ""


class Pairs(NamedTuple):
    """The losses of the seeds that both sides have."""

    seeds: list[int]
    losses: np.ndarray
    """Of the baseline and of the setting, (S, 2)."""
    by_lr: float
    """What the choice of lr adds to the variance of the mean difference."""


def speedup(
    curve: PowerLaw,
    baseline: Mapping[int, float],
    setting: Mapping[int, float],
    cost_ratio: float = 1.0,
    effect: tuple[float, float] | None = None,
    by_lr: float = 0.0,
) -> Speedup:
    """The multiplier, from seed -> loss [nat/token] of both sides. `cost_ratio`: C_base / C_setting; `effect`: the
    setting's minus the baseline's loss where each has its optimum of lr, and its standard error; without it `by_lr` is
    what the choice of lr adds to the variance of the difference."""
    pairs = _pairs(baseline, setting, effect, by_lr)
    n = len(pairs.seeds)
    withheld = partial(Speedup, multiplier=None, n_pairs=n)
    if not n:
        return withheld(reason="no seed in common with the baseline")
    if curve.allowed[-1] >= pairs.losses.min():
        return withheld(reason=above_losses(float(curve.allowed[-1]), float(pairs.losses.min())))
    if any(curve.alphas(L_inf).mean() <= 0 for L_inf in curve.allowed):
        return withheld(reason="the baseline's loss may not fall with compute")
    found = Speedup(multiplier=math.exp(_log_multiplier(curve, pairs, curve.L_inf)[0]) * cost_ratio, n_pairs=n)
    if min(n, len(curve.seeds)) < 2:
        return replace(found, reason="one seed: no interval")
    middle_L, half_L = np.array([_log_multiplier(curve, pairs, L_inf) for L_inf in curve.allowed]).T
    lo, hi = np.exp(np.clip([(middle_L - half_L).min(), (middle_L + half_L).max()], -700, 700)) * cost_ratio
    reason = "" if curve.is_identified else not_identified(*curve.allowed[[0, -1]])
    return replace(found, lo=float(lo), hi=float(hi), reason=reason)


def _pairs(
    baseline: Mapping[int, float], setting: Mapping[int, float], effect: tuple[float, float] | None, by_lr: float
) -> Pairs:
    """With an effect, the setting's losses are moved to it, and by_lr is the rest of its variance."""
    seeds = sorted({*baseline} & {*setting})
    losses = np.array([(baseline[seed], setting[seed]) for seed in seeds]).reshape(-1, 2)
    if effect is not None and seeds:
        difference_S = losses[:, 1] - losses[:, 0]
        losses[:, 1] += effect[0] - difference_S.mean()
        by_lr = max(0.0, effect[1] ** 2 - difference_S.var(ddof=1) / len(seeds)) if len(seeds) > 1 else 0.0
    return Pairs(seeds, losses, by_lr)


def _log_multiplier(curve: PowerLaw, pairs: Pairs, L_inf: float) -> tuple[float, float]:
    """ln of the multiplier at an L_inf, and the half-width of its interval: linear terms of N / alpha by seed, and of
    what the choice of lr adds to the variance of the difference."""
    base_S, setting_S = (pairs.losses - L_inf).T
    gain_S, alpha_S = np.log(base_S / setting_S), curve.alphas(L_inf)
    gain, alpha = float(gain_S.mean()), float(alpha_S.mean())
    n = min(len(gain_S), len(alpha_S))
    if n < 2:
        return gain / alpha, math.nan
    every = np.union1d(pairs.seeds, curve.seeds)
    term_S = np.zeros(len(every))
    term_S[np.searchsorted(every, pairs.seeds)] += (gain_S - gain) / len(gain_S)
    term_S[np.searchsorted(every, curve.seeds)] -= gain / alpha * (alpha_S - alpha) / len(alpha_S)
    sd = math.sqrt(float(term_S @ term_S) * n / (n - 1)) / alpha
    lr_sd = math.sqrt(pairs.by_lr) * float((1 / setting_S).mean()) / alpha
    return gain / alpha, math.hypot(t_critical(n - 1) * sd, Z * lr_sd)


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting, depth and budget (`budget_rows`), with COLUMNS. Raises ValueError if the baseline has no
    curve at any depth, naming its budgets, without any setting, and for runs of different data or lengths."""
    found: list[dict[str, Any]] = []
    refused = defaultdict[str, list[str]](list)
    for n_layers, at_depth in rows.groupby("n_layers"):
        if names := differing_data(at_depth):
            raise ValueError(
                f"runs differ in {names}: losses on other data or at other lengths are no matter of compute; choose "
                f"settings that share them, such as --knob depth_scale"
            )
        baseline = finished(at_depth[at_depth["setting"] == BASELINE])
        if baseline.empty:
            refused["no run of the baseline has finished at this depth"].append(str(n_layers))
            continue
        try:
            curve = power_law(losses_by_budget(baseline))
        except ValueError as error:
            tokens = ", ".join(f"{int(budget)}" for budget in sorted(set(baseline[BUDGET])))
            refused[f"the baseline has train_tokens={tokens}: {error}"].append(str(n_layers))
            continue
        for setting, runs in at_depth[at_depth["setting"] != BASELINE].groupby("setting", sort=False):
            for _, at_budget in runs.groupby(BUDGET):
                found.append({"n_layers": n_layers, "setting": setting, **_at_budget(curve, baseline, at_budget)})
    reasons = [f"n_layers={', '.join(depths)}: {reason}" for reason, depths in refused.items()]
    if not found:
        why = "; ".join(reasons) or "all runs have one setting; run a sweep over another"
        raise ValueError(f"no compute multiplier: {why}")
    table = pd.DataFrame(found, columns=[*COLUMNS])
    table.attrs["refused"] = reasons
    return table.sort_values(["n_layers", "setting", BUDGET], kind="stable").reset_index(drop=True)


def worth(store: Store, objective: str) -> Worths:
    """What settings are worth; empty unless some depth has three budgets."""
    if not store.sql(_THREE_BUDGETS).rows:
        return {}
    try:
        table = speedups(budget_rows(store, outcome=objective))
    except ValueError:  # `effects --as speedup` gives the reason
        return {}
    known = QueryResult.of_frame(table[table["multiplier"].notna()]).records()
    return {(r["n_layers"], r["setting"], r[BUDGET]): (r["multiplier"], r["lo"], r["hi"]) for r in known}


def _at_budget(curve: PowerLaw, baseline: pd.DataFrame, runs: pd.DataFrame) -> dict[str, Any]:
    done = finished(runs)
    flops = float((runs if done.empty else done)["train_flops"].mean())
    n_diverged = int((runs["outcome"] == "diverged").sum())
    budgets = losses_by_budget(baseline)
    nearest = min(budgets, key=lambda budget: abs(math.log(budget / flops)))
    at_nearest = baseline[(baseline["train_flops"] / nearest - 1).abs() < MATCHED]
    losses = done["loss"].groupby(done["seed"].astype(int)).mean().to_dict()
    known = abs(flops / nearest - 1) < MATCHED and bool(done["effect"].notna().any())
    effect = (float(done["effect"].mean()), float(done["effect_sd"].mean())) if known else None
    by_lr = float(at_nearest["lr_variance"].mean() + done["lr_variance"].mean())  # where costs differ
    worth = speedup(curve, budgets[nearest], losses, cost_ratio=nearest / flops, effect=effect, by_lr=by_lr)
    timed = in_time(worth, _speeds(at_nearest, done))
    reasons = [worth.reason, f"{n_diverged} of its runs diverged" if n_diverged else ""]
    numbers = [worth.multiplier, worth.lo, worth.hi, timed.multiplier, timed.lo, timed.hi]
    numbers += [curve.L_inf, curve.allowed[0], curve.allowed[-1], curve.alpha]
    fields = {BUDGET: int(runs[BUDGET].iloc[0]), "train_flops": flops, **dict(zip(NUMBERS, numbers, strict=True))}
    return fields | {"seeds": worth.n_pairs, "diverged": n_diverged, "reason": "; ".join(filter(None, reasons))}


def _speeds(baseline: pd.DataFrame, runs: pd.DataFrame) -> np.ndarray:
    """ln of FLOPs per second of the setting / the baseline's, for each seed of both; none unless all were trained on
    one kind of device."""
    if baseline["device"].dropna().nunique() != 1 or set(runs["device"].dropna()) != set(baseline["device"].dropna()):
        return np.array([])
    own, other = (
        (side["tokens_per_second"] * side["train_flops"] / side[BUDGET]).groupby(side["seed"]).mean()
        for side in (runs, baseline)
    )
    return np.log((own / other).dropna().to_numpy(float))


def in_time(worth: Speedup, speed_S: np.ndarray) -> Speedup:
    """The wall-clock multiplier, from ln of the speed of each seed; its interval has the errors of both factors."""
    if worth.multiplier is None or not len(speed_S):
        return Speedup(multiplier=None)
    middle = worth.multiplier * math.exp(speed_S.mean())
    n = len(speed_S)
    if worth.lo is None or worth.hi is None or n < 2:
        return Speedup(multiplier=middle)
    half = t_critical(n - 1) * float(speed_S.std(ddof=1)) / math.sqrt(n)
    below, above = (math.hypot(math.log(end / worth.multiplier), half) for end in (worth.lo, worth.hi))
    return Speedup(multiplier=middle, lo=middle * math.exp(-below), hi=middle * math.exp(above))


class Multipliers(NamedTuple):
    """What `effects --as speedup` prints."""

    table: QueryResult
    at_largest: Sequence[Mapping[str, Any]]
    """The row of each setting and depth at its largest budget."""
    refused: Sequence[str]


def multipliers(table: pd.DataFrame) -> Multipliers:
    """Of the rows of `speedups`."""
    largest = QueryResult.of_frame(table.groupby(["n_layers", "setting"], sort=False).tail(1))
    return Multipliers(QueryResult.of_frame(table[[*SHOWN]]), largest.records(), table.attrs["refused"])
