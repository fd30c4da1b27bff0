"""The frame of effects as people read it: the columns and rows of its table, the verdicts that were withheld, and what
would narrow the intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import Cells, distinct
from sparsedepth.effects.frame import CARRIED_LR, EQUAL_LR, OWN_LR, QUESTIONS
from sparsedepth.quantities.quantity import Named
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.effects import lr_text, setting_text

SHOWN = (
    "n_layers",
    "fitted",
    "fitted_baseline",
    "effect",
    "lo",
    "hi",
    "detectable",
    "verdict",
    "lr",
    "basis",
    "seeds",
    "diverged",
    "flops",
)
DETAIL = ("p_adjusted", "df", "seeds_part", "lr_part")


@dataclass(frozen=True, kw_only=True)
class Listing:
    cells: Cells
    table: QueryResult
    is_one_lr_compared: bool
    """Whether some sides are compared at the one lr that was run."""
    carried_from: list[str]
    """The shapes at which carried values were chosen."""
    carry_regrets: list[str]
    """What carrying adds to the loss, where it is known."""
    n_hidden: int
    """Effects that are listed in detail alone."""
    withheld: Mapping[str, list[Named]]
    """Reason -> the rows that have it."""
    half_widths: Sequence[tuple[int, float, float]]
    """Of each depth the medians over settings of half an interval: of seeds, and of the choice of lr."""
    turned: list[Named]


def listing(effects: pd.DataFrame, cells: Cells, detail: bool = False) -> Listing:
    """Rows of the frame for people: all, but for slopes over lr that are not shown to differ from 0."""
    is_listed = detail | effects["question"].isin(QUESTIONS) | effects["verdict"].isin(["lower", "higher"])
    rows = effects[is_listed]
    sizes = rows[["fitted", "fitted_baseline", "estimate", "lo", "hi", "detectable"]]
    records = QueryResult.of_frame(rows).records()
    shown = rows.assign(
        **(np.exp(sizes) if cells.unit == "ln ratio" else sizes),
        n_layers=rows["n_layers"].astype(object).where(rows["n_layers"].notna(), "all"),
        lr=pd.Series(map(lr_text, records), rows.index, dtype=object),
        diverged=rows["diverged"].where(rows["diverged"] > 0),
        basis=rows["basis"].where(rows["basis"] != "tokens"),
        setting=[*map(setting_text, records)],
    ).rename(columns={"estimate": "effect", "lr": cells.field or "lr"})
    reasons = effects[effects["reason"].fillna("") != ""].groupby("reason", sort=False)
    measured = effects[(effects["question"] == "setting") & effects["lo"].notna() & cells.is_tuned]
    halves = measured.groupby("n_layers")[["seeds_part", "lr_part"]].median()
    columns = [cells.field or name if name == "lr" else name for name in SHOWN]
    return Listing(
        cells=cells,
        table=QueryResult.of_frame(shown[[*columns, *(DETAIL if detail else ()), "setting"]]),
        is_one_lr_compared=bool({*effects["at"].dropna()} - {"", OWN_LR, EQUAL_LR, CARRIED_LR}),
        carried_from=distinct(cells.runs, "carried_from") if (effects["at"] == CARRIED_LR).any() else [],
        carry_regrets=distinct(cells.runs, "carry_regret"),
        n_hidden=int((~is_listed).sum()),
        withheld={str(reason): QueryResult.of_frame(of).records() for reason, of in reasons},
        half_widths=[*halves.itertuples(name=None)],
        turned=turned_at_own_lr(effects),
    )


def turned_at_own_lr(effects: pd.DataFrame) -> list[Named]:
    """The settings that are shown to lower or raise an outcome at equal lr, and at own lr do the other."""
    turned = effects["estimate"] * effects["estimate_own_lr"] < 0
    shown = effects["verdict"].isin(["lower", "higher"]) & (effects["question"] == "setting")
    return QueryResult.of_frame(effects[turned & shown]).records()


def of_knob(effects: pd.DataFrame, knob: str | None, cells: Cells) -> pd.DataFrame:
    """The rows whose setting changes a field. Raises ValueError for a field that no setting changes."""
    if knob is None:
        return effects
    fields = {setting: {*dict(changes)} for setting, changes in cells.changes.items()}
    known = {"n_layers"}.union(*fields.values())
    changes = effects["setting"].map(lambda setting: knob in fields.get(setting, ()))
    chosen = effects[effects["question"] == "depth" if knob == "n_layers" else changes]
    if knob not in known or chosen.empty:
        raise ValueError(f"no two runs differ in {knob}; these runs vary: {', '.join(sorted(known))}")
    return chosen
