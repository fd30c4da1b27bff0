"""What a setting is worth in compute: how much more the baseline would need to reach the setting's loss.

    compute multiplier    = compute of the baseline at the same loss / compute of the setting  (`scaling.multiplier`)
    wall-clock multiplier = compute multiplier x FLOPs per second of the setting / the baseline's

Of each setting at each depth one law holds for all budgets, each side at its optimum of lr (`points`). Speeds are
those of runs of one seed on one kind of device but a CPU, started within HOURS of each other."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.effects.depths import budget_of, budgets_of
from sparsedepth.quantities.quantity import Named
from sparsedepth.scaling.ladder import MIN_BUDGETS, Cell, Losses, ladder_of
from sparsedepth.scaling.multiplier import MultiplierLaw, law_by_seeds
from sparsedepth.scaling.points import BASELINE, BUDGET, blocks_of, budget_rows, finished, losses_by_budget
from sparsedepth.store.comparable_loss import differing_data
from sparsedepth.store.connection import Store
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import MATCHED
from sparsedepth.store.small_sample import t_critical
from sparsedepth.store.tuning_roles import IS_RESULT
from sparsedepth.words.plain_text import counted
from sparsedepth.words.scaling import NO_TIMES, beyond_law, law_rejected

FARTHEST = 100.0
"""Times the largest budget, or below the smallest: a multiplier that reaches farther is none."""
HOURS = 12.0
"""Between the starts of two runs whose speeds are compared."""
NO_NOISE = "one seed, and one training or one budget: no interval"
LAW = ("law", "p_drift", "p_misfit", "L_inf", "alpha")
COLUMNS = (
    *("n_layers", "setting", BUDGET, "train_flops", "multiplier", "lo", "hi", "time_multiplier", "time_lo", "time_hi"),
    *(*LAW, "seeds", "diverged", "reason", "time_reason"),
)
SHOWN = ("n_layers", BUDGET, "train_flops", "multiplier", "lo", "hi", "time_multiplier", "seeds", "setting")

Worths = Mapping[tuple[int, str, int], tuple[float, float | None, float | None]]
"""(depth, setting, tokens) -> compute multiplier, lo, hi."""
NO_LADDER = "these budgets have several seeds, or share a training: see `effects --as speedup`"
_ALL_REPEATED = (
    f"SELECT min(n) > 1 FROM (SELECT count(DISTINCT seed) AS n FROM runs WHERE {IS_RESULT} AND outcome = 'ok' AND "
    "train_flops IS NOT NULL GROUP BY cell_id)"
)
_THREE_BUDGETS = (
    f"SELECT 1 FROM runs WHERE {IS_RESULT} GROUP BY n_layers HAVING count(DISTINCT {BUDGET}) >= {MIN_BUDGETS} LIMIT 1"
)


@dataclass(frozen=True, kw_only=True)
class Speedup:
    multiplier: float | None
    """compute of the baseline at the same loss / compute of the setting; None: withheld, see `reason`"""
    lo: float | None = None
    hi: float | None = None
    n_pairs: int = 0
    law: MultiplierLaw | None = None
    reason: str = ""


def worth_of(
    baseline: Losses, setting: Losses, lr_variance: Mapping[Cell, float] | None = None
) -> dict[float, Speedup]:
    """What a setting is worth at each of its budgets, from budget [FLOPs] -> seed -> loss of both sides. Raises
    ValueError where the baseline has no law."""
    check_baseline(baseline)
    cells = {(is_setting, C): of for is_setting, side in ((False, baseline), (True, setting)) for C, of in side.items()}
    ladder = ladder_of(cells, lr_variance or {})
    if ladder is None:
        return dict.fromkeys(setting, Speedup(multiplier=None, reason="no seed in common with the baseline"))
    law, known = law_by_seeds(ladder), {*ladder.C_N[ladder.is_setting_N].tolist()}
    other_seeds = Speedup(multiplier=None, reason="its seeds are not those of the other budgets")
    return {C: _speedup(law, C) if C in known else other_seeds for C in setting}


def check_baseline(losses: Losses) -> None:
    """Raises ValueError for fewer than three budgets of one seed, a loss that is not positive, and one that rises with
    the budget."""
    if not any(len(budgets) >= MIN_BUDGETS for _, budgets in blocks_of(losses)):
        needed = f"{counted(len(losses), 'budget')}, and {MIN_BUDGETS} of one seed are needed"
        raise ValueError(f"{needed}; schedule: wsd with branch_at: [0.25, 0.5] gives three from one run")
    if min(losses) <= 0 or any(min(by_seed.values()) <= 0 for by_seed in losses.values()):
        raise ValueError("a budget or a loss that is not positive")
    ends = min(losses), max(losses)
    first, last = (sum(losses[end].values()) / len(losses[end]) for end in ends)
    if last >= first:
        at_ends = f"{first:.4g} at {ends[0]:.3g} FLOPs, {last:.4g} at {ends[1]:.3g}"
        raise ValueError(f"a loss that does not fall with the budget ({at_ends}); tune lr at each budget")


def _speedup(law: MultiplierLaw, C: float) -> Speedup:
    found, log_C_N, n_seeds = law.found_at(C), np.log(law.ladder.C_N), law.ladder.n_seeds
    log_m = found.estimate if found else law.log_m
    reached = math.log(C) + log_m
    if max(reached - log_C_N.max(), log_C_N.min() - reached) > math.log(FARTHEST):
        return Speedup(multiplier=None, n_pairs=n_seeds, law=law, reason=beyond_law(FARTHEST))
    lo, hi = map(_exp, found.interval) if found else (None, None)
    reason = "" if found else NO_NOISE
    if law.is_rejected:
        reason = law_rejected(law.p_misfit)
    return Speedup(multiplier=_exp(log_m), lo=lo, hi=hi, n_pairs=n_seeds, law=law, reason=reason)


def _exp(log: float) -> float:
    return math.exp(min(max(log, -700.0), 700.0))


def with_law(rows: pd.DataFrame) -> tuple[dict[int | None, pd.DataFrame], list[str]]:
    """The rows of each depth whose baseline has a curve, or all (None) where no depth has one and each is a budget of
    its own; and why other depths have none. Raises ValueError, naming the baseline's budgets, without any, and for
    runs of different data or lengths."""
    found: dict[Any, pd.DataFrame] = {}
    refused = defaultdict[str, list[str]](list)
    for n_layers, own in rows.groupby("n_layers"):
        if names := differing_data(own):
            raise ValueError(
                f"runs differ in {names}: losses on other data or at other lengths are no matter of compute; choose "
                f"settings that share them, such as --knob depth_scale"
            )
        baseline = finished(own[own["setting"] == BASELINE])
        try:
            check_baseline(losses_by_budget(baseline))
            found[n_layers] = own
        except ValueError as error:
            tokens = ", ".join(f"{int(budget)}" for budget in sorted(set(baseline[BUDGET].dropna())))
            why = f"the baseline has train_tokens={tokens or 'NULL'}: {error}"
            none = "no run of the baseline has finished at this depth"
            refused[none if baseline.empty else why].append(str(n_layers))
    budgets = losses_by_budget(finished(rows[rows["setting"] == BASELINE]))
    are_sizes = len(budgets) > 1 and (rows.groupby("n_layers")[BUDGET].nunique() == 1).all()
    if not found and are_sizes and not differing_data(rows):
        check_baseline(budgets)
        return {None: rows}, []
    reasons = [f"n_layers={', '.join(depths)}: {reason}" for reason, depths in refused.items()]
    if not found:
        raise ValueError(f"no compute multiplier: {'; '.join(reasons) or 'no run has finished'}")
    return found, reasons


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each setting, depth and budget (`budget_rows`), with COLUMNS; of one law over sizes without n_layers.
    Raises ValueError as `with_law`, and without any setting."""
    depths, refused = with_law(rows.assign(budget=budgets_of(rows)))
    found = [
        {"n_layers": n_layers, "setting": setting} | at_budget
        for n_layers, own in depths.items()
        for setting, runs in own[own["setting"] != BASELINE].groupby("setting", sort=False)
        for at_budget in _at_budgets(finished(own[own["setting"] == BASELINE]), runs)
    ]
    if not found:
        why = "; ".join(refused) or "all runs have one setting; run a sweep over another"
        raise ValueError(f"no compute multiplier: {why}")
    table = pd.DataFrame(found, columns=[*COLUMNS])
    table.attrs["refused"] = refused
    return table.sort_values(["n_layers", "setting", "train_flops"], kind="stable").reset_index(drop=True)


class StoredLadder(NamedTuple):
    losses: Mapping[str, Losses]
    """Of each setting."""
    log_speeds: Mapping[str, np.ndarray]
    """Of each setting: ln of its speed over the baseline's, at budgets where both are known."""


def ladders_of(rows: pd.DataFrame) -> dict[int | None, StoredLadder]:
    """One run at each budget, by depth or of all sizes. Raises ValueError as `with_law`, for several runs at a budget,
    for budgets of one training, and without any setting."""
    rows = finished(rows)
    rows = rows.assign(seed=budget_of(rows["train_flops"]))  # so that speeds are of a budget
    depths = {n_layers: rows.loc[own.index] for n_layers, own in with_law(rows.assign(seed=0))[0].items()}
    shares = rows.groupby("training")[BUDGET].nunique() > 1  # points, or branches, of one training
    if shares.any() or any(own.duplicated(["setting", "seed"]).any() for own in depths.values()):
        raise ValueError(NO_LADDER)
    found = {}
    for n_layers, own in depths.items():
        sides = {str(setting): runs for setting, runs in own.groupby("setting")}
        losses = {name: losses_by_budget(runs.assign(seed=0)) for name, runs in sides.items()}
        if len(sides) > 1:
            found[n_layers] = StoredLadder(losses, {name: _speeds(sides[BASELINE], of) for name, of in sides.items()})
    if not found:
        raise ValueError(f"a ladder has a baseline and a setting at {MIN_BUDGETS} budgets or more")
    return found


def ladder_of_store(store: Store) -> StoredLadder:
    """That of most budgets. Raises ValueError as `ladders_of`, of several seeds everywhere at once."""
    if (rows := store.sql(_ALL_REPEATED).rows) and rows[0][0]:
        raise ValueError(NO_LADDER)
    return max(ladders_of(budget_rows(store)).values(), key=lambda each: len(each.losses[BASELINE]))


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


def _at_budgets(baseline: pd.DataFrame, runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows of a setting at a depth, at the optimum of lr where it is known."""
    budgets = losses_by_budget(baseline)
    of_baseline = {budget: baseline[(baseline["train_flops"] / budget - 1).abs() < MATCHED] for budget in budgets}
    lr_variance = {(False, budget): at["lr_variance"].mean() for budget, at in of_baseline.items()}
    losses: dict[float, dict[int, float]] = {}
    of_setting: list[tuple[float, float, pd.DataFrame]] = []
    for _, at in runs.groupby(["n_layers", "budget"]):
        done = finished(at)
        C = (at if done.empty else done)["train_flops"].mean()
        nearest = min(budgets, key=lambda budget: abs(math.log(budget / C)))
        of_setting.append((C, nearest, at))
        if len(done):
            base = budgets[nearest] if abs(C / nearest - 1) < MATCHED else {}
            losses[C], lr_variance[True, C] = _at_optimum(done, base, lr_variance[False, nearest])
    worths = worth_of(budgets, losses, lr_variance)
    for C, nearest, at in of_setting:
        worth = worths.get(C, Speedup(multiplier=None, reason="no run has finished"))
        n_diverged = int((at["outcome"] == "diverged").sum())
        reasons = [worth.reason, f"{n_diverged} of its runs diverged" if n_diverged else ""]
        told = {"seeds": worth.n_pairs, "diverged": n_diverged, "reason": "; ".join(filter(None, reasons))}
        told |= with_times(worth, _speeds(of_baseline[nearest], finished(at)))
        yield {BUDGET: at[BUDGET].max(), "train_flops": C, **told, **dict(zip(LAW, _of_law(worth.law), strict=True))}


def _at_optimum(
    done: pd.DataFrame, baseline: Mapping[int, float], of_baseline: float
) -> tuple[dict[int, float], float]:
    """Seed -> loss, moved to the effect of the setting on the baseline at its budget where each side has its optimum of
    lr, where that is known; and the variance that the choice of lr adds to it, or to their difference."""
    losses = {int(seed): loss for seed, loss in done["loss"].groupby(done["seed"].astype(int)).mean().items()}
    difference_S = np.array([losses[seed] - baseline[seed] for seed in losses.keys() & baseline.keys()])
    n, has_effect = len(difference_S), bool(done["effect"].notna().any())
    if not n or not has_effect:
        return losses, done["lr_variance"].mean() + (of_baseline if baseline and not has_effect else 0.0)
    moved = done["effect"].mean() - difference_S.mean()
    by_seeds = difference_S.var(ddof=1) / n if n > 1 else math.inf
    rest = max(0.0, float(done["effect_sd"].mean()) ** 2 - by_seeds)
    return {seed: loss + moved for seed, loss in losses.items()}, rest


def _of_law(law: MultiplierLaw | None) -> tuple[Any, ...]:
    if law is None:
        return (None,) * 5
    if law.is_rejected:
        return "slopes", None, law.p_misfit, None, None
    fit = law.fits[0].drifting if law.has_drift else law.fits[0].steady
    L_inf, _, alpha = fit.theta_P[:3].tolist()
    return f"power law{' with drift' * law.has_drift}", law.drift and law.drift.p, law.p_misfit, L_inf, alpha


def _speeds(baseline: pd.DataFrame, runs: pd.DataFrame) -> np.ndarray:
    """ln of FLOPs per second of the setting / the baseline's, for each seed of both; none unless all were trained on
    one kind of device."""
    if baseline["device"].dropna().nunique() != 1 or set(runs["device"].dropna()) != set(baseline["device"].dropna()):
        return np.array([])
    own, other = (
        pd.DataFrame(
            {
                "speed": (side["tokens_per_second"] * side["train_flops"] / side[BUDGET]).groupby(side["seed"]).mean(),
                "started": pd.to_datetime(side["started"], utc=True).groupby(side["seed"]).min(),
            }
        )
        for side in (runs, baseline)
    )
    hours = (own["started"] - other["started"]).abs() / pd.Timedelta(hours=1)
    is_far = hours > HOURS  # not so where a start is not known, as of imported runs
    return np.log((own["speed"] / other["speed"])[~is_far].dropna().to_numpy(float))


def in_time(worth: Speedup, speed_S: np.ndarray) -> Speedup:
    """The wall-clock multiplier, from ln of the speed of each seed; its interval has the errors of both factors."""
    if worth.multiplier is None or not len(speed_S):
        return Speedup(multiplier=None, reason=NO_TIMES)
    middle = worth.multiplier * math.exp(speed_S.mean())
    n = len(speed_S)
    if worth.lo is None or worth.hi is None or n < 2:
        return Speedup(multiplier=middle)
    half = t_critical(n - 1) * speed_S.std(ddof=1) / math.sqrt(n)
    below, above = (math.hypot(math.log(end / worth.multiplier), half) for end in (worth.lo, worth.hi))
    return Speedup(multiplier=middle, lo=middle * math.exp(-below), hi=middle * math.exp(above))


def with_times(worth: Speedup, speed_S: np.ndarray) -> Named:
    """The fields of what a setting is worth, in compute and in time."""
    timed = in_time(worth, speed_S)
    fields: Named = {"multiplier": worth.multiplier, "lo": worth.lo, "hi": worth.hi, "time_reason": timed.reason}
    return fields | {"time_multiplier": timed.multiplier, "time_lo": timed.lo, "time_hi": timed.hi}


class Multipliers(NamedTuple):
    """What `effects --as speedup` prints."""

    table: QueryResult
    at_ends: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
    """The rows of each setting and depth at its smallest and its largest budget."""
    refused: Sequence[str]


def multipliers(table: pd.DataFrame) -> Multipliers:
    """Of the rows of `speedups`."""
    settings = table.groupby(["n_layers", "setting"], sort=False, dropna=False)
    ends = [QueryResult.of_frame(side).records() for side in (settings.head(1), settings.tail(1))]
    return Multipliers(QueryResult.of_frame(table[[*SHOWN]]), [*zip(*ends, strict=True)], table.attrs["refused"])
