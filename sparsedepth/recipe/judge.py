"""The verdict on each variant of anyone's table of runs: is it an improvement, or a lucky seed?

A row of the table is a run: variant, loss, and where known seed, budget and throughput. Values go through the fit and
the rule of `effects`: the variants against one baseline are one family. Where every variant shares two seeds with the
baseline, runs are paired by seed; else seeds are numbered anew and runs are compared by the means of variants. With
several budgets each variant is judged at its largest one that the baseline has, too; FLOPs within 1% are one budget.

Luck: the lowest of k variants that equal the baseline seems better, on average, by sd E[max of k normal numbers], with
the sd of an effect without the part that all share through the baseline."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import ndtr

from sparsedepth.effects.fit import Fit, fit, fit_of
from sparsedepth.effects.verdict import Row, Side, judged
from sparsedepth.outside import SECONDS
from sparsedepth.scaling.points import budget_of
from sparsedepth.scaling.speedup import MIN_BUDGETS, PowerLaw, Speedup, in_time, power_law, speedup
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.table_file import Table, by_value, not_missing, number_of, open_table, quoted, read_texts
from sparsedepth.words.judge import used_text
from sparsedepth.words.plain_text import did_you_mean

NAMES = {
    "variant": ("variant", "setting", "name", "config", "configuration", "method", "model", "experiment", "run_name",
                "record", "group", "change"),
    "seed": ("seed", "random_seed", "trial", "replicate", "rep", "run", "run_id"),
    "loss": ("val_loss", "eval_loss", "validation_loss", "final_val_loss", "final_loss", "test_loss", "loss", "val_bpb",
             "bpb"),
    "budget": ("train_flops", "flops", "compute", "train_tokens", "num_tokens", "tokens", "steps", "step"),
    "throughput": ("tokens_per_second", "tokens_per_s", "tok_s", "tokens_s", "throughput"),
}  # fmt: skip
"""What a column is -> the names by which it is found, in this order."""
NUMBERS = ("loss", "budget", "throughput")
REQUIRED = ("variant", "loss")
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
    deadline: float = SECONDS,
) -> Judgement:
    """The verdicts, of all variants or of one; `deadline`: seconds without progress in which the table must be read.
    Raises ValueError, one line."""
    names, runs, notes = _read(path, columns or {}, deadline)
    baseline, variant = _baseline(runs, baseline and by_value(baseline)), variant and by_value(variant)
    others = [name for name in dict.fromkeys(runs["variant"]) if name != baseline]
    if not others:
        raise ValueError(f"{path}: every run is of {baseline!r}; a verdict needs a second variant")
    if variant is not None and variant not in others:
        raise ValueError(f"no variant {variant!r} beside {baseline!r}; {_near(variant, others)}")
    n_runs = Counter(zip(runs["variant"], runs["budget"], strict=True))
    losses = _losses_of(runs, n_runs)
    pairs = {name: _pair(losses, n_runs, name, baseline) for name in others}
    seeds = [(pair.own.keys(), pair.base.keys()) for pair in pairs.values()]
    is_paired = "seed" in names and all(len(own & base) > 1 for own, base in seeds if own)
    rows, luck = _judged(pairs, is_paired)
    curve, reason = _curve({budget: own for (name, budget), own in losses.items() if name == baseline and own})
    _add_worths(rows, pairs, curve, reason, _log_speeds(runs, baseline), is_paired)
    shown = [row for row in rows if variant in (None, row.fields["setting"])]
    return Judgement(
        columns=names,
        baseline=baseline,
        table=_table(shown, baseline),
        luck=luck,
        is_paired=is_paired,
        used=_used(runs, pairs, baseline, notes),
    )


def _losses_of(runs: pd.DataFrame, keys: Iterable[tuple[str, float]]) -> dict[tuple[str, float], "_Losses"]:
    """(variant, budget) -> seed -> loss, of the runs that have one."""
    known = dict([*runs.dropna(subset="loss").groupby(["variant", "budget"])])
    return {key: dict(zip(known[key]["seed"], known[key]["loss"], strict=True)) if key in known else {} for key in keys}


def _log_speeds(runs: pd.DataFrame, baseline: str) -> pd.Series:
    """(variant, budget) -> logarithm of its throughput over that of the baseline; NaN where one is not known."""
    speeds = np.log(runs["throughput"]).groupby([runs["variant"], runs["budget"]]).mean().rename("speed").reset_index()
    of_baseline = speeds[speeds["variant"] == baseline].set_index("budget")["speed"]
    relative = speeds["speed"] - speeds["budget"].map(of_baseline)
    return relative.set_axis(pd.MultiIndex.from_frame(speeds[["variant", "budget"]]))


def _add_worths(
    rows: Sequence[Row], pairs: Mapping[str, "JudgedPair"], curve: PowerLaw | None, reason: str, speeds: pd.Series,
    is_paired: bool,
) -> None:  # fmt: skip
    """What each variant is worth in compute and in time; `reason`: why the baseline has no curve."""
    for row in rows:
        worth = _worth(curve, pairs[row.fields["setting"]], is_paired)
        speed = speeds[row.fields["setting"], row.fields["budget"]]
        timed = in_time(worth, np.array([speed] if math.isfinite(speed) else []))
        why = "; ".join(filter(None, [row.fields["reason"], reason, worth.reason]))
        row.fields |= {"multiplier": worth.multiplier, "multiplier_lo": worth.lo, "multiplier_hi": worth.hi}
        row.fields |= {"time_multiplier": timed.multiplier, "reason": why}


def _table(rows: Sequence[Row], baseline: str) -> QueryResult:
    """The lowest effect first, variants without a loss last."""
    records = [_record(row) | {"baseline": baseline} for row in rows]
    records.sort(key=lambda record: (record["effect"] is None, record["effect"]))
    return QueryResult(columns=COLUMNS, rows=tuple(tuple(record[name] for name in COLUMNS) for record in records))


# The table


def find_columns(header: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """What is read -> its column: as given, else by the usual names. Raises ValueError."""
    if unknown := [name for name in given if name not in NAMES]:
        raise ValueError(f"--column {unknown[0]}=...: choose one of {', '.join(NAMES)}")
    if absent := [name for name in given.values() if name not in header]:
        raise ValueError(f"no column {absent[0]!r}; the table has {', '.join(header[:20])}")
    # '_step' of wandb counts calls of its log, and is no budget.
    own = [name for name in header if not name.startswith("_")]
    plain = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in reversed(own)}
    free = {name: column for name, column in plain.items() if column not in given.values()}
    found = dict(given)
    for kind, known in NAMES.items():
        column = next((free[name] for name in known if name in free), None)
        if column is not None:
            found.setdefault(kind, column)
    if missing := [name for name in REQUIRED if name not in found]:
        named = f"name it with --column {missing[0]}=NAME, one of {', '.join(header[:20])}"
        raise ValueError(f"no column is known as the {missing[0]}; {named}")
    if re.search(r"(?<![a-z])(acc(uracy)?|score|exact_match|f1)(?![a-z0-9])", found["loss"].lower()):
        told = f"column {found['loss']!r} is better when higher, and a loss is better when lower"
        raise ValueError(f"{told}; add a column 'error' with 1 minus it, and give --column loss=error")
    return {name: found[name] for name in NAMES if name in found}


def _read(path: Path, given: Mapping[str, str], seconds: float) -> tuple[dict[str, str], pd.DataFrame, Sequence[str]]:
    """The columns that are read; a row per run, in an order of its own: variant, seed, loss (NaN: diverged), budget,
    throughput; and what was done to names and values. Raises ValueError for rows that are no runs."""
    texts = read_texts(path, lambda header: [*dict.fromkeys(find_columns(header, given).values())], seconds)
    names = find_columns(texts.names, given)
    with open_table(texts) as table:
        runs, notes = _rows(path, table, names), table.notes
    twice = runs[runs.duplicated(["variant", "budget", "seed"], keep=False)]
    if len(twice) and "seed" in names:
        first = twice.iloc[0]
        raise ValueError(
            f"{path}: {first['variant']!r} has seed {first['seed']!r} twice, first in row {first['row']}; remove a "
            f"row, or name the column in which they differ with --column seed=NAME or budget=NAME"
        )
    if re.search("flop|compute", names.get("budget", "").lower()):
        merged = runs.assign(budget=budget_of(runs["budget"]))
        is_again = merged.duplicated(["variant", "budget", "seed"])
        if "seed" not in names and (is_again & ~runs.duplicated(["variant", "budget", "seed"])).any():
            raise ValueError(
                f"{path}: no column tells runs apart, and {names['budget']!r} differs by less than 1% in a variant: "
                f"evaluations of one run are no seeds; name the column of seeds or runs with --column seed=NAME"
            )
        if "seed" not in names or not is_again.any():  # else points of one run
            runs = merged
    seeds = runs["seed"] if "seed" in names else runs.groupby(["variant", "budget"]).cumcount().astype(str)
    runs["seed"] = pd.factorize(seeds.fillna("-"))[0]
    return names, runs, notes


def _rows(path: Path, table: Table, names: Mapping[str, str]) -> pd.DataFrame:
    """A row per run, in order, its variant and seed by value. Raises ValueError for what is no number, or missing."""
    for column in (names[kind] for kind in NUMBERS if kind in names):
        wrong = f"{not_missing(column)} IS NOT NULL AND TRY_CAST({quoted(column)} AS DOUBLE) IS NULL"
        if rows := table.rows(quoted(column), "texts", wrong):
            raise ValueError(f"{path}: column {column!r} is {rows[0][1]!r} in row {rows[0][0]}: a number is needed")
    sql = {kind: (number_of if kind in NUMBERS else quoted)(column) for kind, column in names.items()}
    found = table.rows(", ".join(sql.get(kind, "NULL") for kind in NAMES), "texts")
    runs = pd.DataFrame(found, columns=["row", *NAMES]).astype(dict.fromkeys(NUMBERS, float))
    for kind in ("variant", "budget"):
        if kind in names and (absent := runs[kind].isna()).any():
            raise ValueError(f"{path}: row {runs['row'][absent].iloc[0]} has no {names[kind]}")
    for kind in ("variant", "seed"):
        runs[kind] = [value and by_value(value) for value in runs[kind]]
    runs["budget"] = runs["budget"].fillna(0.0)
    return runs.sort_values(["variant", "budget", "seed", "loss", "row"], ignore_index=True)


def _used(runs: pd.DataFrame, pairs: Mapping[str, "JudgedPair"], baseline: str, notes: Sequence[str]) -> str:
    """How many of the runs are compared, and why not the others."""
    budgets = {(name, pair.budget) for name, pair in pairs.items()} | {(baseline, p.budget) for p in pairs.values()}
    has_loss = runs["loss"].notna()
    is_compared = np.array([key in budgets for key in zip(runs["variant"], runs["budget"], strict=True)])
    n_used, n_without = int((has_loss & is_compared).sum()), int((~has_loss).sum())
    rest = {"without a loss": n_without, "at budgets that are not compared": len(runs) - n_used - n_without}
    return used_text(n_used, len(runs), rest, notes)


def _near(name: str, names: Sequence[str]) -> str:
    return did_you_mean(name, names, f"choose one of {', '.join(names[:12])}")


def _baseline(runs: pd.DataFrame, given: str | None) -> str:
    """The named one; else one that is called so; else the variant with the most runs. Raises ValueError."""
    counts = Counter(runs["variant"])
    if given is not None:
        if given not in counts:
            raise ValueError(f"no variant {given!r}; {_near(given, [*counts])}")
        return given
    if named := [name for name in counts if name.lower() in BASELINES]:
        return named[0]
    if not counts:
        raise ValueError("the table has no rows; give one with a row for each run")
    (most, n), *rest = counts.most_common()
    if rest and rest[0][1] == n:
        raise ValueError(f"which variant is the baseline? Name it: --baseline {most!r}, or another of {len(counts)}")
    return most


# Verdicts


class JudgedPair(NamedTuple):
    """A variant and the baseline at the largest budget of both: losses, and how many runs have none."""

    budget: float
    own: _Losses
    base: _Losses
    n_lost: tuple[int, int]


def _pair(losses: Mapping[tuple[str, float], _Losses], n_runs: Counter, name: str, baseline: str) -> JudgedPair:
    """Raises ValueError without a budget in common."""
    common = [budget for variant, budget in losses if variant == name and (baseline, budget) in losses]
    if not common:
        raise ValueError(f"{name!r} and the baseline {baseline!r} have no budget in common; leave one of them out")
    keys = (name, max(common)), (baseline, max(common))
    own, base = (losses[key] for key in keys)
    return JudgedPair(max(common), own, base, (n_runs[keys[0]] - len(own), n_runs[keys[1]] - len(base)))


def _judged(pairs: Mapping[str, JudgedPair], is_paired: bool) -> tuple[list[Row], tuple[int, float] | None]:
    """The variants, judged as one family at each budget, and the luck of the lowest in the largest family."""
    rows: list[Row] = []
    lucks: list[tuple[int, float]] = []
    for budget in sorted({pair.budget for pair in pairs.values()}):
        at_budget = {name: pair for name, pair in pairs.items() if pair.budget == budget}
        family = [_row(name, pair, is_paired) for name, pair in at_budget.items()]
        rest = [row for row in family if row.fields["seeds"]]
        if found := _fit([*at_budget.values()], is_paired):
            sds = []
            for number, row in enumerate(rest, start=1):
                contrast, shared = found.effect(number, 0), found.share_of_baseline(number, 0)
                row.contrast, row.shared, row.fields["reason"] = contrast, shared, ""
                sds.append(contrast.sd * math.sqrt(1 - shared))
            lucks.append((len(rest), float(np.median(sds)) * greatest_of(len(rest))))
        rows += judged(family)
    return rows, max(lucks, default=None)


def _row(name: str, pair: JudgedPair, is_paired: bool) -> Row:
    """A variant without a verdict."""
    own, base = Side(name="the variant", diverged=pair.n_lost[0]), Side(name="the baseline", diverged=pair.n_lost[1])
    fields: dict[str, Any] = {
        "setting": name, "budget": pair.budget, "estimate": _difference(pair.own, pair.base, is_paired),
        "seeds": len(pair.own), "diverged": own.diverged, "verdict": "not shown",
        "reason": "no variant has runs of two seeds that differ" if pair.own else "none of its runs has a loss",
        **dict.fromkeys(("lo", "hi", "p_adjusted", "detectable")),
    }  # fmt: skip
    return Row(fields=fields, sides=(own, base))


def _fit(family: Sequence[JudgedPair], is_paired: bool) -> Fit | None:
    """Of the baseline, and of those variants that have a loss."""
    sides = [family[0].base, *(pair.own for pair in family if pair.own)]
    if len(sides) < 2 or not sides[0]:
        return None
    if is_paired:
        return fit_of(sides)
    n_C = np.array([len(side) for side in sides])
    nothing_N = np.zeros(n_C.sum(), dtype=int)
    y_N = np.array([loss for side in sides for loss in side.values()])
    cell_N = np.repeat(np.arange(len(sides)), n_C)
    found = fit(cell_N, u_N=nothing_N, seed_N=nothing_N, y_N=y_N, is_tuning_N=nothing_N > 0)
    return found and replace(found, n_C=n_C.astype(float))


def _difference(own: _Losses, base: _Losses, is_paired: bool) -> float | None:
    common = own.keys() & base.keys()
    if is_paired and common:
        return sum(own[seed] - base[seed] for seed in common) / len(common)
    return float(np.mean([*own.values()]) - np.mean([*base.values()])) if own and base else None


def greatest_of(n: int) -> float:
    """The mean of the greatest of n standard normal numbers."""
    x = np.linspace(-8, 8, 4001)
    return float(np.trapezoid(np.heaviside(x, 0.5) - ndtr(x) ** n, x))


def _record(row: Row) -> dict[str, Any]:
    fields = {**row.fields, "verdict": WORDS[row.fields["verdict"]]}
    fields |= {"variant": fields["setting"], "effect": fields["estimate"], "seeds_wanted": _seeds_wanted(fields)}
    return fields | {"reason": fields["reason"] or None, "budget": fields["budget"] or None}


def _seeds_wanted(fields: Mapping[str, Any]) -> int | None:
    """Seeds of each variant with which an effect as large as this one would be seen; None where it was, or over
    MAX_SEEDS."""
    effect, detectable = fields["estimate"], fields["detectable"]
    if fields["verdict"] != "not shown":
        return None
    if detectable is None or not effect:
        return MIN_SEEDS if detectable is None else None
    wanted = fields["seeds"] * (detectable / abs(effect)) ** 2
    return None if wanted > MAX_SEEDS else max(MIN_SEEDS, fields["seeds"] + 1, math.ceil(wanted))


def _curve(baseline: Mapping[float, _Losses]) -> tuple[PowerLaw | None, str]:
    """The baseline's loss against its budgets, and why there is none although it was run at three."""
    if len(baseline) < MIN_BUDGETS:
        return None, ""
    try:
        return power_law(baseline), ""
    except ValueError as error:
        return None, f"no multiplier: {error}"


def _worth(curve: PowerLaw | None, pair: JudgedPair, is_paired: bool) -> Speedup:
    if curve is None:
        return Speedup(multiplier=None)
    # Independent runs may be paired in any order.
    in_order = dict(zip(pair.base, pair.own.values(), strict=False))
    return speedup(curve, pair.base, pair.own if is_paired else in_order)
