"""The frame `effects`: every question at every depth, one row each. Table, figure, recipe and report filter it.

    setting       a setting at the baseline:  value(setting) - value(baseline), each at its own lr
    beside        the same on top of another setting, its `context`:  value(both) - value(context)
    interaction   value(both) - value(setting) - value(context) + value(baseline)
    depth         the baseline at a depth against the shallowest
    depth slope   the change of a setting's effect per doubling of depth
    width slope, budget slope   per doubling of d_model, of train_tokens: the setting beside each size that was run
    lr slope      per doubling of the tuned lr, both sides at the same lr

Values are those of `effects.fit`, one fit per depth. A cell that was run at one lr alone is compared at that lr (`at`).
P-values are adjusted over the rows of a question at one depth. Ratios are differences of natural logarithms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import BASELINE, COSTS, CellRuns, Cells, Depth, depths_of, fit_of
from sparsedepth.effects.fit import Fit
from sparsedepth.effects.verdict import Distribution, Row, Side, judged

COLUMNS = (
    *("question", "setting", "context", "n_layers", "basis", "at"),
    *("estimate", "lo", "hi", "df", "p", "p_adjusted", "detectable", "verdict", "reason"),
    *("seeds_part", "lr_part", "lr", "lr_baseline", "seeds", "seeds_baseline", "diverged", "diverged_baseline"),
    *COSTS,
    "baseline_value",
)
TEXTS = ("question", "setting", "context", "basis", "at", "verdict", "reason")
COUNTS = ("n_layers", "seeds", "seeds_baseline", "diverged", "diverged_baseline")
SIZES = {"d_model": "width slope", "train_tokens": "budget slope"}
"""The last question, the slope over the tuned field, has the name of that field: 'lr slope'."""
QUESTIONS = ("setting", "depth", "beside", "interaction", "depth slope", *SIZES.values())
MATCHED = 0.01
"""A cost is equal if both sides agree to 1%."""
OWN_LR = "own lr"


def effects_frame(cells: Cells) -> pd.DataFrame:
    """Every question that these cells answer, a row each, in the order of depths."""
    depths = depths_of(cells)
    rows: list[Row] = []
    for at in depths:
        rows += [*judged(_settings(cells, at)), *_combinations(cells, at)]
        rows += [row for name in SIZES for row in judged(_size_slopes(cells, at, name))]
        rows += judged(_lr_slopes(cells, at))
    rows += judged(_depth_slopes(rows))
    rows += judged(_depths(cells, depths))
    order = [*QUESTIONS, _tuned_slope(cells)]
    rows.sort(key=lambda row: order.index(row.fields["question"]))
    return _frame(rows)


def setting_effects(cells: Cells) -> pd.DataFrame:
    """The rows of the frame that ask what each setting does, without the other questions."""
    return _frame([row for at in depths_of(cells) for row in judged(_settings(cells, at))])


def _frame(rows: Sequence[Row]) -> pd.DataFrame:
    frame = pd.DataFrame([row.fields for row in rows], columns=[*COLUMNS])
    numbers = [name for name in COLUMNS if name not in TEXTS]
    return frame.astype(dict.fromkeys(numbers, float)).astype(dict.fromkeys(COUNTS, "Int64"))


# Questions of one depth


def _settings(cells: Cells, at: Depth) -> list[Row]:
    """Every setting against the baseline."""
    rows = []
    baseline = at.cells.get(BASELINE)
    for setting, side in at.cells.items():
        if setting == BASELINE:
            continue
        row = _row(cells, at, "setting", side, baseline)
        if baseline is None:
            row.fields["reason"] = "the baseline was not run at this depth in these folders"
        else:
            _estimate(cells, at, row, side, baseline)
        rows.append(row)
    return rows


def _combinations(cells: Cells, at: Depth) -> list[Row]:
    """Every setting beside another that was also run alone, and their interaction."""
    by_changes = {side.changes: name for name, side in at.cells.items()}
    beside: list[Row] = []
    interactions: list[Row] = []
    for both, name in by_changes.items():
        for part, of_part in by_changes.items():
            rest = by_changes.get(both - part)
            if not part or not part < both or rest is None or rest == BASELINE:
                continue
            sides = at.cells[name], at.cells[rest]
            row = _row(cells, at, "beside", *sides)
            row.fields |= {"setting": of_part, "context": rest}
            _estimate(cells, at, row, *sides)
            beside.append(row)
            if of_part < rest and BASELINE in at.cells:
                interactions.append(_interaction(cells, at, name, of_part, rest))
    return [*judged(beside), *judged(interactions)]


def _interaction(cells: Cells, at: Depth, both: str, part: str, rest: str) -> Row:
    row = _row(cells, at, "interaction", at.cells[both], at.cells[BASELINE])
    row.fields |= {"setting": part, "context": rest}
    names = {both: 1.0, part: -1.0, rest: -1.0, BASELINE: 1.0}
    if not all(name in at.order for name in names):
        row.fields["reason"] = "not all four were run with a tuned lr"
        return row
    _set(cells, at, row, names)
    return row


def _row(cells: Cells, at: Depth, question: str, side: CellRuns, baseline: CellRuns | None) -> Row:
    fields: dict[str, Any] = dict.fromkeys(COLUMNS)
    fields |= {"question": question, "setting": side.setting, "context": "", "n_layers": at.depth}
    fields |= {"verdict": "not shown", "reason": "", "at": OWN_LR if cells.field else "", **_counts(side, "")}
    if baseline is not None:
        fields |= {**_counts(baseline, "_baseline"), "baseline_value": _mean(baseline.results)}
        fields |= _costs(side, baseline)
        equal = [name for name in ("tokens", "flops", "params_total", "params_active") if _is_equal(fields[name])]
        fields["basis"] = equal[0] if equal else "none"
    return Row(fields=fields, unit=cells.unit)


def _counts(side: CellRuns, end: str) -> dict[str, Any]:
    return {
        f"lr{end}": None if math.isnan(side.lr) else side.lr,
        f"seeds{end}": len(side.results),
        f"diverged{end}": side.n_diverged,
    }


def _mean(by_seed: dict[int, float]) -> float | None:
    return sum(by_seed.values()) / len(by_seed) if by_seed else None


def _costs(side: CellRuns, baseline: CellRuns) -> dict[str, float | None]:
    """The costs of a result, relative to the baseline's."""
    ratios: dict[str, float | None] = {}
    for name in side.costs:
        own, other = (each.costs[name][each.is_result_N & ~np.isnan(each.costs[name])] for each in (side, baseline))
        ratios[name] = float(own.mean() / other.mean()) if len(own) and len(other) and other.mean() else None
    return ratios


def _is_equal(ratio: float | None) -> bool:
    return ratio is not None and abs(ratio - 1) <= MATCHED


def _estimate(cells: Cells, at: Depth, row: Row, side: CellRuns, baseline: CellRuns) -> None:
    """The contrast of two cells: at each side's own lr, or at the one lr at which either was run."""
    fixed = [each for each in (side, baseline) if each.n_lr == 1 and not each.was_tuned]
    if fixed and side.lr != baseline.lr:
        lr = fixed[0].lr
        row.fields |= {"at": f"{cells.field}={lr:g}", "lr": lr, "lr_baseline": lr}
        _set_pair(row, [each.by_seed(each.lr_N == lr) for each in (side, baseline)], f"{cells.field} {lr:g}")
        return
    if side.setting in at.order and baseline.setting in at.order:
        _set(cells, at, row, {side.setting: 1.0, baseline.setting: -1.0})
        if not cells.is_tuned and cells.field and side.lr != baseline.lr:
            row.at_equal_lr = _at_equal_lr(side, baseline)
        return
    _set_pair(row, [side.results, baseline.results], "")


def _set_pair(row: Row, parts: Sequence[dict[int, float]], where: str) -> None:
    """The contrast of two cells alone, without a curve, from the outcome of each seed."""
    seeds = [set(part) for part in parts]
    row.fields |= {"seeds": len(seeds[0]), "seeds_baseline": len(seeds[1])}
    found = fit_of(parts) if seeds[0] & seeds[1] else None
    if found is None:
        at = f" at {where}" if where else ""
        row.fields |= {"estimate": _difference(*parts), "reason": _why_not(seeds[0], seeds[1], at)}
        return
    row.contrast = found.combine(np.array([1.0, -1.0]))
    row.shared = found.share_of_baseline(0, 1)
    row.sides = Side(name="the setting"), Side(name="the baseline")


def _difference(own: dict[int, float], other: dict[int, float]) -> float | None:
    """The mean difference over the seeds of both."""
    common = own.keys() & other.keys()
    return sum(own[seed] - other[seed] for seed in common) / len(common) if common else None


def _why_not(seeds: set[int], others: set[int], at: str = "") -> str:
    if not seeds or not others:
        return f"{'the setting' if not seeds else 'the baseline'} was not run{at}, or its runs have no value"
    if not seeds & others:
        return f"the setting and the baseline have no seed in common{at}"
    if len(seeds & others) == 1:
        return f"one seed in common{at}: no interval without a second"
    return f"the runs of different seeds have equal values{at}: there is no noise to judge by"


def _set(cells: Cells, at: Depth, row: Row, names: dict[str, float]) -> None:
    """A combination of cells of the depth's fit."""
    contrast = _combined(at.fitted, at.order, names)
    if contrast is None or at.fitted is None:
        parts = [at.cells[name].results for name in names]
        row.fields["reason"] = _why_not(set(parts[0]), set(parts[1]))
        row.fields["estimate"] = _difference(*parts) if len(parts) == 2 else None
        return
    numbers = [at.order.index(name) for name in names]
    row.contrast, row.shared = contrast, at.fitted.share_of_baseline(numbers[0], numbers[-1])
    if len(names) > 2:
        return
    sides = [at.cells[name] for name in names]
    ends = [
        Side(
            name=name,
            lr=f"{cells.field} {side.lr:g}" if cells.field else "",
            edge=side.edge if cells.is_tuned else "",
            outside=float(at.fitted.outside_C[number]),
            diverged=side.n_diverged,
        )
        for name, side, number in zip(("the setting", "the baseline"), sides, numbers, strict=True)
    ]
    row.sides = ends[0], ends[1]


def _combined(found: Fit | None, order: Sequence[Any], names: Mapping[Any, float]) -> Distribution | None:
    """A combination of the cells of a fit, in their order; None where no seeds connect them."""
    numbers = [order.index(name) for name in names]
    if found is None or len(set(found.group_C[numbers])) > 1:
        return None
    weight_C = np.zeros(len(order))
    weight_C[numbers] = list(names.values())
    return found.combine(weight_C)


def _at_equal_lr(side: CellRuns, baseline: CellRuns) -> tuple[float, ...] | None:
    """The effects with both sides at either's lr, over common seeds; None where no lr was run on both."""
    effects = []
    for lr in dict.fromkeys((side.lr, baseline.lr)):
        own, other = (each.by_seed(each.lr_N == lr) for each in (side, baseline))
        difference = _difference(own, other)
        effects += [] if difference is None else [difference]
    return tuple(effects) or None


# Slopes: the change of an effect per doubling


def _depth_slopes(rows: Sequence[Row]) -> list[Row]:
    """Of every setting, by least squares over depths, which are independent."""
    by_setting: dict[str, list[Row]] = {}
    for row in rows:
        if row.fields["question"] == "setting" and row.contrast is not None:
            by_setting.setdefault(row.fields["setting"], []).append(row)
    slopes = []
    for setting, at_depths in by_setting.items():
        if len(at_depths) < 2:
            continue
        weights = _per_doubling([row.fields["n_layers"] for row in at_depths])
        row = _slope("depth slope", setting, None, min(row.fields["seeds"] for row in at_depths))
        row.fields["at"] = at_depths[0].fields["at"]
        row.contrast = _sum([row.contrast for row in at_depths if row.contrast], weights)
        slopes.append(row)
    return slopes


def _size_slopes(cells: Cells, at: Depth, size: str) -> list[Row]:
    """Of every setting, over the sizes beside which it was run, all else equal. The context names what follows the
    size."""
    by_changes = {side.changes: name for name, side in at.cells.items() if name in at.order}
    at_sizes = {dict(changes)[size]: changes for changes in by_changes if {*dict(changes)} == {size}}
    if not at_sizes or cells.settings is None:
        return []
    at_sizes[cells.settings.baseline.knobs[size]] = frozenset()
    follow = {*SIZES} & {*cells.settings.varying} - {*cells.settings.label_fields}
    slopes = []
    for part, setting in by_changes.items():
        values = [v for v, c in at_sizes.items() if {c, part | c} <= by_changes.keys()]
        if not part or not {*SIZES}.isdisjoint(dict(part)) or len(values) < 2:
            continue
        contexts = [at_sizes[value] for value in values]
        names = _slope_of(values, [(by_changes[part | context], by_changes[context]) for context in contexts])
        row = _slope(SIZES[size], setting, at.depth, min(len(at.cells[name].results) for name in names))
        row.fields["context"] = ", ".join(sorted(follow))
        _set(cells, at, row, names)
        slopes.append(row)
    return slopes


def _lr_slopes(cells: Cells, at: Depth) -> list[Row]:
    """Of every setting, over the lr that both sides were run at; values of lr at which a run diverged are left out."""
    parts: dict[tuple[str, float], dict[int, float]] = {}
    for name, side in at.cells.items():
        for lr in sorted({*side.lr_N} - {*side.lr_N[side.diverged_N]}):
            if by_seed := side.by_seed(side.lr_N == lr):
                parts[name, float(lr)] = by_seed
    tried = {name: {lr for other, lr in parts if other == name} for name in at.cells}
    common = {name: sorted(tried[name] & tried.get(BASELINE, set())) for name in at.cells if name != BASELINE}
    common = {name: values for name, values in common.items() if len(values) > 1}
    found = fit_of([*parts.values()]) if common else None
    slopes = []
    for setting, values in common.items():
        contrast = _combined(found, [*parts], _slope_of(values, [((setting, lr), (BASELINE, lr)) for lr in values]))
        if contrast is None:
            continue
        seeds = min(len(parts[name, lr]) for name in (setting, BASELINE) for lr in values)
        row = _slope(_tuned_slope(cells), setting, at.depth, seeds)
        row.contrast = contrast
        slopes.append(row)
    return slopes


def _tuned_slope(cells: Cells) -> str:
    return f"{cells.field} slope"


def _slope_of(values: Sequence[float], pairs: Sequence[tuple[Any, Any]]) -> dict[Any, float]:
    """The weights of the cells, from the setting and the baseline at each value."""
    weights = zip(pairs, _per_doubling(values), strict=True)
    return {cell: sign * weight for pair, weight in weights for cell, sign in zip(pair, (1, -1), strict=True)}


def _per_doubling(values: Sequence[float]) -> np.ndarray:
    """The weights of a least-squares slope on log2 of these values."""
    x = np.log2(np.array(values, dtype=float))
    return (x - x.mean()) / ((x - x.mean()) ** 2).sum()


def _slope(question: str, setting: str, depth: int | None, seeds: int) -> Row:
    fields: dict[str, Any] = dict.fromkeys(COLUMNS)
    fields |= {"question": question, "setting": setting, "context": "", "n_layers": depth, "seeds": seeds}
    return Row(fields=fields | {"verdict": "not shown", "reason": ""})


# The baseline over depths


def _depths(cells: Cells, depths: Sequence[Depth]) -> list[Row]:
    """The baseline at every depth against the shallowest, over the seeds that both have; the error of choosing lr is
    that of each depth's own fit."""
    have = [at for at in depths if BASELINE in at.cells and at.cells[BASELINE].results]
    rows = []
    for at in have[1:]:
        sides = at.cells[BASELINE], have[0].cells[BASELINE]
        row = _row(cells, at, "depth", *sides)
        row.fields |= {"setting": f"n_layers={at.depth}", "context": ""}
        _set_pair(row, [side.results for side in sides], "")
        if row.contrast is not None and cells.is_tuned:
            variance, extra = row.contrast.sd**2, sum(_choice_variance(each) for each in (at, have[0]))
            sd_G = np.sqrt(row.contrast.sd_G**2 + extra)
            row.contrast = replace(row.contrast, sd_G=sd_G, seeds_share=variance / (variance + extra))
        ends = [
            Side(name=name, lr=f"{cells.field} {side.lr:g}", edge=side.edge if cells.is_tuned else "")
            for name, side in zip((f"{at.depth} layers", f"{have[0].depth} layers"), sides, strict=True)
        ]
        row.sides = ends[0], ends[1]
        rows.append(row)
    return rows


def _choice_variance(at: Depth) -> float:
    """What choosing lr adds to the variance of the baseline's value."""
    found = at.fitted
    if found is None or not found.has_curve or BASELINE not in at.order or len(at.order) < 2:
        return 0.0
    number = at.order.index(BASELINE)
    weight_C = np.full(len(at.order), -1 / (len(at.order) - 1))
    weight_C[number] = 1.0
    contrast = found.combine(weight_C)
    share = found.share_of_baseline(1 - min(number, 1), number)
    return (1 - contrast.seeds_share) * share * contrast.sd**2


def _sum(parts: Sequence[Distribution], weight_P: np.ndarray) -> Distribution:
    """A combination of independent numbers, as Student's distribution (Satterthwaite)."""
    numbers = [(part.estimate, part.sd**2, part.df, part.seeds_share) for part in parts]
    mean_P, variance_P, df_P, share_P = np.array(numbers).T
    variance_P = variance_P * weight_P**2
    total = variance_P.sum()
    return Distribution(
        mean_G=np.array([weight_P @ mean_P]),
        sd_G=np.array([math.sqrt(total)]),
        df_G=np.array([total**2 / (variance_P**2 / df_P).sum()]),
        weight_G=np.ones(1),
        seeds_share=float(variance_P @ share_P / total),
    )
