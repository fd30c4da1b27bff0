"""The frame `effects` as one table and one paragraph: the same in the terminal and in the report."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.plain_text import counted, wrapped
from sparsedepth.effects.cells import Cells
from sparsedepth.effects.frame import OWN_LR, QUESTIONS
from sparsedepth.effects.verdict import ALPHA, POWER, size_text
from sparsedepth.store.query_result import QueryResult, fit

OPTIONAL = ("diverged", "basis", "seeds", "flops", "lr", "detectable")
DETAIL = ("p_adjusted", "df", "seeds_part", "lr_part")
REASONS_SHOWN = 6


def effects_table(effects: pd.DataFrame, cells: Cells) -> QueryResult:
    """The whole frame with its outcome and unit, for files; NULL where something is not known."""
    return QueryResult.of_frame(effects.assign(outcome=cells.outcome, unit=cells.unit))


def effects_text(effects: pd.DataFrame, cells: Cells, width: int | None = None, detail: bool = False) -> str:
    """What the frame says, for a terminal."""
    if effects.empty:
        return nothing_text(cells)
    names = ["n_layers", "effect", "lo", "hi", "detectable", "verdict", "lr", "basis", "seeds", "diverged", "flops"]
    names += [*(DETAIL if detail else ()), "setting"]
    is_listed = detail | effects["question"].isin(QUESTIONS) | effects["verdict"].isin(["lower", "higher"])
    shown = [_cells_of(row, cells) for row in effects[is_listed].to_dict("records")]
    rows = tuple(tuple(row[name] for name in names) for row in shown)
    table = fit(QueryResult(columns=tuple(names), rows=rows), OPTIONAL, width)
    over = "over" if cells.unit == "ln ratio" else "minus"
    lr = f", each at its own tuned {cells.field}" if cells.field else ""
    if lr and {*effects["at"].dropna()} - {"", OWN_LR}:
        lr += ", or both at the one that was run"
    head = [f"{title(cells.outcome, cells.unit)}; effect: setting {over} baseline{lr}"]
    head += [cells.settings.baseline_text if cells.settings else "", cells.budget_text]
    notes = paragraph(effects, cells)
    if hidden := int((~is_listed).sum()):
        notes.append(f"{counted(hidden, 'effect')} not shown to change with {cells.field}: listed by --detail")
    return f"{wrapped(filter(None, head), width)}{table.text}\n{wrapped(notes, width)}".rstrip("\n")


def nothing_text(cells: Cells) -> str:
    """Why there is no effect to show."""
    if cells.rows.empty:
        return "no trained run has finished: there is no effect to show"
    if cells.settings is None:
        return f"only tuning runs are complete so far ({cells.n_tuning}): there is no result to compare"
    if cells.rows["value"].isna().all():
        return f"{cells.outcome} was measured in no finished run"
    return "all results have one configuration: there is no effect to show; run a sweep"


def _cells_of(row: dict[str, Any], cells: Cells) -> dict[str, Any]:
    """The columns of a row of the table."""
    known = {name: None if is_missing(value) else value for name, value in row.items()}
    if cells.unit == "ln ratio":
        sizes = {name: known[name] for name in ("estimate", "lo", "hi", "detectable")}
        known |= {name: math.exp(size) for name, size in sizes.items() if size is not None}
    return known | {
        "n_layers": known["n_layers"] or "all",
        "effect": known["estimate"],
        "lr": lr_text(row),
        "diverged": known["diverged"] or None,
        "basis": row["basis"] if row["basis"] not in ("tokens", None) else None,
        "setting": setting_text(row),
    }


def lr_text(row: Mapping[str, Any]) -> str | None:
    """'0.003 -> 0.006', the baseline's first, where the sides differ."""
    known = [f"{row[name]:g}" for name in ("lr_baseline", "lr") if not is_missing(row[name])]
    return " -> ".join(dict.fromkeys(known)) or None


def setting_text(row: dict[str, Any]) -> str:
    """'depth_scale=lns beside weight_decay=1': the question of a row."""
    setting = row["setting"]
    if row["question"] == "beside":
        return f"{setting} beside {row['context']}"
    if row["question"] == "interaction":
        return f"{setting} with {row['context']}: more than the sum"
    if row["question"].endswith(" slope"):
        others = f" (with {row['context']})" if row["context"] else ""
        return f"{setting}: per doubling of {row['question'].removesuffix(' slope')}{others}"
    return setting


def is_missing(value: Any) -> bool:
    """Whether a cell of a frame is NULL."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def paragraph(effects: pd.DataFrame, cells: Cells) -> list[str]:
    """What the columns mean, what would narrow the intervals, and why verdicts were withheld."""
    parts = " of seeds and of the choice of lr" if cells.is_tuned else " over seeds"
    explained = (
        f"lo, hi: 95% interval{parts}; 'lower', 'higher': adjusted p below {ALPHA} over the settings of a depth; "
        f"detectable: the effect that would have been seen ({POWER:.0%} power)"
    )
    withheld: dict[str, list[str]] = {}
    for row in effects[effects["reason"].fillna("") != ""].to_dict("records"):
        depth = "" if is_missing(row["n_layers"]) else f" at n_layers={row['n_layers']}"
        withheld.setdefault(row["reason"], []).append(f"{setting_text(row)}{depth}")
    lines = [f"{'; '.join(names)}: {reason}" for reason, names in list(withheld.items())[:REASONS_SHOWN]]
    if len(withheld) > REASONS_SHOWN:
        lines.append(f"{len(withheld) - REASONS_SHOWN} more reasons: column reason of --format csv")
    if len(cells.tuned) > 1:
        also = " and ".join(cells.tuned[1:])
        lines.append(f"the curve and its error are in {cells.field} alone: {also} at the value that tuning chose")
    return [explained, *narrowing(effects, cells), *lines]


def narrowing(effects: pd.DataFrame, cells: Cells) -> list[str]:
    """'n_layers=4: seeds +-.05, choice of lr +-.07; tuning_seeds narrow it most', a sentence over all depths."""
    rows = effects[(effects["question"] == "setting") & effects["lo"].notna()]
    if not cells.is_tuned or rows.empty:
        return []
    texts = []
    for depth, at in rows.groupby(rows["n_layers"].astype(int)):
        seeds, lr = float(at["seeds_part"].median()), float(at["lr_part"].median())
        most = "more tuning_seeds" if lr > seeds else "more seeds"
        texts.append(f"{depth} layers: seeds ±{seeds:.2g}, choice of {cells.field} ±{lr:.2g} ({most} narrow it most)")
    return [f"half-widths at {'; '.join(texts)}"]


def title(outcome: str, unit: str) -> str:
    """'val_loss [nat/token], lower is better'."""
    better = quantities.IN_RUNS[outcome].better
    bracket = "" if unit in ("", "1") else f" [{'ratio' if unit == 'ln ratio' else unit}]"
    return f"{outcome}{bracket}{f', {better}er is better' if better in ('low', 'high') else ''}"


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


def interval_text(effect: Mapping[str, Any], name: str = "", more: str = "") -> str:
    """'-0.0644 nat/token (-0.0853 to -0.042)': estimate, unit and interval of a row."""
    unit, size = effect["unit"], size_text(effect["estimate"], effect["unit"], "+")
    named = size if unit in ("ln ratio", "1", "") else f"{size} {unit}"
    if is_missing(effect["lo"]) or is_missing(effect["hi"]):
        return f"{named} (no interval)"
    return f"{named} ({name}{size_text(effect['lo'], unit, '+')} to {size_text(effect['hi'], unit, '+')}{more})"


def effect_sentence(row: Mapping[str, Any]) -> str:
    """'n_layers=24, depth_scale=lns: val_loss higher, +0.034 nat/token (95% interval +0.018 to +0.051, 5 seeds)'."""
    size = interval_text(row, "95% interval ", f", {counted(int(row['seeds']), 'seed')}")
    return f"n_layers={int(row['n_layers'])}, {row['setting']}: {row['outcome']} {row['verdict']}, {size}"
