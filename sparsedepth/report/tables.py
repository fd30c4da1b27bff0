"""Tables of the report: named columns, and cells with a text to show and a value to sort by."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from sparsedepth import quantities
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.effects.cells import BASELINE, Cells
from sparsedepth.effects.depths import depths_of
from sparsedepth.effects.frame import setting_effects
from sparsedepth.plots.forest import LOG_UNIT
from sparsedepth.quantities.levels import ALPHA, POWER
from sparsedepth.recipe.choose import Evidence, derive
from sparsedepth.recipe.judge_ladder import JudgedLadder
from sparsedepth.scaling.speedup import Worths
from sparsedepth.store.best import Ranking
from sparsedepth.store.comparable_loss import LOSSES, loss_of
from sparsedepth.store.degeneracy import SCORES, Reason, reasons_by_run, score_rows
from sparsedepth.store.setting import Settings
from sparsedepth.store.tuning_roles import without_measured_models
from sparsedepth.words.captions import DEGENERATE
from sparsedepth.words.differences import baseline_text
from sparsedepth.words.effects import budget_text, fitted_text, in_brackets, interval_text, lr_text, size_text
from sparsedepth.words.scaling import multiplier_text
from sparsedepth.words.values import plain, readable

RESULTS = (
    *("val_loss", "val_loss_common", "val_accuracy", "solved_difficulty", "needed_layers", "affine_loss_added"),
    *("usefulness", "usefulness_loss_increase", "causal_score", "permutation_score", "residual_variance_last"),
    *("weight_sparsity", "attention_sparsity_rel", "params_total", "params_active", "train_flops", "seconds"),
)
"""Columns of the table of runs that are shown if any run has them."""
REPEATS = {"params_active": "params_total", "val_loss_common": "val_loss"}
"""Not shown where it equals the other."""
NO_CHOICE = fields_where(RunConfig, lambda role: role.kind in ("measure", "record"))


NUMBER = re.compile(r"(?![\da-f]{12}$)[x×]?([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?: (?:[(±→]|->|to ).*)?")
"""A number in front, such as 'x1.23 (1.04 to 1.46)'; no id, such as 903939903e73."""
DECIMALS = re.compile(r"([x×+]?)-?\d+(?:\.(\d+))?")


class TableCell(NamedTuple):
    text: str
    key: float | str
    """By which it is sorted: a float of a number; empty of a missing value, which comes last."""
    unit: str = ""
    """Where a column has several: numbers of one unit are sorted together."""


class TableColumn(NamedTuple):
    name: str
    meaning: str
    is_number: bool


NONE_SHOWN = TableCell("none shown", "")


class PageTable(NamedTuple):
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[TableCell, ...], ...]


def table_of(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> PageTable:
    """A table from its columns, name -> meaning, and plain values; a column of numbers and missing ones is numeric, and
    those of one unit have equal decimals."""
    by_column = [_aligned([*map(cell, values)]) for values in zip(*rows, strict=True)]
    cells = tuple(zip(*by_column, strict=True))
    known = [[row[i].key for row in cells if row[i].key != ""] for i in range(len(columns))]
    numeric = [bool(keys) and all(isinstance(key, float) for key in keys) for keys in known]
    return PageTable(
        tuple(TableColumn(*named, is_number) for named, is_number in zip(columns.items(), numeric, strict=True)), cells
    )


def cell(value: Any) -> TableCell:
    """A plain value as a cell; a TableCell is returned unchanged."""
    if isinstance(value, TableCell):
        return value
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    value = None if value is pd.NA or value is pd.NaT else plain(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, bool | list):
        value = readable(value)
    if value is None:
        return TableCell("–", "")
    if isinstance(value, str):
        number = NUMBER.fullmatch(value)
        return TableCell(readable(value), float(number[1].replace(",", "")) if number else value)
    if isinstance(value, int) and 10_000 <= abs(value) < 1e10:
        return TableCell(f"{value:,}", float(value))
    return TableCell(readable(float(value) if abs(value) >= 1e10 else value), float(value))


def _aligned(cells: list[TableCell]) -> list[TableCell]:
    """With the decimals that most of a unit need, where that leaves two digits from the first that is not 0."""
    shown = [(each, DECIMALS.fullmatch(each.text)) for each in cells]
    found: dict[str, list[int]] = {}
    for each, match in shown:
        if match and match[2]:
            found.setdefault(each.unit, []).append(len(match[2]))
    n_decimals = {unit: sorted(digits)[3 * len(digits) // 4] for unit, digits in found.items()}
    texts = [
        f"{match[1].strip('+')}{each.key:{'+' * ('+' in match[1])}.{n_decimals[each.unit]}f}"
        if match and each.unit in n_decimals
        else each.text
        for each, match in shown
    ]
    return [
        each._replace(text=text) if re.search(r"[1-9]\.?\d", text) else each
        for each, text in zip(cells, texts, strict=True)
    ]


def table_of_runs(runs: pd.DataFrame) -> PageTable:
    """One row per run, the lowest loss first: loss, varied fields, the other results; empty columns are left out."""
    loss = loss_of(runs)
    runs = runs.sort_values(loss, kind="stable", ignore_index=True)
    trained = without_measured_models(runs)
    varied = [name for name in CELL_FIELDS if name in trained and trained[name].nunique(dropna=False) > 1]
    varied = [name for name in varied if name not in NO_CHOICE]
    roles = [name for name in ("model", "tuning") if runs[name].notna().any()]
    depth = ["n_layers"] if "n_layers" not in varied and runs["n_layers"].notna().any() else []
    results = [name for name in RESULTS if runs[name].notna().any()]
    results = [name for name in results if not (name in REPEATS and runs[name].equals(runs[REPEATS[name]]))]
    names = [
        *dict.fromkeys(["run_id", *[loss] * (loss in results), *depth, *varied, *roles, "seed", "outcome", *results])
    ]
    marks = {name: reasons_by_run(name, score_rows(runs, name)) for name in names if name in SCORES}
    rows = [
        [_with_mark(value, marks[name][i]) if name in marks else value for name, value in zip(names, row, strict=True)]
        for i, row in enumerate(runs[names].itertuples(index=False))
    ]
    return table_of({name: meaning_of(name) for name in names}, rows)


def _with_mark(value: Any, reasons: Sequence[Reason]) -> TableCell:
    score = cell(value)
    return TableCell(f"{score.text} {DEGENERATE}", score.key) if reasons and score.key != "" else score


def meaning_of(name: str) -> str:
    """One line on a column of `runs`, with its unit."""
    column = next((column for column in quantities.RUNS if column.name == name), None)
    if column is not None:
        return f"{column.meaning}{in_brackets(column.unit)}"
    field = RunConfig.model_fields.get(name)
    return (field.description or "") if field is not None else ""


def table_of_effects(effects: pd.DataFrame, cells: Cells, compute: Worths) -> PageTable:
    """One row per effect of the frame; effects on the loss with their worth in compute, where it is known."""
    tokens = cells.runs.loc[cells.rows.index, "train_tokens"]
    compared = {*zip(cells.rows["n_layers"], cells.rows["setting"], tokens, strict=True)}
    worths = {key[:2]: of for key, of in compute.items() if key in compared}  # at the budget of the effect
    columns = {
        "outcome": "",
        "setting": "",
        "n_layers": "",
        "difference": "setting minus baseline, each at its own lr where that was tuned",
        "ratio": "setting over baseline, where an outcome differs by factors",
        "lo": "end of the 95% interval of seeds and of the choice of lr",
        "hi": "end of the 95% interval of seeds and of the choice of lr",
        "unit": "",
        "verdict": f"lower or higher: adjusted p below {ALPHA} over the settings of the depth",
        "detectable": f"the effect that would have been seen ({POWER:.0%} power)",
        **({"compute": "that the baseline needs for the same loss, over that of the setting"} if compute else {}),
        "lr": "of the baseline, and of the setting where it differs",
        "seeds": "",
        "diverged": "runs of the setting that diverged",
        "reason": "why a verdict was withheld",
    }

    def row(of: dict[str, Any]) -> list[Any]:
        is_ratio = of["unit"] == LOG_UNIT
        effect, low, high = (_size(of[name], of["unit"], "+") for name in ("estimate", "lo", "hi"))
        worth = worths.get((of["n_layers"], of["setting"])) if of["outcome"] in LOSSES else None
        times = f"×{multiplier_text(*worth)}" if worth else None  # '×1.13 (1.05 to 1.21)'
        return [
            *(of["outcome"], of["setting"], of["n_layers"], *((None, effect) if is_ratio else (effect, None))),
            *(low, high, "ratio" if is_ratio else of["unit"]),
            *(of["verdict"], _size(of["detectable"], of["unit"]), *([times] if compute else [])),
            *((lr_text(of) or "").replace("->", "→") or None, of["seeds"], of["diverged"], of["reason"] or None),
        ]

    return table_of(columns, map(row, effects.to_dict("records")))


def table_of_ladder(judged: JudgedLadder, settings: Settings | None) -> tuple[PageTable, str]:
    """What each setting is worth, at both ends and beyond; and the caption of the table."""
    columns = {
        "variant": "",
        "multiplier": "how much more compute the baseline would need for the same loss",
        "lo": "end of the 95% interval of runs about the law and of its form",
        "hi": "end of the 95% interval of runs about the law and of its form",
        "verdict": f"better or worse: adjusted p below {ALPHA} over the settings",
        "p_adjusted": "",
        "p_drift": "of a multiplier that changes with the budget",
        "at_smallest": "multiplier at the smallest budget, with drift",
        "at_largest": "multiplier at the largest budget, with drift",
        "beyond": "multiplier at four times the largest budget, extrapolated",
        "time_multiplier": "how much more time the baseline would need for the same loss",
        "detectable": f"the multiplier that would have been seen ({POWER:.0%} power)",
        "budgets": "",
        "reason": "",
    }
    table = judged.table.of_columns([*columns]).without_empty()
    parts = ("What each setting is worth in compute", baseline_text(settings) if settings else "")
    return table_of({name: columns[name] for name in table.columns}, table.rows), "; ".join(filter(None, parts))


def _size(value: Any, unit: str, sign: str = "") -> TableCell:
    """A difference, or for a logarithmic unit the ratio."""
    if pd.isna(value):
        return cell(None)
    return TableCell(size_text(value, unit, sign), math.exp(value) if unit == LOG_UNIT else float(value), unit)


def front_of(ranking: Ranking) -> tuple[PageTable, str]:
    """The best proposals of a search, with its front: their objectives and axes; and the caption of the table."""
    names = (ranking.by, *ranking.beside)
    axes = dict.fromkeys(("n_layers", *(ranking.search.varied if ranking.search else ())))
    columns = {name: meaning_of(name) for name in (*names, "seeds", *axes, "cell_id")}
    rows = [
        [*(row[name] for name in names), row["seeds"], *(knobs.get(name) for name in axes), row["cell_id"]]
        for row, knobs in zip(ranking.table.records(), ranking.knobs, strict=True)
    ]
    return table_of(columns, rows), f"{'Pareto front of ' * (len(names) > 1)}{', '.join(names)}: the best proposals"


def best_by_depth(cells: Cells) -> tuple[PageTable, str] | None:
    """Of each depth the setting shown to be best, or the baseline, as its recipe has it; and the caption of the table.
    None where no setting was compared."""
    frame = setting_effects(cells)
    if cells.settings is None or not cells.is_measured:
        return None
    columns = {
        "n_layers": "",
        "use": "the setting shown to be best, else the baseline",
        "lr": "",
        "seeds": "",
        cells.outcome: "mean over seeds",
        "gain": "against the baseline of this depth, with its 95% interval",
        "detectable": f"the smallest gain of another setting that would have been seen ({POWER:.0%} power)",
        "training FLOPs": "relative to the baseline",
        "time": "relative to the baseline, as measured on a GPU; of a CPU it has other work in it",
    }
    parts = [f"What to use at each depth, by {cells.outcome}", baseline_text(cells.settings), budget_text(cells)]
    parts += [f"detectable: the gain of another setting that would have been seen ({POWER:.0%} power)"]
    found = Evidence(cells, has_looks=False)
    recipes = {depth: derive(found.runs, depth, cells.outcome, evidence=found) for depth in found.depths}
    of_baseline = depths_of(cells, cells.depths, {BASELINE}).cells
    rows = []
    for depth, recipe in recipes.items():
        if recipe.candidates:
            usable = [c.setting for c in recipe.candidates if not c.refused]
            rows.append([*_best_at(cells, frame[frame["n_layers"] == depth], usable)])
        elif own := of_baseline.get(depth):
            value = fitted_text(fmean(own.results.values()), cells.unit)
            lr = None if math.isnan(own.lr) else own.lr
            rows.append([depth, "baseline", lr, len(own.results), value, NONE_SHOWN, None, "x1", "x1"])
    return (table_of(columns, rows), "; ".join(filter(None, parts))) if rows else None


def _best_at(cells: Cells, at: pd.DataFrame, usable: Collection[str]) -> Iterator[Any]:
    """The cells of a depth: what to use there, at which lr, its loss, its gain and its costs."""
    is_low = quantities.IN_RUNS[cells.outcome].better != "high"
    shown = at[at["setting"].isin(usable) & (at["verdict"] == ("lower" if is_low else "higher"))]
    shown = shown.sort_values("estimate", ascending=is_low)
    used = shown.iloc[0] if len(shown) else None
    row = at.iloc[0] if used is None else used
    side = "_baseline" if used is None else ""
    yield int(row["n_layers"])
    yield "baseline" if used is None else row["setting"]
    yield None if pd.isna(row[f"lr{side}"]) else f"{row[f'lr{side}']:g}"
    yield row[f"seeds{side}"]
    yield fitted_text(row[f"fitted{side}"], cells.unit)
    yield NONE_SHOWN if used is None else interval_text({**used, "unit": cells.unit}, "95% interval ")
    sizes = at.loc[~at["verdict"].isin(["lower", "higher"]), "detectable"].dropna()
    ends = dict.fromkeys(size_text(size, cells.unit) for size in (sizes.min(), sizes.max())) if len(sizes) else {}
    yield " to ".join(ends) or None
    for cost in ("flops", "time"):
        ratio = 1.0 if used is None else row[cost]
        yield None if pd.isna(ratio) else f"x{ratio:.3g}"
