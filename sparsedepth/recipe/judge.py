"""The verdict on each variant of anyone's table of runs: is it an improvement, or a lucky seed?

The runs (`judge_table`) of a budget are one fit (`variants`), judged by the rule of `effects`: the variants against one
baseline are one family. Where every variant shares two seeds with the baseline, runs are paired by seed; else seeds are
numbered anew and runs are compared by the means of variants. With several budgets each variant is judged at its largest
one that the baseline has, too.

Luck: the lowest of k variants that equal the baseline seems better, on average, by sd E[max of k normal numbers], with
the sd of an effect without the part that all share through the baseline."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import ndtr

from sparsedepth.effects.verdict import Row, Side, judged, with_intervals
from sparsedepth.outside import SECONDS
from sparsedepth.quantities.quantity import Named
from sparsedepth.recipe.judge_ladder import JudgedLadder, judge_ladder
from sparsedepth.recipe.judge_table import TableRuns, check_variant, is_flops, read_runs
from sparsedepth.recipe.variants import variant_effects
from sparsedepth.scaling.ladder import MIN_BUDGETS
from sparsedepth.scaling.speedup import Losses, Speedup, check_baseline, in_time, worth_of
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.table_file import by_value
from sparsedepth.words.judge import used_text, where_option

SEED_IN_NAME = re.compile(r"(.+?)[-_ .]*(?:seed|run)?[-_ .=]*(\d+)", re.IGNORECASE)
BASELINES = ("baseline", "base", "control", "default", "reference")
MIN_SEEDS, MAX_SEEDS = 3, 1000
COLUMNS = (
    *("variant", "effect", "lo", "hi", "p_adjusted", "detectable", "verdict", "seeds", "seeds_wanted", "diverged"),
    *("budget", "multiplier", "multiplier_lo", "multiplier_hi", "time_multiplier", "reason", "baseline"),
)
WORDS = {"lower": "better", "higher": "worse", "not shown": "not shown"}
EXIT_CODES = {"better": 0, "not shown": 3, "worse": 4}
_Losses = dict[int, float]
"""Seed -> loss, of the runs that have one."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    columns: Mapping[str, str]
    """What is read -> the column it is read from."""
    baseline: str
    table: QueryResult
    """A row for each variant, lowest loss first."""
    luck: tuple[int, float] | None
    """A number of variants at one budget, and by how much the lowest of as many equal ones seems better, on average."""
    is_paired: bool
    used: str
    """'10 of 12 runs, 2 without a loss', and what was done to names and values."""
    ladder: JudgedLadder | None = None
    """Of one run at each budget, whose table has columns of its own."""

    @property
    def currency(self) -> str:
        """What multipliers are of: 'compute', or the name of the column of budgets that are no FLOPs."""
        return "compute" if is_flops(self.columns) else self.columns.get("budget", "compute")

    @property
    def verdict(self) -> str:
        """'better' if any variant is, else 'worse' if any is, else 'not shown'."""
        verdicts = {row["verdict"] for row in self.table.records()}
        return next(word for word in ("better", "worse", "not shown") if word in verdicts)


def judge(
    path: Path,
    columns: Mapping[str, str] | None = None,
    baseline: str | None = None,
    variant: str | None = None,
    asymptote: float | None = None,
    deadline: float = SECONDS,
    where: str | None = None,
) -> Judgement:
    """The verdicts, of all variants or of one. `asymptote`: L_inf of the law of a ladder, pinned; `deadline`: seconds
    without progress in which the table must be read; `where`: of these rows alone. Raises ValueError, one line."""
    table = read_runs(path, columns or {}, deadline, where)
    runs = table.runs
    low, high = runs["loss"].min(), runs["loss"].max()
    if low < 0 < high:
        told = f"{path}: {table.columns['loss']!r} is below and above 0 ({low:.4g} to {high:.4g}); lower must be better"
        raise ValueError(f"{told} in each row: negate log-likelihoods")
    baseline, variant = _baseline(table, baseline and by_value(baseline)), variant and by_value(variant)
    others = [name for name in dict.fromkeys(runs["variant"]) if name != baseline]
    if not others:
        raise ValueError(f"{path}: every run is of {baseline!r}; a verdict needs a second variant")
    if variant is not None:
        check_variant(variant, others, f" beside {baseline!r}")
    losses = _losses(runs)
    if table.is_ladder and len(losses[baseline]) >= MIN_BUDGETS:
        return _of_ladder(table, losses, baseline, variant, asymptote)
    if asymptote is not None:
        told = f"--asymptote {asymptote:g} is for a ladder: one run at each of {MIN_BUDGETS} budgets or more"
        raise ValueError(f"{told}; leave it out")
    return _of_seeds(table, losses, baseline, variant)


def _of_seeds(table: TableRuns, losses: "LossesOf", baseline: str, variant: str | None) -> Judgement:
    """Of variants with several seeds each."""
    runs = table.runs
    n_runs = Counter(zip(runs["variant"], runs["budget"], strict=True))
    pairs = [_pair(losses, n_runs, name, baseline, table.columns["variant"]) for name in losses if name != baseline]
    is_paired = "seed" in table.columns and all(len(pair.own.keys() & pair.base) > 1 for pair in pairs if pair.own)
    rows, luck = _judged(pairs, is_paired)
    curve, reason = _curve({budget: own for budget, own in losses[baseline].items() if own})
    speeds = np.log(runs["throughput"]).groupby([runs["variant"], runs["budget"]]).mean()
    records = []
    for pair in pairs:
        speed = speeds[pair.name, pair.budget] - speeds[baseline, pair.budget]
        worth = _worth(curve, pair, is_paired)
        records.append(_record(rows[pair.name].fields, worth, speed, reason) | {"baseline": baseline})
    # The lowest effect first, variants without a loss last.
    records.sort(key=lambda record: (record["effect"] is None, record["effect"], record["budget"] or 0.0))
    shown = [record for record in records if variant in (None, record["variant"])]
    bases = {pair.budget: len(pair.base) for pair in pairs}
    n_used = sum(len(pair.own) for pair in pairs) + sum(bases.values())
    return Judgement(
        columns=table.columns,
        baseline=baseline,
        table=QueryResult.of_records(shown, COLUMNS),
        luck=luck,
        is_paired=is_paired,
        used=used_text(table, n_used, "at budgets that are not compared", table.is_ladder),
    )


def _of_ladder(
    table: TableRuns, losses: "LossesOf", baseline: str, variant: str | None, asymptote: float | None
) -> Judgement:
    known = {name: {C: {0: np.mean([*of.values()])} for C, of in own.items() if of} for name, own in losses.items()}
    speed = np.log(table.runs["throughput"]).groupby([table.runs["variant"], table.runs["budget"]]).mean()
    speeds = {name: (speed[name] - speed[baseline]).dropna().to_numpy() for name in losses}
    found = judge_ladder(known, baseline, speeds, asymptote)
    n_used = int(table.runs["loss"].count())
    shown = [row for row in found.table.rows if variant in (None, row[0])]
    return Judgement(
        columns=table.columns, baseline=baseline, table=QueryResult(found.table.columns, tuple(shown)), luck=None,
        is_paired=False, used=used_text(table, n_used, "", is_ladder=True), ladder=found,
    )  # fmt: skip


def _record(fields: Named, worth: Speedup, log_speed: float, reason: str) -> Named:
    """A variant with its verdict, and what it is worth; `reason`: why the baseline has no curve."""
    timed = in_time(worth, np.array([log_speed] if math.isfinite(log_speed) else []))
    reasons = "; ".join(filter(None, [fields["reason"], reason, worth.reason]))
    told = {"verdict": WORDS[fields["verdict"]], "effect": fields["estimate"], "reason": reasons or None}
    told |= {"multiplier": worth.multiplier, "multiplier_lo": worth.lo, "multiplier_hi": worth.hi}
    return fields | told | {"time_multiplier": timed.multiplier, "seeds_wanted": _seeds_wanted(fields)}


def _baseline(table: TableRuns, given: str | None) -> str:
    """The named one; else one that is called so; else the variant with the most runs. Raises ValueError."""
    counts, place = Counter(table.runs["variant"]), f" in column {table.columns['variant']!r}"
    if given is not None:
        check_variant(given, [*counts], place)
        return given
    if named := [name for name in counts if name.lower() in BASELINES]:
        return named[0]
    if not counts:
        raise ValueError("the table has no rows; give one with a row for each run")
    (most, n), *rest = counts.most_common()
    if n == 1 and (stems := _with_a_seed(counts)):
        told = f"each variant has one run, and names such as {most!r} seem to end in a seed"
        fix = f"give {' and '.join(map(repr, stems))}, and the seeds, a column each"
        raise ValueError(f"{told}: {fix}, or name the column that has them with --column variant=NAME")
    if rest and rest[0][1] == n:
        told = f"which variant is the baseline? Name it: --baseline {most!r}, or another of {len(counts)}{place}"
        raise ValueError(f"{told}; --column variant=NAME names another column")
    return most


def _with_a_seed(names: Iterable[str]) -> list[str]:
    """The variants of names that end in a seed: several, each with the same several seeds; none of other names."""
    seeds = defaultdict[str, set[str]](set)
    for found in filter(None, map(SEED_IN_NAME.fullmatch, names)):
        seeds[found[1]].add(found[2])
    of_all = {frozenset(own) for own in seeds.values()}
    return [*seeds] if len(seeds) > 1 and len(of_all) == 1 and len(of_all.pop()) > 1 else []


# Verdicts


class JudgedPair(NamedTuple):
    """A variant and the baseline at the largest budget of both: losses, and how many runs have none."""

    name: str
    budget: float
    own: _Losses
    base: _Losses
    n_lost: tuple[int, int]


LossesOf = Mapping[str, Mapping[float, _Losses]]


def _losses(runs: pd.DataFrame) -> LossesOf:
    """Variant -> budget -> seed -> loss."""
    losses = defaultdict[str, dict[float, _Losses]](dict)
    for name, budget, seed, loss in runs[["variant", "budget", "seed", "loss"]].itertuples(index=False):
        losses[name].setdefault(budget, {}).update({} if math.isnan(loss) else {seed: loss})
    return losses


def _pair(losses: LossesOf, n_runs: Counter, name: str, baseline: str, column: str) -> JudgedPair:
    """`column`: of variants. Raises ValueError without a budget in common."""
    budget = max(losses[name].keys() & losses[baseline].keys(), default=None)
    if budget is None:
        told = f"{name!r} and the baseline {baseline!r} have no budget in common; leave one of them out"
        raise ValueError(f"{told} with {where_option(column, '!=', name)}")
    own, base = losses[name][budget], losses[baseline][budget]
    return JudgedPair(name, budget, own, base, (n_runs[name, budget] - len(own), n_runs[baseline, budget] - len(base)))


def _judged(pairs: Sequence[JudgedPair], is_paired: bool) -> tuple[dict[str, Row], tuple[int, float] | None]:
    """The variants, judged as one family at each budget, and the luck of the lowest in the largest family."""
    rows = {pair.name: _row(pair) for pair in pairs}
    lucks: list[tuple[int, float]] = []
    for budget in {pair.budget for pair in pairs}:
        family = [pair for pair in pairs if pair.budget == budget]
        known = [pair for pair in family if pair.own and pair.base]
        losses = [family[0].base, *(pair.own for pair in known)]
        sds = []
        for pair, effect in zip(known, variant_effects(losses, is_paired) if known else (), strict=True):
            row, contrast = rows[pair.name], effect.distribution
            row.contrast, row.shared, row.fields["estimate"] = contrast, effect.shared, effect.estimate
            if contrast is not None:
                row.fields["reason"] = ""
                sds.append(contrast.sd * math.sqrt(1 - effect.shared))
        if sds:
            lucks.append((len(sds), np.median(sds) * greatest_of(len(sds))))
        with_intervals(judged([rows[pair.name] for pair in family]))
    return rows, max(lucks, default=None)


def _row(pair: JudgedPair) -> Row:
    """A variant without a verdict."""
    own, base = Side(name="the variant", diverged=pair.n_lost[0]), Side(name="the baseline", diverged=pair.n_lost[1])
    fields: Named = {
        "variant": pair.name, "budget": pair.budget or None, "seeds": len(pair.own), "diverged": own.diverged,
        "verdict": "not shown",
        "reason": "no variant has runs of two seeds that differ" if pair.own else "none of its runs has a loss",
        **dict.fromkeys(("estimate", "lo", "hi", "p_adjusted", "detectable")),
    }  # fmt: skip
    return Row(fields=fields, sides=(own, base))


def greatest_of(n: int) -> float:
    """The mean of the greatest of n standard normal numbers."""
    x = np.linspace(-8, 8, 4001)
    return np.trapezoid(np.heaviside(x, 0.5) - ndtr(x) ** n, x)


def _seeds_wanted(fields: Named) -> int | None:
    """Seeds of each variant with which an effect as large as this one would be seen; None where it was, or over
    MAX_SEEDS."""
    effect, detectable = fields["estimate"], fields["detectable"]
    if fields["verdict"] != "not shown":
        return None
    if detectable is None or not effect:
        return MIN_SEEDS if detectable is None else None
    wanted = fields["seeds"] * (detectable / abs(effect)) ** 2
    return None if wanted > MAX_SEEDS else max(MIN_SEEDS, fields["seeds"] + 1, math.ceil(wanted))


def _curve(baseline: Mapping[float, _Losses]) -> tuple[Losses | None, str]:
    """The baseline's losses by budget, and why it has no law although it was run at three."""
    if len(baseline) < MIN_BUDGETS:
        return None, ""
    try:
        check_baseline(baseline)
    except ValueError as error:
        return None, f"no multiplier: {error}"
    return baseline, ""


def _worth(curve: Losses | None, pair: JudgedPair, is_paired: bool) -> Speedup:
    if curve is None or not pair.own:
        return Speedup(multiplier=None)
    # Independent runs may be paired in any order.
    in_order = dict(zip(pair.base, pair.own.values(), strict=False))
    return worth_of(curve, {pair.budget: pair.own if is_paired else in_order})[pair.budget]
