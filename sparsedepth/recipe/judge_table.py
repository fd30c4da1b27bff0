"""The runs of anyone's table, for `judge`: which column is what, and whether a row is a run.

A row is a run where a column of seeds or of runs tells it apart. Without one, several rows of a variant may be
evaluations of one run, and are refused; but rows at budgets that differ by more than 1%, of a model that grows with the
budget, are a ladder: one run at each. A missing loss is a run that diverged. FLOPs within 1% are one budget, unless a
seed has two runs there."""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from sparsedepth.effects.depths import budget_of
from sparsedepth.store.search import MATCHED
from sparsedepth.store.table_file import Table, Texts, by_value, condition, number_of, open_table, quoted, read_texts
from sparsedepth.words.judge import where_option
from sparsedepth.words.plain_text import counted, did_you_mean

NAMES = {
    "variant": ("variant", "setting", "name", "config", "configuration", "method", "model", "experiment", "run_name",
                "record", "group", "change"),
    "seed": ("seed", "random_seed", "trial", "replicate", "rep", "run", "run_id"),
    "loss": ("val_loss", "eval_loss", "validation_loss", "final_val_loss", "final_loss", "test_loss", "loss", "val_bpb",
             "bpb"),
    "budget": ("train_flops", "flops", "compute", "train_tokens", "num_tokens", "tokens", "steps"),
    "throughput": ("tokens_per_second", "tokens_per_s", "tok_s", "tokens_s", "throughput"),
    "size": ("params", "n_params", "num_params", "params_total", "parameters", "model_size"),
    "tokens": ("train_tokens", "num_tokens", "tokens"),
    "lr": ("lr", "learning_rate", "max_lr", "peak_lr"),
}  # fmt: skip
"""What a column is -> the names by which it is found, in this order."""
NUMBERS = ("loss", "budget", "throughput", "size", "tokens")
REQUIRED = ("variant", "loss")
MIXED = 100.0
"""FLOPs over 6 x parameters x tokens may differ by this factor between rows of one unit."""
DISAGREEING = 0.1
RUN = ["variant", "budget", "seed"]
FAR, SLIPPED = 20.0, 5.0
"""A loss is far from the others of its variant beyond so many times their spread, and so many times their median."""


class TableRuns(NamedTuple):
    columns: Mapping[str, str]
    """What is read -> the column it is read from."""
    runs: pd.DataFrame
    """A row per run, in an order of its own: variant, seed, loss (NaN: diverged), budget, throughput."""
    notes: Sequence[str]
    """What was done to names and values."""
    is_ladder: bool


def find_columns(header: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """What is read -> its column: as given, else by the usual names. Raises ValueError."""
    _check_given(header, given)
    if len(header) < 2:
        raise ValueError(f"the table has one column, {', '.join(header)!r}; its first line must name the columns")
    # '_step' of wandb counts calls of its log, and is no budget.
    own = [name for name in header if not name.startswith("_")]
    inner = [(re.sub("^(config|summary|params|metrics)[./]", "", name), name) for name in own]  # as trackers export
    both = [*reversed(inner), *((name, name) for name in reversed(own))]
    plain = {re.sub(r"[^a-z0-9]+", "_", short.lower()).strip("_"): name for short, name in both}
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
    if "tokens" not in given and not ({"size", "budget"} <= {*found} and is_flops(found)):
        found.pop("tokens", None)  # it is compared with FLOPs and size
    return {name: found[name] for name in NAMES if name in found}


def _check_given(header: Sequence[str], given: Mapping[str, str]) -> None:
    """Raises ValueError for what is not read, or a column that the table does not have."""
    if unknown := [name for name in given if name not in NAMES]:
        near = did_you_mean(unknown[0], NAMES, f"choose one of {', '.join(NAMES)}")
        raise ValueError(f"--column {unknown[0]}=...: {near}")
    if absent := [name for name in given.values() if name not in header]:
        near = did_you_mean(absent[0], header, f"the table has {', '.join(header[:20])}")
        raise ValueError(f"no column {absent[0]!r}; {near}")


def read_runs(path: Path, given: Mapping[str, str], seconds: float, where: str | None = None) -> TableRuns:
    """The runs of a table, with `given`: what is read -> its column; `where`: a condition on rows. Raises ValueError
    for rows that are no runs."""

    def used(header: Sequence[str]) -> list[str]:
        of_where = () if where is None else condition(where, header).columns
        return [*dict.fromkeys([*find_columns(header, given).values(), *of_where])]

    texts = read_texts(path, used, seconds)
    try:
        return _runs_of(texts, path, given, where)
    except ValueError as error:
        raise ValueError(texts.placed(str(error))) from None


def _runs_of(texts: Texts, path: Path, given: Mapping[str, str], where: str | None) -> TableRuns:
    names = find_columns(texts.names, given)
    with open_table(texts) as table:
        if where is not None:
            table.keep(condition(where, texts.names).sql)
        runs, notes = _rows(path, table, names), table.notes
        if n_left_out := table.n_rows - len(runs):
            notes = [*notes, f"{counted(n_left_out, 'row')} left out by where"]
    if runs.empty and where is not None:
        raise ValueError(f"{path}: no row meets --where {where!r}; change it")
    _check_one_lr(runs, path, names.pop("lr", ""))
    notes = [*notes, *(_against_size(runs, path) if is_flops(names) else ())]
    is_ladder = _is_ladder(runs, path, has_runs="seed" in names)
    if not is_ladder:
        names = {kind: name for kind, name in names.items() if kind in given or kind not in ("size", "tokens")}
    twice = runs[runs.duplicated(RUN, keep=False)]
    if len(twice):
        first = twice.iloc[0]
        raise ValueError(
            f"{path}: {first['variant']!r} has seed {first['seed']!r} twice, first in row {first['row']}; remove a "
            f"row, or name the column in which they differ with --column seed=NAME or budget=NAME"
        )
    for told in (*_slip(runs, names["loss"]), *_one_name_twice(runs)):
        warnings.warn(texts.placed(told), stacklevel=2)
    runs = _one_budget(runs, names)
    runs["seed"] = pd.factorize(runs["seed"].fillna("-"))[0]
    return TableRuns(names, runs, notes, is_ladder)


def _slip(runs: pd.DataFrame, column: str) -> Iterator[str]:
    """The first loss that is far from all others of its variant, or of the variants with one run or two, as after a
    slipped decimal: its logarithm is over ln SLIPPED, and FAR median distances, from the median of the others."""
    known = runs[runs["loss"].abs() > 0].sort_values("row")
    n_runs = known.groupby("variant")["loss"].transform("size")
    found = []
    for rows in known.groupby(known["variant"].where(n_runs > 2, "")).indices.values():
        logs = np.log10(np.abs(known["loss"].to_numpy()[rows]))
        one = np.abs(logs - np.median(logs)).argmax()
        others = np.delete(logs, one)
        if len(others) < 2:
            continue
        median = np.median(others)
        spread, shift = np.median(np.abs(others - median)), logs[one] - median
        # A task that one run solves has a small loss, too, but seldom 10 or 100 times smaller.
        is_slip = abs(shift - round(shift)) < 0.05 or (shift > 0 and spread > 0)
        if is_slip and abs(shift) > max(math.log10(SLIPPED), FAR * spread):
            found.append((known.iloc[rows[one]], math.copysign(10**median, known["loss"].iloc[0])))
    for row, median in found[:1]:
        fix = where_option(column, "is distinct from", float(row["loss"]))
        more = f"; so are {len(found) - 1} more" * (len(found) > 1)
        yield (
            f"{column} is {row['loss']:g} in row {row['row']}, of {row['variant']!r}: the median of the others is "
            f"{median:.4g}; correct it if it is a slip, or leave it out with {fix}{more}"
        )


def _one_name_twice(runs: pd.DataFrame) -> Iterator[str]:
    """The first variants whose names differ only in upper case."""
    alike: dict[str, list[str]] = {}
    for name in runs["variant"].unique():
        alike.setdefault(name.lower(), []).append(name)
    for names in [names for names in alike.values() if len(names) > 1][:1]:
        told = f"{' and '.join(map(repr, names))} are taken as different variants, and differ in upper case only"
        yield f"{told}: write one name in the table if they are one"


def check_variant(name: str, names: Sequence[str], beside: str = "") -> None:
    """Raises ValueError for a variant that is not there, with what to write in its place."""
    if name not in names:
        near = did_you_mean(name, names, f"choose one of {', '.join(names[:12])}")
        raise ValueError(f"no variant {name!r}{beside}; {near}")


def _rows(path: Path, table: Table, names: Mapping[str, str]) -> pd.DataFrame:
    """A row per run, in order, its variant and seed by value. Raises ValueError for what is no number, or missing."""
    for column in (names[kind] for kind in NUMBERS if kind in names):
        is_loss = column == names["loss"]
        if rows := table.no_numbers(column, is_loss):
            empty = "; leave it empty of a run that diverged" * is_loss
            told = f"{path}: column {column!r} is {rows[0][1]!r} in row {rows[0][0]}: a number is needed"
            raise ValueError(f"{told}, without unit and separators{empty}")
    sql = {kind: (number_of if kind in NUMBERS else quoted)(column) for kind, column in names.items()}
    found = table.rows(", ".join(sql.get(kind, "NULL") for kind in NAMES), "texts")
    runs = pd.DataFrame(found, columns=["row", *NAMES]).astype(dict.fromkeys(NUMBERS, float))
    for kind in ("variant", "budget", "seed"):
        if kind in names and (absent := runs[kind].isna()).any():
            told = f"{path}: row {runs['row'][absent].iloc[0]} has no {names[kind]}"
            raise ValueError(f"{told}; fill it in, or delete the row")
    for kind in ("variant", "seed", "lr"):
        runs[kind] = [None if pd.isna(value) else by_value(value) for value in runs[kind]]
    runs["budget"] = runs["budget"].fillna(0.0)
    return runs.sort_values([*RUN, "loss", "row"], ignore_index=True)


def _is_ladder(runs: pd.DataFrame, path: Path, has_runs: bool) -> bool:
    """Whether the rows are one run at each budget: the model grows with it, or each row has a run or seed of its own;
    False where a variant has one row. `has_runs`: a column tells runs apart. Raises ValueError where without one rows
    may be evaluations of one run."""
    of_variants = runs.groupby("variant")
    steps = of_variants[["budget", "size"]].pct_change()[of_variants.cumcount() > 0]
    if has_runs:
        budget = budget_of(runs["budget"].where(runs["budget"] > 0))
        at_budgets = runs.groupby(["variant", budget])["seed"].nunique()
        is_own = of_variants["seed"].nunique() == of_variants.size()
        is_grown = ((steps["budget"] <= MATCHED) | (steps["size"] > 0)).all()
        has_budgets = len(at_budgets) > len(is_own) and at_budgets.median() == 1
        return bool(has_budgets and (is_own.all() or is_grown))
    again = runs.loc[steps.index[~((steps["budget"] > MATCHED) & (steps["size"] > 0))]]
    if len(again):
        row = again.iloc[0]
        ladder = ""
        if runs["size"].isna().all() and (steps["budget"] > MATCHED).all():
            ladder = ", of a ladder the column of sizes with --column size=NAME"
        elif not runs["budget"].any() and not runs.duplicated(["variant", "size"]).any():
            ladder = ", of a ladder the column of FLOPs or tokens with --column budget=NAME"
        raise ValueError(
            f"{path}: row {row['row']} is {row['variant']!r} again, no column tells runs apart, and evaluations of one "
            f"run are no seeds; name the column of seeds or runs with --column seed=NAME{ladder}, add one, or remove "
            "the row"
        )
    return len(steps) > 0


def _check_one_lr(runs: pd.DataFrame, path: Path, column: str) -> None:
    """Raises ValueError where a variant has runs at several lr at a budget: they are no seeds."""
    tried = runs.groupby(["variant", "budget"], sort=False)["lr"].nunique()
    for (name, _), n in tried[tried > 1].items():
        told = f"{path}: {name!r} has {n} values of {column!r} at one budget, which are no seeds"
        fix = "keep one for each variant and budget; or `sparsedepth import` with `tuned: [lr]`, then `effects`"
        raise ValueError(f"{told}; {fix}")


def is_flops(names: Mapping[str, str]) -> bool:
    """Whether budgets are FLOPs, by the name of their column."""
    return bool(re.search("flop|compute", names.get("budget", "").lower()))


def _against_size(runs: pd.DataFrame, path: Path) -> Iterator[str]:
    """A note where FLOPs are not 6 parameters x tokens. Raises ValueError where rows have other units."""
    share = (runs["budget"] / (6 * runs["size"] * runs["tokens"])).dropna()
    if share.empty:
        return
    if share.max() > MIXED * share.min():
        low, high = runs["row"][share.idxmin()], runs["row"][share.idxmax()]
        told = (
            f"FLOPs are {share.min():.2g} times 6 x parameters x tokens in row {low}, {share.max():.2g} in row {high}"
        )
        raise ValueError(f"{path}: {told}; write all budgets in one unit")
    off = share[(share - 1).abs() > DISAGREEING]
    if len(off):
        rows = f"in {len(off)} of {len(runs)} rows"
        yield f"FLOPs are {off.min():.2g} to {off.max():.2g} times 6 x parameters x tokens {rows}"


def _one_budget(runs: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """The runs with FLOPs within 1% as one budget, unless these are points of one run."""
    if not is_flops(names):
        return runs
    merged = runs.assign(budget=budget_of(runs["budget"]))
    return runs if merged.duplicated(RUN).any() else merged
