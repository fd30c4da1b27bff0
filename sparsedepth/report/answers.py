"""Two of the three questions that a sweep is run for: `query DIR --ask variance` and `--ask depth`.

Each answer is one sentence, one table and the notes to read it; all numbers are rows of the frame `effects`.
(`recipe` answers the third: which configuration to train.)"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.effects.cells import BASELINE, COSTS, MATCHED, Cells, cells_of, changes_of, distinct
from sparsedepth.effects.depths import budgets_of, depths_of
from sparsedepth.effects.frame import depth_effects, setting_effects
from sparsedepth.effects.listing import turned_at_own_lr
from sparsedepth.effects.second_look import with_second_looks
from sparsedepth.quantities import IN_RUNS
from sparsedepth.recipe.choose import DATA
from sparsedepth.scaling.crossover import SAME, Crossover, baselines_at_budgets, every_budget
from sparsedepth.scaling.shapes import ShapesAnswer, shapes_answer
from sparsedepth.store.comparable_loss import COMMON, OWN, loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import columns_for, score_rows, usable_form
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import search_of
from sparsedepth.store.setting import BUDGET, only_tuning, pending
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.degeneracy import caution
from sparsedepth.words.differences import data_text, only_tuning_text, pending_text
from sparsedepth.words.effects import lr_text, nothing_text, second_look_lines, size_text
from sparsedepth.words.plain_text import sentence_of
from sparsedepth.words.report import (
    NEEDED,
    SHOWN,
    VARIANCE,
    depth_notes,
    depth_sentence,
    harm_text,
    raised_line,
    variance_notes,
    variance_sentence,
    with_baseline,
)
from sparsedepth.words.scaling import shapes_lines

BESIDE = ("weight_sparsity", "attention_sparsity_rel", "usefulness")
"""Shown beside the variance; usefulness in its sound form."""
SHARED = ("question", "context", "basis", "at", "outcome", "unit")
"""Columns of the frame that are of a comparison, and so of both its depths."""
MOST_SETTINGS = 6
"""Rows of the table; files have all."""
YES_OR_NO = {"worth it": "yes", "not worth it": "no"}
NO_TABLE = QueryResult(columns=(), rows=())
NO_ROWS = QueryResult(columns=("outcome", "unit", "question", "setting", "n_layers", "verdict"), rows=())


@dataclass(frozen=True, kw_only=True)
class Answer:
    sentence: str
    table: QueryResult = NO_TABLE
    """For people; the last column is a text."""
    notes: tuple[str, ...] = ()
    rows: QueryResult = NO_ROWS
    """For programs: the rows of the frame, exact."""
    optional: tuple[str, ...] = ()
    judged: Sequence[Crossover] = ()
    """Of depth: those at a budget."""

    def frame(self) -> pd.DataFrame:
        return self.rows.frame()


def answer(store: Store, name: str, baseline: str = "") -> Answer:
    """The answer to one of ANSWERS, with a setting in place of the baseline. Raises ValueError for a setting that was
    not run, where only tuning is complete, and for a search."""
    if reason := only_tuning_text(only_tuning(store)):
        raise ValueError(reason)
    if search_of(store.roots) is not None:
        raise ValueError("a search chose these runs by earlier results, so no setting is compared: see `effects`")
    shapes = shapes_answer(store) if name == "depth" and not baseline else None
    if shapes is not None and shapes.decides:
        found = _of_shapes(shapes)
    else:
        runs = _read(store)
        found = ANSWERS[name](cells_of(runs, loss_of(runs), baseline=changes_of(runs, baseline)))
        if shapes is not None:
            found = replace(found, notes=(*found.notes, *shapes_lines(shapes)))
        if baseline:
            found = replace(found, sentence=with_baseline(baseline, found.sentence))
    told = sentence_of(pending_text(pending(store)))
    return replace(found, sentence=f"{found.sentence.removesuffix('.')}. {told}") if told else found


def _of_shapes(shapes: ShapesAnswer) -> Answer:
    """What a ladder of shapes says of depth per width."""
    head, first, *lines = shapes_lines(shapes)
    return Answer(sentence=f"{first}.", notes=(head, *lines), table=shapes.table, rows=shapes.table)


def _read(store: Store) -> pd.DataFrame:
    """The columns of `runs` that the answers need: reading all takes longer than the answer."""
    names = {*CELL_FIELDS, *COSTS.values(), *BESIDE, VARIANCE, NEEDED, OWN, COMMON, *columns_for("usefulness")}
    names |= {"run_id", "cell_id", "seed", "outcome", "model", "origin", "tuning", "tuned_fields", "tuned_by"}
    names |= {"source", "started", "seconds"}
    known = {column for view, column, *_ in store.schema().rows if view == "runs"}
    return store.frame(f"select {', '.join(sorted(names & known))} from runs order by run_id")


def variance_answer(cells: Cells) -> Answer:
    """The effects of all settings on the variance of the last layer, and on sparsity and usefulness beside it."""
    of_loss, cells, runs = cells, cells.of_outcome(VARIANCE), cells.runs
    if cells.settings is None or not cells.is_measured:
        return Answer(sentence=nothing_text(cells))
    usable = usable_form(BESIDE[-1], score_rows(result_rows(runs.loc[cells.rows.index]), BESIDE[-1]))
    names = [VARIANCE, *(name for name in (*BESIDE[:-1], usable.form) if name in runs and runs[name].notna().any())]
    frames = [_on_same_data(cells.of_outcome(name)) for name in names]
    variance = frames[0] = with_second_looks(frames[0], cells)
    if variance.empty:
        return Answer(sentence=data_text(cells.settings) or nothing_text(cells))
    ordered = variance["setting"].value_counts(sort=False).sort_values(ascending=False, kind="stable").index
    settings = [name for name in variance["setting"].unique() if name in ordered[:MOST_SETTINGS]]
    rows = [_variance_row(name, *frames) for name in settings]
    columns = ("n_layers", "variance", "lo", "hi", *names[1:], "lr", "verdict_at", "setting")
    return Answer(
        sentence=variance_sentence(variance) + _harm(variance, _on_same_data(of_loss), *frames[1:]),
        table=QueryResult(columns=columns, rows=tuple(rows)),
        notes=variance_notes(
            cells,
            _raised(int(variance["n_layers"].max()), names[1:], frames[1:]),
            turned_at_own_lr(variance),
            QueryResult.of_frame(variance).records(),
            caution(usable),
            len(ordered) - len(settings),
        ),
        rows=_as_table(pd.concat([frame for frame in frames if len(frame)], ignore_index=True)),
        optional=("attention_sparsity_rel", "weight_sparsity", "lo hi"),
    )


def _on_same_data(cells: Cells) -> pd.DataFrame:
    """The effects of the settings that do not change the data."""
    same_data = [name for name, changes in cells.changes.items() if {*DATA}.isdisjoint(field for field, _ in changes)]
    frame = setting_effects(cells)
    return frame[frame["setting"].isin(same_data)]


def _harm(variance: pd.DataFrame, *frames: pd.DataFrame) -> str:
    """What the settings that lower the variance at its deepest depth worsen there, as effects of these frames show; of
    quantities that have a better direction."""
    depth = variance.loc[variance["estimate"].notna(), "n_layers"].max()
    lower = variance[(variance["n_layers"] == depth) & (variance["verdict"] == "lower")]["setting"]
    harm: dict[str, list[str]] = {}
    for frame in frames:
        for row in frame[(frame["n_layers"] == depth) & frame["setting"].isin(lower)].itertuples():
            if row.verdict == {"low": "higher", "high": "lower"}.get(IN_RUNS[row.outcome].better):
                verb = "raises" if row.verdict == "higher" else "lowers"
                harm.setdefault(row.setting, []).append(f"{verb} {row.outcome}")
    return harm_text(harm)


def _raised(n_layers: int, names: Sequence[str], frames: Sequence[pd.DataFrame]) -> str:
    """The settings that are shown to raise each of these quantities at a depth."""
    higher = [frame[(frame["n_layers"] == n_layers) & (frame["verdict"] == "higher")] for frame in frames]
    return raised_line(n_layers, {name: [*frame["setting"]] for name, frame in zip(names, higher, strict=True)})


def _variance_row(setting: str, variance: pd.DataFrame, *others: pd.DataFrame) -> tuple[Any, ...]:
    """The row of a setting at its deepest depth with an effect, and its verdicts at all depths."""
    of_setting = variance[variance["setting"] == setting]
    measured = of_setting[of_setting["estimate"].notna()]
    row = (measured if len(measured) else of_setting).sort_values("n_layers").iloc[-1]
    depths = of_setting.groupby("verdict", sort=False)["n_layers"].agg(lambda at: ", ".join(map(str, at)))
    at = "; ".join(f"{verdict}: {text}" for verdict, text in depths.items())
    numbers = (row[name] for name in ("estimate", "lo", "hi"))
    sizes = [None if pd.isna(number) else size_text(number, row["unit"], times="x") for number in numbers]
    beside = [frame[(frame["setting"] == setting) & (frame["n_layers"] == row["n_layers"])] for frame in others]
    marked = [
        size_text(size, frame["unit"], "+", times="x") + "*" * (frame["verdict"] in SHOWN)
        if len(same) and pd.notna(size := (frame := same.iloc[0])["estimate"])
        else None
        for same in beside
    ]
    return (int(row["n_layers"]), *sizes, *marked, lr_text(row), at, setting)


def depth_answer(cells: Cells) -> Answer:
    """Loss, needed blocks and FLOPs of the baseline by depth, compared at equal tokens and at equal FLOPs."""
    if cells.settings is None or not cells.is_measured:
        return Answer(sentence=nothing_text(cells))
    every = every_budget(cells)
    worth = baselines_at_budgets(cells)
    is_branched = distinct(cells.runs, "schedule") == ["wsd"]  # of branches the longest are compared
    at_tokens = _depths_at(cells if is_branched else every, "tokens")
    compared = {"tokens": at_tokens, "flops": _depths_at(every, "flops", worth)}
    if all(found.empty for found in compared.values()):
        compared["none"] = _depths(cells)
        if compared["none"].empty:
            return Answer(sentence="The baseline has results at one depth only: there is nothing to say about depth.")
    rows = pd.concat([found for found in compared.values() if len(found)], ignore_index=True)
    columns = ("equal", "n_layers", "fitted", "effect", "lo", "hi", "detectable", NEEDED)
    columns += ("tokens", "flops", "lr", "seeds", "worth_it", "verdict")
    known = {one.n_layers: YES_OR_NO[one.verdict] for one in worth if one.verdict in YES_OR_NO}
    rows["worth_it"] = rows["n_layers"].map(known).where(rows["basis"] == "flops")
    records = rows.to_dict("records")
    table = QueryResult(columns=columns, rows=tuple(map(_depth_row, records))).without_empty()
    reasons = dict.fromkeys(f"{row['n_layers']} layers: {row['reason']}" for row in records if row["reason"])
    reasons |= dict.fromkeys(line for row in QueryResult.of_frame(rows).records() for line in second_look_lines(row))
    return Answer(
        sentence=depth_sentence(compared, worth, cells),
        table=table,
        notes=depth_notes(cells, table.columns, reasons),
        rows=_as_table(rows),
        optional=("seeds", "detectable", "tokens", "lr"),
        judged=worth,
    )


def _depths_at(cells: Cells, basis: str, judged: Sequence[Crossover] = ()) -> pd.DataFrame:
    """The depths of the baseline at equal tokens or FLOPs: the runs of the budget at which most depths are judged, or
    were run, the largest of several."""
    rows = cells.rows[[{name for name, _ in changes} <= {BUDGET} for changes in cells.rows["changes"]]]
    cost = rows[basis] if basis in rows else pd.Series(np.nan, rows.index)
    runs = cells.runs
    budgets = budgets_of(runs)
    means = cost.groupby([rows["n_layers"], budgets.reindex(rows.index)]).mean().dropna().sort_values()
    means = means[means > 0]
    groups = (same for _, same in means.groupby((np.log(means).diff() > 2 * MATCHED).cumsum()))
    n_judged = Counter(one.largest for one in judged)

    def rank(same: pd.Series) -> tuple[int, int, float]:
        ends = same.iloc[0] / SAME, same.iloc[-1] * SAME
        most = max((n for budget, n in n_judged.items() if budget and ends[0] <= budget <= ends[1]), default=0)
        return most, same.index.get_level_values(0).nunique(), same.iloc[-1]

    best = max(groups, key=rank, default=means)
    if best.index.get_level_values(0).nunique() < 2:
        return pd.DataFrame(columns=["n_layers"])
    of_group = pd.Series([*zip(runs["n_layers"], budgets, strict=True)], runs.index).isin([*best.index])
    if not of_group.all():
        cells = cells_of(runs[of_group], cells.outcome, baseline=cells.asked_baseline)
    found = _depths(cells)
    return found[(found["basis"] == basis) | found["estimate"].isna() | (basis == "flops")].assign(basis=basis)


def _depths(cells: Cells) -> pd.DataFrame:
    """The frame's rows of depth, after one of the depth that they are compared with."""
    rows = with_second_looks(depth_effects(cells), cells)
    if rows.empty:
        return rows
    baselines = depths_of(cells, cells.depths, {BASELINE}).cells
    first = next(iter(baselines))
    known = {"n_layers": first, "setting": f"n_layers={first}", "verdict": "", "reason": ""}
    first_of = {name: f"{name}_baseline" for name in ("lr", "seeds", "fitted", "diverged")}
    known |= {name: rows[of].iloc[0] for name, of in first_of.items()}
    # What is of an effect is not known of the depth that they are compared with.
    reference = rows.iloc[:1][[*SHARED]].assign(**dict.fromkeys(COSTS, 1.0), **known)
    rows = pd.concat([reference, rows], ignore_index=True)[[*rows.columns]]
    own = cells.rows[cells.rows["setting"] == BASELINE]
    places = own.groupby("n_layers").groups
    results = [places[depth][baselines[depth].is_result_N] for depth in rows["n_layers"]]
    for name, of in {"loss": cells.outcome, NEEDED: NEEDED, COSTS["flops"]: COSTS["flops"]}.items():
        values = pd.to_numeric(cells.runs.reindex(own.index, columns=[of])[of], errors="coerce")
        values = values.where(own["value"].notna())
        rows[name] = [values[runs].mean() for runs in results]
    return rows


def _depth_row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    row = {**row, NEEDED: round(row[NEEDED], 1)}
    forms: dict[str, str | None] = {
        "fitted": "{:.4g}",
        "estimate": "{:+.3g}",
        "lo": "{:+.3g}",
        "hi": "{:+.3g}",
        "detectable": "{:.3g}",
    }
    forms |= {NEEDED: None, "tokens": "x{:.3g}", "flops": "x{:.3g}", "lr": "{:g}", "seeds": None, "worth_it": None}
    shown = [
        None if pd.isna(row[name]) else row[name] if form is None else form.format(row[name])
        for name, form in forms.items()
    ]
    basis = {"none": "neither", "flops": "FLOPs"}.get(row["basis"], row["basis"])
    return (basis, int(row["n_layers"]), *shown, row["verdict"] or "(compared with)")


def _as_table(rows: pd.DataFrame) -> QueryResult:
    """Rows of the frame for files; NULL where something is not known."""
    rows = rows.dropna(axis=1, how="all")
    first = ["outcome", "unit"]
    return QueryResult.of_frame(rows[[*first, *(name for name in rows.columns if name not in first)]])


ANSWERS = {"variance": variance_answer, "depth": depth_answer}
"""Name of a saved question -> its answer from the cells of the loss."""
