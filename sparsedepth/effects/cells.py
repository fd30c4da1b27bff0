"""Cells: the runs of a store by what they are compared on, a row per run.

    n_layers, setting, changes, lr, seed, role, value, diverged, costs

A *setting* is a configuration's difference from the baseline (`store.setting`), 'baseline' where there is none. Its
`changes` are the fields that differ, with their values. A tuned value is no part of a setting: a folder with a fixed lr
joins tuned ones as runs at that lr. The *role* is 'tuning' of runs with a seed that chose lr, else
'result'. A run that diverged has no value; it is counted, and an lr with one limits the values tried.
Runs that were scored in another way are not compared: of each depth, those scored as most are remain.

A value that tuning chose is the one with runs of the roles best, edge or tuning (`store.tuning_roles`); of several, as
from folders that chose apart, the one with the most runs. An lr at which a run diverged is no part of a curve."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.effects.fit import ByLr, CellRuns, Changes, NamedFit, fit_by_lr, fit_of, fit_with_curves
from sparsedepth.effects.verdict import Side
from sparsedepth.once import once
from sparsedepth.quantities import unit_of
from sparsedepth.quantities.quantity import Named, Row
from sparsedepth.store.comparable_loss import COMMON, OWN, loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import columns_for
from sparsedepth.store.made_with import refuse_other_code
from sparsedepth.store.schema import plain, stored_value
from sparsedepth.store.search import MATCHED
from sparsedepth.store.setting import BUDGET, Configuration, Settings, by_preset, settings_of
from sparsedepth.store.tuning_roles import CHOSEN_ROLES, parse_tuned_fields, result_rows, without_measured_models
from sparsedepth.words.plain_text import did_you_mean
from sparsedepth.words.values import assignment

BASELINE = "baseline"
COSTS = {
    "tokens": "tokens_trained",
    "flops": "train_flops",
    "params_total": "params_total",
    "params_active": "params_active",
    "time": "training_seconds",
}
"""Cost -> column of `runs`."""
MEASURE = {*fields_where(RunConfig, lambda role: role.kind == "measure")} - {"measures"}
"""Fields by which a value depends on how it was measured; what else was measured changes none."""
LOSSES = {OWN, COMMON}
ROUNDED = 0.005
"""Relative distance of values of lr that are one: 8.49e-3 in a definition, 6e-3 times the root of 2 by an extension."""
EDGE = "{} {:g} is the {}"
"""'weight_decay 0.1 is the lowest' of those tried: its optimum may lie beyond."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    runs: pd.DataFrame
    """The rows of `runs` that they were made of."""
    rows: pd.DataFrame
    settings: Settings | None
    """None without any result."""
    outcome: str
    unit: str
    """Of a difference."""
    n_tuning: int
    """Runs that served tuning alone."""
    tuned: tuple[str, ...]
    """The tuned fields. A curve is in the first; of the others, runs at values that tuning rejected are left out."""
    tuned_by: frozenset[str]
    """The outcomes by which tuning chose."""
    is_one_budget: bool = False
    """Whether the rows are those of one of several budgets at each depth."""
    other_scoring: tuple[int, ...] = ()
    """The depths of the runs that are left out, as they were scored in another way."""
    asked_baseline: Changes = frozenset()
    """The fields of the setting that was asked for as the baseline."""

    def of_outcome(self, outcome: str) -> "Cells":
        """The same cells with another outcome of the same runs, made once."""
        return self if outcome == self.outcome else self._with_outcome(outcome)

    @once
    def _with_outcome(self, outcome: str) -> "Cells":
        rows = self.rows.assign(value=values_of(self.runs, outcome).reindex(self.rows.index))
        return replace(self, rows=rows, outcome=outcome, unit=unit_of(outcome, self.runs.columns))

    @cached_property
    def depths(self) -> list["Depth"]:
        return [depth_of(self, rows) for _, rows in self.rows.groupby("n_layers")]

    @property
    def field(self) -> str:
        """The tuned field of the curve, such as 'lr'; '' without tuning."""
        return self.tuned[0] if self.tuned else ""

    @property
    def mixes_budgets(self) -> bool:
        """Whether runs of one setting and depth differ in FLOPs, and no tokens tell their budgets apart."""
        rows = self.rows.reindex(columns=["n_layers", "setting", "tokens", "flops"])
        flops = rows[rows["tokens"].isna()].groupby(["n_layers", "setting"])["flops"]
        return bool((flops.max() > (1 + MATCHED) * flops.min()).any())

    @property
    def knobs(self) -> Sequence[str]:
        """The fields that settings change, but their budget."""
        return [name for name in self.settings.label_fields if name != BUDGET] if self.settings else []

    @property
    def is_measured(self) -> bool:
        """In any run."""
        return bool(self.rows["value"].notna().any())

    @property
    def changes(self) -> dict[str, Changes]:
        """Setting -> the fields that differ from the baseline, with their values."""
        return dict(zip(self.rows["setting"], self.rows["changes"], strict=True))

    @property
    def is_tuned(self) -> bool:
        """Whether tuning chose by this outcome."""
        by_loss = self.outcome in LOSSES and self.tuned_by <= LOSSES
        return bool(self.tuned) and (self.outcome in self.tuned_by or by_loss)

    @property
    def shared_lr(self) -> float | None:
        """The lr of all runs, where it is one, known and was not tuned."""
        lr = self.runs.reindex(self.rows.index, columns=["lr"])["lr"]
        return None if self.tuned or lr.isna().any() or lr.nunique() != 1 else float(lr.iloc[0])

    @property
    def at_equal_lr(self) -> bool:
        """Whether settings are compared at equal lr first: tuning chose, and not by this outcome."""
        return bool(self.tuned) and not self.is_tuned

    def side(self, name: str, cell: "CellRuns", outside: float) -> Side:
        """What may withhold a verdict on a cell. `outside`: the probability that its optimum is beyond the lr tried."""
        return Side(name=name, edge=cell.edge if self.is_tuned else "", outside=outside, diverged=cell.n_diverged)


def cells_of(runs: pd.DataFrame, outcome: str, every_budget: bool = False, baseline: Changes = frozenset()) -> Cells:
    """The cells of these rows of `runs`; where budgets are branches, or differ by depth, those at one of each depth.
    `baseline`: fields of a setting that stands in its place. Raises ValueError for an outcome that is no number of
    `runs`."""
    unit = unit_of(outcome, runs.columns)
    runs = without_measured_models(runs)
    if "carried" in distinct(runs, "tuning"):  # a depth may have served tuning alone
        runs = runs[runs["n_layers"].isin(result_rows(runs)["n_layers"])]
    of_trained = runs
    records = _records(runs)
    settings = _settings(runs, records, baseline)
    if is_one_budget := settings is not None and not every_budget and _has_budgets(result_rows(runs), settings):
        runs = _one_budget(runs, settings, records)
        settings = _settings(runs, records, baseline)
    tuned = [*dict.fromkeys(name for text in distinct(runs, "tuned_fields") for name in parse_tuned_fields(text))]
    rows = _rows(runs, {cell: _changes(settings, record) for cell, record in records.items()}, outcome, tuned)
    alike = _scored_alike(rows, runs, ["n_layers", "setting"] if every_budget else ["n_layers"])
    return Cells(
        runs=of_trained, rows=_with_roles(alike), settings=settings, outcome=outcome, unit=unit,
        tuned=tuple(tuned), tuned_by=frozenset(distinct(runs, "tuned_by")), n_tuning=len(runs) - len(result_rows(runs)),
        is_one_budget=is_one_budget, other_scoring=tuple(rows.loc[rows.index.difference(alike.index), "n_layers"]),
        asked_baseline=baseline,
    )  # fmt: skip


def _rows(runs: pd.DataFrame, changes: Mapping[str, Row], outcome: str, tuned: Sequence[str]) -> pd.DataFrame:
    """The columns of `Cells.rows` but the role. A run at a value that tuning rejected in a second field has no row; nor
    has one at any rejected value where one of a table is 0, through whose logarithm there is no curve."""
    labels = {cell: label_of(own.items(), own) for cell, own in changes.items()}
    loss = loss_of(runs)
    lr = pd.to_numeric(runs[tuned[0]], errors="coerce").astype(float) if tuned else pd.Series(np.nan, runs.index)
    lr = joined(lr, ROUNDED)
    rows = pd.DataFrame(
        {
            "run_id": runs["run_id"],
            "n_layers": runs["n_layers"].astype(int),
            "setting": [labels[cell] for cell in runs["cell_id"]],
            "changes": [frozenset(changes[cell].items()) for cell in runs["cell_id"]],
            "lr": lr.where(lr > 0),
            "seed": runs["seed"].fillna(-1).astype(int),
            "tuning": runs.get("tuning"),
            "carry_regret": pd.to_numeric(runs["carry_regret"]) if "carry_regret" in runs else np.nan,
            "value": values_of(runs, outcome),
            "loss": values_of(runs, loss) if loss in runs else np.nan,
            "diverged": runs["outcome"] == "diverged",
            **{name: pd.to_numeric(runs[of], errors="coerce") for name, of in COSTS.items() if of in runs},
        }
    )
    if "time" in rows and "device" in runs:
        rows["time"] = off_cpus(rows["time"], runs["device"])
    rows["edge_beside"] = _edges(runs, [rows["n_layers"], rows["setting"]], tuned[1:])
    is_chosen = rows["tuning"].isin(CHOSEN_ROLES) | (len(tuned) < 2)
    of_curve = is_chosen.groupby([rows["n_layers"], rows["setting"], *map(runs.get, tuned[1:])], dropna=False)
    return rows[of_curve.transform("any") & (not (lr <= 0).any()) | ~rows["tuning"].isin(["rejected"])]


def joined(values: pd.Series, distance: float) -> pd.Series:
    """The lowest of values that are one, each within this relative distance of the next; NaN stays."""
    found = pd.Series(np.unique(values.dropna()))
    lowest = found.groupby((found.pct_change() > distance).cumsum()).transform("first")
    return values.map(dict(zip(found, lowest, strict=True)))


def label_of(changes: Iterable[tuple[str, Any]], names: Iterable[str]) -> str:
    """The setting that changes these fields, in this order: 'depth_scale=lns'."""
    values = dict(changes)
    ordered = by_preset({name: values[name] for name in names if name in values})
    return ", ".join(assignment(name, value) for name, value in ordered.items()) or BASELINE


def off_cpus(times: pd.Series, devices: pd.Series) -> pd.Series:
    """Times, or speeds, of runs on other devices: on a CPU other work, and runs beside each other, change them."""
    return times.where(~devices.astype(str).str.startswith("cpu"))


def _edges(runs: pd.DataFrame, cells: Sequence[pd.Series], names: Sequence[str]) -> pd.Series:
    """EDGE, where a number of these fields is at the end of those that its cell tried."""
    found = pd.Series("", runs.index)
    for name in names:
        values = pd.to_numeric(runs[name], errors="coerce")
        of_cell = values.groupby([*cells])
        for end, word in (("min", "lowest"), ("max", "highest")):
            is_end = (values == of_cell.transform(end)) & (of_cell.transform("nunique") > 1)
            found[is_end] = [EDGE.format(name, value, word) for value in values[is_end]]
    return found


def read_runs(store: Store, outcome: str) -> pd.DataFrame:
    """The rows of `runs` with the columns that effects on an outcome need: all but other measured ones. Raises
    ValueError for an outcome that is no number of `runs`."""
    unit_of(outcome)
    needed = {outcome, OWN, COMMON, *columns_for(outcome)}
    others = {column.name for column in quantities.RUNS if column.measure} - needed
    names = [f'"{name}"' for name in store.sql("SELECT * FROM runs LIMIT 0").columns if name not in others]
    return store.frame(f"SELECT {', '.join(names)} FROM runs")


def values_of(runs: pd.DataFrame, outcome: str) -> pd.Series:
    """The outcome on its comparison scale (linear or ln); NaN where it is missing or the run diverged. Raises
    ValueError for one that plugins of different code measured."""
    values = pd.to_numeric(runs[outcome], errors="coerce").astype(float)
    if "plugins" in runs.columns:
        refuse_other_code(outcome, runs.loc[values.notna(), "plugins"].dropna())
    if quantities.is_ratio(outcome):
        values = np.log(values.where(values > 0))
    return values.where(runs["outcome"] == "ok")


def _records(runs: pd.DataFrame) -> dict[str, Named]:
    """cell_id -> its fields, as plain values; None for a field that is no column."""
    first = runs.drop_duplicates("cell_id").reindex(columns=["cell_id", *CELL_FIELDS])
    return {
        str(cell): {name: stored_value(plain(value)) for name, value in zip(CELL_FIELDS, values, strict=True)}
        for cell, *values in first.itertuples(index=False, name=None)
    }


def _settings(runs: pd.DataFrame, records: Mapping[str, Row], baseline: Changes) -> Settings | None:
    """Of the configurations with a result; None without any."""
    if result_rows(runs).empty:
        return None
    first = runs.drop_duplicates("cell_id").reindex(columns=["cell_id", "tuned_fields"])
    configurations = [
        Configuration(cell_id=cell, tuned=frozenset(parse_tuned_fields(text)), knobs=records[cell])
        for cell, text in zip(first["cell_id"], first["tuned_fields"], strict=True)
    ]
    settings = settings_of(configurations)
    return replace(settings, baseline=replace(settings.baseline, knobs={**settings.baseline.knobs, **dict(baseline)}))


def changes_of(runs: pd.DataFrame, setting: str) -> Changes:
    """The fields in which the setting of this name differs from the baseline, for `cells_of`; none of ''. Raises
    ValueError for one that was not run."""
    if setting in ("", BASELINE):
        return frozenset()
    records = _records(without_measured_models(runs))
    settings = _settings(runs, records, frozenset())
    every = [_changes(settings, record) for record in records.values()]
    without_budget = [{name: value for name, value in own.items() if name != BUDGET} for own in every]
    labels = {label_of(own.items(), own): own for own in without_budget}
    if setting not in labels:
        hint = did_you_mean(setting, labels, f"choose one of: {'; '.join(sorted(labels))}")
        raise ValueError(f"baseline {setting!r} was not run; {hint}")
    return frozenset(labels[setting].items())


def _changes(settings: Settings | None, record: Row) -> Named:
    """The fields of a label in which a cell differs from the baseline."""
    return {**settings.changes(record)} if settings else {}


def _has_budgets(results: pd.DataFrame, settings: Settings) -> bool:
    """Whether several budgets are no setting: branches, or a depth that lacks the baseline's."""
    if BUDGET not in settings.label_fields:
        return False
    has_own = results[BUDGET].eq(settings.baseline.knobs[BUDGET]).groupby(results["n_layers"]).any()
    return distinct(results, "schedule") == ["wsd"] or not has_own.all()


def _one_budget(runs: pd.DataFrame, settings: Settings, records: Mapping[str, Row]) -> pd.DataFrame:
    """The runs of each depth at one budget, equal in tokens or in FLOPs: that with a baseline and the most settings, of
    these of most depths, the largest. Branches of one trunk are no independent runs. `scaling` compares budgets."""
    from scipy.sparse.csgraph import connected_components

    others = {cell: frozenset((_changes(settings, own) | {BUDGET: None}).items()) for cell, own in records.items()}
    cells = runs.drop_duplicates("cell_id")
    costs = cells.reindex(columns=[BUDGET, COSTS["flops"]]).apply(pd.to_numeric, errors="coerce")
    (tokens_N, flops_N), depth_N = costs.to_numpy(dtype=float).T, cells["n_layers"].to_numpy()
    is_equal_NN = (tokens_N[:, None] == tokens_N) | (np.abs(flops_N[:, None] / flops_N - 1) <= MATCHED)
    group_N = connected_components(is_equal_NN & (depth_N[:, None] == depth_N))[1]
    best: dict[int, tuple[Any, ...]] = {}
    for group, of in cells["cell_id"].map(others).groupby(group_N):
        at_N = group_N == group
        n_depths, depth = np.unique(depth_N[is_equal_NN[at_N].any(axis=0)]).size, int(depth_N[at_N][0])
        own = frozenset({(BUDGET, None)}) in {*of}, of.nunique(), n_depths, tokens_N[at_N].max(), [*of.index]
        best[depth] = max(best.get(depth, ()), own)
    kept = [index for *_, indices in best.values() for index in indices]
    return runs[runs["cell_id"].isin(runs.loc[kept, "cell_id"])]


def distinct(runs: pd.DataFrame, column: str) -> list[str]:
    """The values of a column as texts, in order; none of a column that is absent."""
    return sorted(map(str, runs[column].dropna().unique())) if column in runs.columns else []


def _scored_alike(rows: pd.DataFrame, runs: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    varying = [name for name in sorted(MEASURE) if name in runs.columns and runs[name].nunique(dropna=False) > 1]
    if not varying:
        return rows
    how = runs.loc[rows.index, varying].astype(str).fillna("").agg("\x1f".join, axis=1)
    of_baseline = {*how[rows["setting"] == BASELINE]}
    texts = how.groupby([rows[name] for name in by])
    most = texts.transform(
        lambda of: min(of.value_counts().items(), key=lambda each: (-each[1], each[0] not in of_baseline, each[0]))[0]
    )
    return rows[how == most]


def _with_roles(rows: pd.DataFrame) -> pd.DataFrame:
    """Tuning seeds are those that a sweep names, or without any those run at several lr of a setting."""
    named = rows["tuning"] == "tuning"
    n_lr = rows.groupby(["n_layers", "setting", "seed"])["lr"].transform("nunique")
    pairs = rows[named | ((n_lr > 1) & ~named.groupby(rows["n_layers"]).transform("any"))]
    tuning = set(zip(pairs["n_layers"], pairs["seed"], strict=True))
    is_tuning = [pair in tuning for pair in zip(rows["n_layers"], rows["seed"], strict=True)]
    return rows.assign(role=np.where(is_tuning, "tuning", "result"))


@dataclass(kw_only=True)
class Depth:
    depth: int
    cells: dict[str, CellRuns]
    unmeasured: list[str]
    """Settings none of whose runs has the outcome, or diverged."""
    order: list[str]
    """The cells of the fit: the tuned ones, or else those with results."""
    has_curves: bool
    sign: int
    """1 where a higher outcome is better."""

    @cached_property
    def by_lr(self) -> ByLr:
        return fit_by_lr(self.cells)

    @cached_property
    def fit(self) -> NamedFit:
        of_fit = {setting: self.cells[setting] for setting in self.order}
        if self.has_curves:
            return fit_with_curves(of_fit, self.sign)
        return fit_of({setting: cell.results for setting, cell in of_fit.items()})


def depth_of(cells: Cells, rows: pd.DataFrame) -> Depth:
    """The cells of one depth, from their rows; those that tuning covers, the baseline first, are fitted with curves."""
    columns = {str(name): column.to_numpy() for name, column in rows.items()}
    order = sorted({*columns["setting"]}, key=lambda name: (name != BASELINE, name))
    runs = {}
    for name in order:
        at_N = columns["setting"] == name
        runs[name] = {column: values_N[at_N] for column, values_N in columns.items()}
    unmeasured = [name for name, own in runs.items() if not (~np.isnan(own["value"]) | own["diverged"]).any()]
    of = {name: _cell_runs(name, runs[name], cells.field) for name in order if name not in unmeasured}
    tuned = [setting for setting, cell in of.items() if cells.is_tuned and len(cell.tried) > 1 and cell.at_lr(cell.lr)]
    return Depth(
        depth=int(rows["n_layers"].iloc[0]), cells=of, unmeasured=unmeasured, sign=quantities.sign(cells.outcome),
        order=tuned or [setting for setting, cell in of.items() if cell.results], has_curves=bool(tuned),
    )  # fmt: skip


def _cell_runs(setting: str, columns: Mapping[str, np.ndarray], field: str) -> CellRuns:
    """A setting at a depth, with the lr that its tuning chose, or that most of its runs have."""
    tuning_N = columns["tuning"].astype(str)
    cell = CellRuns(
        setting=setting, changes=columns["changes"][0], lr_N=columns["lr"], seed_N=columns["seed"],
        value_N=columns["value"], diverged_N=columns["diverged"], is_tuning_N=columns["role"] == "tuning",
        costs={name: columns[name] for name in COSTS if name in columns},
    )  # fmt: skip
    if tried := cell.tried:
        chosen_N = np.isin(tuning_N, CHOSEN_ROLES)
        cell.was_tuned = bool(chosen_N.any())
        if (carried_N := tuning_N == "carried").any():
            cell.carry_regret = float(np.fmax.reduce(columns["carry_regret"][carried_N]))
        chosen_N = next(each_N for each_N in (chosen_N, ~cell.is_tuning_N, ~np.isnan(cell.lr_N)) if each_N.any())
        losses = {lr: columns["loss"][chosen_N & (cell.lr_N == lr)] for lr in tried}
        known = {lr: own[~np.isnan(own)] for lr, own in losses.items()}
        # Most runs, of these the lowest loss: the same choice for each outcome.
        cell.lr = min(tried, key=lambda lr: (-len(losses[lr]), known[lr].mean() if len(known[lr]) else math.inf))
        ends = {tried[0]: "lowest", tried[-1]: "highest"} if len(tried) > 1 else {}
        cell.edge = max(columns["edge_beside"][chosen_N & (cell.lr_N == cell.lr)], default="")
        if cell.lr in ends:
            cell.edge = EDGE.format(field, cell.lr, ends[cell.lr])
    return cell
