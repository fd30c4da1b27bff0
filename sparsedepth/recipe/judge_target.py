"""Whether the mean loss of a variant is below a target, as rules of records ask: `judge TABLE --target 3.28`.

    t = (mean - target) / (sd / sqrt(n)),   p = P(T <= t), Student's with n - 1 degrees of freedom: one-sided

Shown where p, adjusted over the variants (Holm), is below RECORD, the level of public speed records. Each variant is
tested at its largest budget."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from sparsedepth.effects.verdict import adjusted
from sparsedepth.quantities.levels import POWER
from sparsedepth.quantities.quantity import Named
from sparsedepth.recipe.judge_table import check_variant, read_runs
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.small_sample import mean_interval
from sparsedepth.words.judge import used_text

RECORD = 0.01
MAX_SEEDS = 1000
COLUMNS = ("variant", "mean", "lo", "hi", "p_adjusted", "verdict", "seeds", "seeds_wanted", "budget", "target")


class TargetJudgement(NamedTuple):
    columns: Mapping[str, str]
    """What is read -> the column it is read from."""
    target: float
    table: QueryResult
    """A row for each variant, the lowest mean first."""
    used: str

    @property
    def verdict(self) -> str:
        """'better' if any variant is below the target, else 'not shown'."""
        is_below = any(row["verdict"] == "below" for row in self.table.records())
        return "better" if is_below else "not shown"


def judge_target(
    path: Path,
    columns: Mapping[str, str],
    target: float,
    variant: str | None,
    deadline: float,
    where: str | None = None,
) -> TargetJudgement:
    """Raises ValueError, one line."""
    if not math.isfinite(target):
        raise ValueError(f"--target {target} is no loss; give a number such as 3.28")
    table = read_runs(path, columns, deadline, where)
    names = [*dict.fromkeys(table.runs["variant"])]
    if variant is not None:
        check_variant(variant, names)
    known = table.runs.dropna(subset="loss")
    known = known[known["budget"] == known.groupby("variant")["budget"].transform("max")]
    records = [_of_variant(str(name), runs, target) for name, runs in known.groupby("variant", sort=False)]
    records.sort(key=lambda record: record["mean"])
    p_J = np.array([record["p_adjusted"] for record in records], float)
    tested = ~np.isnan(p_J)
    p_J[tested] = adjusted(p_J[tested], np.zeros(tested.sum()))
    for record, p in zip(records, p_J.tolist(), strict=True):
        record["p_adjusted"] = None if math.isnan(p) else p
        record["verdict"] = "below" if p < RECORD else "not shown"
        if p < RECORD:
            record["seeds_wanted"] = None
    shown = [record for record in records if variant in (None, record["variant"])]
    used = used_text(table, len(known), "at smaller budgets", is_ladder=False)
    return TargetJudgement(table.columns, target, QueryResult.of_records(shown, COLUMNS), used)


def _of_variant(name: str, runs: pd.DataFrame, target: float) -> Named:
    """The fields of a variant without a verdict; p, not yet adjusted, is None where its losses do not differ."""
    loss_S = runs["loss"].to_numpy()
    _, lo, hi = mean_interval(loss_S.tolist())
    n, mean = len(loss_S), loss_S.mean()
    sd = loss_S.std(ddof=1) if n > 1 else 0.0
    return {
        "variant": name, "mean": mean, "lo": lo, "hi": hi, "seeds": n, "target": target,
        "budget": runs["budget"].iloc[0] or None,
        "p_adjusted": stdtr(n - 1, (mean - target) / (sd / math.sqrt(n))) if sd > 0 else None,
        "seeds_wanted": _seeds_wanted((target - mean) / sd, n) if sd > 0 else None,
    }  # fmt: skip


def _seeds_wanted(effect: float, n: int) -> int | None:
    """Seeds with which a mean so far below the target, in standard deviations, would be shown with probability POWER;
    None where it is not below, or for more than MAX_SEEDS."""
    if effect <= 0:
        return None
    for seeds in range(max(2, n), MAX_SEEDS + 1):
        if effect * math.sqrt(seeds) >= stdtrit(seeds - 1, 1 - RECORD) + stdtrit(seeds - 1, POWER):
            return seeds
    return None
