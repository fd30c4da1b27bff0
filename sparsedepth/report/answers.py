"""Two of the three questions that a sweep is run for: `query DIR --ask variance` and `--ask depth`.

Each answer is one sentence, one table and the notes to read it; all numbers are rows of the frame `effects`.
(`recipe` answers the third: which configuration to train.)"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.effects.cells import BASELINE, COSTS, MATCHED, Cells, cells_of, distinct
from sparsedepth.effects.frame import depth_effects, effects_frame, setting_effects
from sparsedepth.effects.listing import listing, turned_at_own_lr
from sparsedepth.quantities import is_ratio
from sparsedepth.quantities.levels import ALPHA, POWER
from sparsedepth.recipe.choose import DATA
from sparsedepth.store.comparable_loss import COMMON, OWN, loss_of
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import columns_for, score_rows, usable_form
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import search_of
from sparsedepth.store.setting import BUDGET, only_tuning
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.degeneracy import caution
from sparsedepth.words.differences import baseline_text, data_text, depth_text, only_tuning_text
from sparsedepth.words.effects import (
    budget_text,
    compared_at,
    effects_text,
    lr_text,
    nothing_text,
    own_lr_line,
    size_text,
)
from sparsedepth.words.plain_text import counted, wrapped
from sparsedepth.words.scaling import flops_text
from sparsedepth.words.table import fitted_table

VARIANCE, NEEDED = "residual_variance_last", "needed_layers"
BESIDE = ("weight_sparsity", "attention_sparsity_rel", "usefulness")
"""Shown beside the variance; usefulness in its sound form."""
SHOWN = ("lower", "higher")
MOST_SETTINGS = 6
"""Rows of the table; files have all."""
MOST_NAMED = 2
NO_COST = "no runs at equal FLOPs: no sentence about cost"
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
    whole: str = ""
    """The text for people, where another command prints it."""

    def text(self, width: int | None = None) -> str:
        if self.whole:
            return self.whole
        head = wrapped([self.sentence], width)
        if not self.table.rows:
            return head.rstrip("\n")
        table = fitted_table(self.table, self.optional, width).text
        return f"{head}{table}\n{wrapped(self.notes, width)}".rstrip("\n")


def answer(store: Store, name: str) -> Answer:
    """The answer to one of ANSWERS. Raises ValueError where only tuning is complete, and for a search."""
    if reason := only_tuning_text(only_tuning(store)):
        raise ValueError(reason)
    if search_of(store.roots) is not None:
        raise ValueError("a search chose these runs by earlier results, so no setting is compared: see `effects`")
    runs = _read(store)
    return ANSWERS[name](cells_of(runs, loss_of(runs)))


def _read(store: Store) -> pd.DataFrame:
    """The columns of `runs` that the answers need: reading all takes longer than the answer."""
    names = {*CELL_FIELDS, *COSTS.values(), *BESIDE, VARIANCE, NEEDED, OWN, COMMON, *columns_for("usefulness")}
    names |= {"run_id", "cell_id", "seed", "outcome", "model", "origin", "tuning", "tuned_fields", "tuned_by"}
    known = {column for view, column, *_ in store.schema().rows if view == "runs"}
    return store.frame(f"select {', '.join(sorted(names & known))} from runs order by run_id")


def variance_answer(cells: Cells) -> Answer:
    """The effects of all settings on the variance of the last layer, and on sparsity and usefulness beside it."""
    cells, runs = cells.of_outcome(VARIANCE), cells.runs
    if cells.settings is None or cells.rows["value"].isna().all():
        return Answer(sentence=nothing_text(cells))
    usable = usable_form(BESIDE[-1], score_rows(result_rows(runs.loc[cells.rows.index]), BESIDE[-1]))
    names = [VARIANCE, *(name for name in (*BESIDE[:-1], usable.form) if name in runs and runs[name].notna().any())]
    same_data = [name for name, changes in cells.changes.items() if {*DATA}.isdisjoint(field for field, _ in changes)]
    frames = {name: setting_effects(cells.of_outcome(name)) for name in names}
    frames = {name: frame[frame["setting"].isin(same_data)] for name, frame in frames.items()}
    variance = frames[VARIANCE]
    if variance.empty:
        return Answer(sentence=data_text(cells.settings) or nothing_text(cells))
    ordered = sorted(dict.fromkeys(variance["setting"]), key=lambda name: -(variance["setting"] == name).sum())
    settings = [name for name in dict.fromkeys(variance["setting"]) if name in ordered[:MOST_SETTINGS]]
    rows = [_variance_row(name, *frames.values()) for name in settings]
    compared = compared_at(cells.field, cells.at_equal_lr)
    notes = [
        f"variance, lo, hi: {VARIANCE} of the setting over that of the baseline at n_layers{compared}, with 95% "
        f"interval; verdict_at: by depth; lower, higher: adjusted p below {ALPHA}"
        + f"; lr decides: not shown, or of another sign, at the {cells.field} of one side"
        * cells.at_equal_lr,
        *map(own_lr_line, turned_at_own_lr(variance)),
        "other columns: differences from the baseline; *: lower or higher, as above; lr: baseline -> setting",
        baseline_text(cells.settings),
        data_text(cells.settings),
        budget_text(cells),
        caution(usable),
        f"{len(ordered) - len(settings)} more settings: --format csv" if len(ordered) > len(settings) else "",
    ]
    columns = ("n_layers", "variance", "lo", "hi", *names[1:], "lr", "verdict_at", "setting")
    return Answer(
        sentence=_variance_sentence(variance),
        table=QueryResult(columns=columns, rows=tuple(rows)),
        notes=tuple(filter(None, notes)),
        rows=_as_table(pd.concat([frame for frame in frames.values() if len(frame)], ignore_index=True)),
        optional=("attention_sparsity_rel", "weight_sparsity", "lo hi"),
    )


def _variance_row(setting: str, variance: pd.DataFrame, *others: pd.DataFrame) -> tuple[Any, ...]:
    of_setting = variance[variance["setting"] == setting]
    measured = of_setting[of_setting["estimate"].notna()]
    row = (measured if len(measured) else of_setting).sort_values("n_layers").iloc[-1]
    depths = of_setting.groupby("verdict", sort=False)["n_layers"].agg(lambda at: ", ".join(map(str, at)))
    at = "; ".join(f"{verdict} {text}" for verdict, text in depths.items())
    numbers = (row[name] for name in ("estimate", "lo", "hi"))
    sizes = [None if pd.isna(number) else size_text(number, row["unit"], times="x") for number in numbers]
    beside = [frame[(frame["setting"] == setting) & (frame["n_layers"] == row["n_layers"])] for frame in others]
    marked = [_marked(same.iloc[0]) if len(same) else None for same in beside]
    return (int(row["n_layers"]), *sizes, *marked, lr_text(row), at, setting)


def _marked(row: Mapping[str, Any]) -> str | None:
    """'+0.012*': an effect, marked where it is shown."""
    if pd.isna(row["estimate"]):
        return None
    return size_text(row["estimate"], row["unit"], "+", times="x") + "*" * (row["verdict"] in SHOWN)


def _variance_sentence(variance: pd.DataFrame) -> str:
    """On the deepest depth with an effect."""
    judged = variance[variance["estimate"].notna()]
    if judged.empty:
        return f"No setting is compared in its residual variance: {variance['reason'].iloc[-1]}."
    depth = judged["n_layers"].max()
    at = variance[variance["n_layers"] == depth]
    lower, higher, decided = ([*at.loc[at["verdict"] == word, "setting"]] for word in (*SHOWN, "lr decides"))
    if lower or higher:
        shown = [(word, names) for word, names in (("lower", lower), ("raise", higher)) if names]
        first, *second = (f"{_named(names)} {word}{'s' * (len(names) == 1)}" for word, names in shown)
        text = f"At {depth} layers {first} the residual variance{''.join(f', and {other} it' for other in second)}"
    else:
        text = f"At {depth} layers no setting is shown to change the residual variance{_missed(at, VARIANCE)}"
    return f"{text}{f'; lr decides for {_named(decided)}' if decided else ''}."


def _named(settings: Sequence[str]) -> str:
    """'depth_scale=lns, weight_decay=1 and 3 more settings', those of the fewest fields first."""
    ordered = sorted(settings, key=lambda name: name.count(","))
    named = ordered[:MOST_NAMED] if len(ordered) > MOST_NAMED + 1 else ordered
    if len(ordered) > len(named):
        named = [*named, counted(len(ordered) - len(named), "more setting")]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def _missed(rows: pd.DataFrame, outcome: str) -> str:
    """'; a change smaller than about 0.5 nat/token would probably not have been seen'."""
    size = rows["detectable"].median()
    if pd.isna(size):
        return ""
    unit = "" if is_ratio(outcome) else f" {rows['unit'].iloc[0]}"
    factor = "a factor nearer to 1 than about " if is_ratio(outcome) else "a change smaller than about "
    return f"; {factor}{size_text(abs(size), rows['unit'].iloc[0], times='')}{unit} would probably not have been seen"


def depth_answer(cells: Cells) -> Answer:
    """Loss, needed blocks and FLOPs of the baseline by depth, compared at equal tokens and at equal FLOPs."""
    loss = cells.outcome
    if cells.settings is None or cells.rows["value"].isna().all():
        return Answer(sentence=nothing_text(cells))
    every = cells
    if cells.is_one_budget and distinct(cells.runs, "schedule") != ["wsd"]:  # of branches the longest are compared
        every = cells_of(cells.runs, loss, every_budget=True)
    compared = {basis: _depths_at(every, basis) for basis in ("tokens", "flops")}
    if all(found.empty for found in compared.values()):
        compared["none"] = _depths(cells)
        if compared["none"].empty:
            return Answer(sentence="The baseline has results at one depth only: there is nothing to say about depth.")
    rows = pd.concat([found for found in compared.values() if len(found)], ignore_index=True)
    columns = ("equal", "n_layers", loss, "effect", "lo", "hi", "detectable", NEEDED)
    columns += ("tokens", "flops", "lr", "seeds", "verdict")
    records = rows.to_dict("records")
    table = QueryResult(columns=columns, rows=tuple(map(_depth_row, records))).without_empty()
    own = f", each at its own {cells.field}" if cells.field else ""
    seen = f", with 95% interval; detectable: the effect that would have been seen ({POWER:.0%} power)"
    notes = [
        f"effect: {loss} minus that of the shallowest depth [{cells.unit}]{own}{seen if 'lo' in table.columns else ''}",
        "equal: what both depths share; tokens, flops (training): of a run, relative to the shallowest depth",
        "" if NEEDED in table.columns else f"{NEEDED} was measured in no run (measure: usefulness)",
        *dict.fromkeys(f"{row['n_layers']} layers: {row['reason']}" for row in records if row["reason"]),
        *depth_text(cells.settings).splitlines(),
        baseline_text(cells.settings),
    ]
    return Answer(
        sentence=_depth_sentence(compared, cells),
        table=table,
        notes=tuple(filter(None, notes)),
        rows=_as_table(rows),
        optional=("seeds", "detectable", "tokens", "lr"),
    )


def _depths_at(cells: Cells, basis: str) -> pd.DataFrame:
    """The depths of the baseline at equal tokens or FLOPs: the runs of the budget with the most depths, the largest of
    several."""
    rows = cells.rows[[{name for name, _ in changes} <= {BUDGET} for changes in cells.rows["changes"]]]
    cost = rows[basis] if basis in rows else pd.Series(np.nan, rows.index)
    runs, budget = cells.runs, cells.runs.loc[rows.index, "train_tokens"]
    means = cost.groupby([rows["n_layers"], budget]).mean().dropna().sort_values()
    means = means[means > 0]
    groups = (same for _, same in means.groupby((np.log(means).diff() > 2 * MATCHED).cumsum()))
    best = max(groups, key=lambda same: (same.index.get_level_values(0).nunique(), same.iloc[-1]), default=means)
    if best.index.get_level_values(0).nunique() < 2:
        return pd.DataFrame(columns=["n_layers"])
    of_group = pd.Series([*zip(runs["n_layers"], runs["train_tokens"], strict=True)], runs.index).isin([*best.index])
    found = _depths(cells if of_group.all() else cells_of(runs[of_group], cells.outcome))
    return found[(found["basis"] == basis) | found["estimate"].isna() | (basis == "flops")].assign(basis=basis)


def _depths(cells: Cells) -> pd.DataFrame:
    """The frame's rows of depth, after one of the depth that they are compared with."""
    rows = depth_effects(cells)
    if rows.empty:
        return rows
    baselines = {at.depth: at.cells[BASELINE] for at in cells.depths if BASELINE in at.cells}
    first = next(depth for depth, cell in baselines.items() if cell.results)
    unknown = dict.fromkeys(("estimate", "lo", "hi", "detectable", "p", "p_adjusted", "df"), np.nan)
    known = {"n_layers": first, "setting": f"n_layers={first}", "verdict": "", "reason": ""}
    known |= {"lr": rows["lr_baseline"].iloc[0], "seeds": rows["seeds_baseline"].iloc[0]}
    reference = rows.iloc[:1].assign(**unknown, **dict.fromkeys(COSTS, 1.0), **known)
    rows = pd.concat([reference, rows], ignore_index=True)
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
    forms = {"loss": None, "estimate": "{:+.3g}", "lo": "{:+.3g}", "hi": "{:+.3g}", "detectable": "{:.3g}"}
    forms |= {NEEDED: None, "tokens": "x{:.3g}", "flops": "x{:.3g}", "lr": "{:g}", "seeds": None}
    shown = [
        None if pd.isna(row[name]) else row[name] if form is None else form.format(row[name])
        for name, form in forms.items()
    ]
    basis = {"none": "neither", "flops": "FLOPs"}.get(row["basis"], row["basis"])
    return (basis, int(row["n_layers"]), *shown, row["verdict"] or "(compared with)")


def _depth_sentence(compared: Mapping[str, pd.DataFrame], cells: Cells) -> str:
    if "none" in compared:
        return f"The depths differ in tokens and in FLOPs: what depth alone does is not shown; {NO_COST}."
    parts = []
    for basis, name in (("tokens", "tokens"), ("flops", "FLOPs")):
        rows = compared[basis]
        if rows.empty:
            parts.append(NO_COST if basis == "flops" else "no runs at equal tokens")
            continue
        shown = rows[rows["verdict"].isin(SHOWN)].sort_values("estimate")
        if shown.empty:
            text = f"no depth is shown to have another {cells.outcome}{_missed(rows, cells.outcome)}"
        else:
            best = shown.iloc[0]
            less = "less" if best["estimate"] < 0 else "more"
            size = f"{abs(best['estimate']):.3g} {cells.unit}"
            text = f"{best['n_layers']} layers have {size} {less} {cells.outcome} than {int(rows['n_layers'].min())}"
            if basis == "flops":
                text += f": depth {'earns' if less == 'less' else 'does not earn'} its cost"
        budget = f" ({flops_text(rows[COSTS['flops']].mean())})" if basis == "flops" else ""
        parts.append(f"at equal {name}{budget} {text}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _as_table(rows: pd.DataFrame) -> QueryResult:
    """Rows of the frame for files; NULL where something is not known."""
    rows = rows.dropna(axis=1, how="all")
    first = ["outcome", "unit"]
    return QueryResult.of_frame(rows[[*first, *(name for name in rows.columns if name not in first)]])


def effects_answer(cells: Cells) -> Answer:
    """The whole frame, as `sparsedepth effects` prints it."""
    frame = effects_frame(cells)
    return Answer(sentence="", rows=QueryResult.of_frame(frame), whole=effects_text(listing(frame, cells)))


ANSWERS: Mapping[str, Callable[[Cells], Answer]] = {
    "variance": variance_answer,
    "depth": depth_answer,
    "effects": effects_answer,
}
"""Name of a saved question -> its answer from the cells of the loss."""
