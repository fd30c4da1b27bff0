"""The frame `effects`: every question at every depth, one row each. Table, figure, recipe and report filter it.

    setting       a setting at the baseline:  value(setting) - value(baseline), each at its own lr (`at`: 'carried
                  lr' where that was chosen at another shape)
    beside        the same on top of another setting, its `context`:  value(both) - value(context)
    interaction   value(both) - value(setting) - value(context) + value(baseline)
    depth         the baseline at a depth against the shallowest
    depth slope   the change of a setting's effect per doubling of depth
    width slope, budget slope   per doubling of d_model, of train_tokens: the setting beside each size that was run
    lr slope      per doubling of the tuned lr, both sides at the same lr

Values are those of `effects.fit`, one fit per depth. A cell that was run at one lr alone is compared at that lr (`at`).
An outcome by which tuning did not choose is compared at equal lr: the estimate is the mean over the lr that both sides
ran, the verdict needs one sign, shown at the lr of each side; *_own_lr is the effect with each side at its own.
P-values are adjusted over the rows of a question at one depth. Ratios are differences of natural logarithms."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, get_args

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import BASELINE, MATCHED, Cells, Depth
from sparsedepth.effects.depths import depths_of
from sparsedepth.effects.effect import Effect
from sparsedepth.effects.fit import ByLr, CellRuns, Contrast, fit_by_lr, fit_of, with_carrying
from sparsedepth.effects.verdict import Distribution, Row, Side, judged, with_intervals
from sparsedepth.once import once
from sparsedepth.quantities import sign
from sparsedepth.quantities.quantity import Named, without_none
from sparsedepth.store.comparable_loss import differing_data
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.effects import no_baseline, no_equal_lr, no_interval, unmeasured

COLUMNS = tuple(Effect.model_fields)
TEXTS, COUNTS = (
    [name for name, field in Effect.model_fields.items() if kind in (field.annotation, *get_args(field.annotation))]
    for kind in (str, int)
)
SIZES = {"d_model": "width slope", "train_tokens": "budget slope"}
"""The last question, the slope over the tuned field, has the name of that field: 'lr slope'."""
QUESTIONS = ("setting", "depth", "beside", "interaction", "depth slope", *SIZES.values())
BASES = ("tokens", "flops", "params_total", "params_active")
"""The costs that both sides may share."""
SIDES = ("the setting", "the baseline")
OWN_LR, EQUAL_LR, CARRIED_LR = "own lr", "equal lr", "carried lr"


def compared(cells: Cells) -> pd.DataFrame:
    """The results among `cells.runs` that are compared."""
    return result_rows(cells.runs.loc[cells.rows.index])


def effects_frame(cells: Cells) -> pd.DataFrame:
    """Every question that these cells answer, a row each, in the order of depths."""
    rows: list[Row] = []
    for at in cells.depths:
        rows += [*judged(_settings(cells, at)), *_combinations(cells, at)]
        rows += [row for name in SIZES for row in judged(_size_slopes(cells, at, name))]
        rows += judged(_lr_slopes(cells, at))
    rows += judged(_depth_slopes(cells, rows))
    rows += depth_rows(cells)
    order = [*QUESTIONS, f"{cells.field} slope"]
    rows.sort(key=lambda row: order.index(row.fields["question"]))
    return _frame(cells, rows)


@once
def setting_effects(cells: Cells) -> pd.DataFrame:
    """The rows of the frame that ask what each setting does, without the other questions."""
    return _frame(cells, setting_rows(cells))


def setting_rows(cells: Cells) -> list[Row]:
    return [row for at in cells.depths for row in judged(_settings(cells, at))]


def effects_alone(cells: Cells) -> pd.DataFrame:
    """The same, each setting as a family of its own: for the one question that was asked before the runs."""
    return _frame(cells, [row for at in cells.depths for own in _settings(cells, at) for row in judged([own])])


def depth_effects(cells: Cells) -> pd.DataFrame:
    """The rows of the frame that compare the depths of the baseline, without the other questions."""
    return _frame(cells, depth_rows(cells))


def _frame(cells: Cells, rows: Sequence[Row]) -> pd.DataFrame:
    frame = pd.DataFrame(with_intervals(rows), columns=[*COLUMNS])
    frame = frame.assign(outcome=cells.outcome, unit=cells.unit)
    numbers = [name for name in COLUMNS if name not in TEXTS]
    return frame.astype(dict.fromkeys(numbers, float) | dict.fromkeys(COUNTS, "Int64"))


def as_records(effects: pd.DataFrame) -> list[Effect]:
    return [Effect(**row) for row in QueryResult.of_frame(effects[[*COLUMNS]]).records()]


# Questions of one depth


def _settings(cells: Cells, at: Depth) -> list[Row]:
    """A row for each setting at a depth beside its baseline, each with an estimate or the reason for none."""
    baseline = at.cells.get(BASELINE)
    rows = []
    for name, cell in at.cells.items():
        if name == BASELINE:
            continue
        rows.append(row := _row(cells, at, "setting", cell, baseline))
        if baseline:
            _estimate(cells, at, row, cell, baseline)
        else:
            other_scoring = at.depth in cells.other_scoring
            row.fields["reason"] = no_baseline(cells.outcome, BASELINE in at.unmeasured, other_scoring)
    for name in at.unmeasured:
        if name != BASELINE and cells.is_measured:
            rows.append(Row(fields=_fields("setting", name, at.depth) | {"reason": unmeasured(cells.outcome)}))
    return rows


def _combinations(cells: Cells, at: Depth) -> list[Row]:
    """Every setting beside another that was also run alone, and their interaction."""
    by_changes = {side.changes: name for name, side in at.cells.items()}
    beside, interactions = list[Row](), list[Row]()
    for (both, name), (part, of_part) in product(by_changes.items(), repeat=2):
        rest = by_changes.get(both - part)
        if not part or not part < both or rest is None or rest == BASELINE:
            continue
        cell, context, asked = at.cells[name], at.cells[rest], {"setting": of_part, "context": rest}
        beside.append(row := _row(cells, at, "beside", cell, context, **asked))
        _estimate(cells, at, row, cell, context)
        if of_part < rest and BASELINE in at.cells:
            interactions.append(row := _row(cells, at, "interaction", cell, at.cells[BASELINE], **asked))
            weights = {name: 1.0, of_part: -1.0, rest: -1.0, BASELINE: 1.0}
            if {*weights} <= {*(at.cells if cells.at_equal_lr else at.order)}:
                _set(cells, at, row, weights)
                _add_carrying(cells, row, [at.cells[one] for one in weights])
            else:
                row.fields["reason"] = "not all four were run with a tuned lr"
    return [*judged(beside), *judged(interactions)]


def _row(cells: Cells, at: Depth, question: str, side: CellRuns, baseline: CellRuns | None, **asked: str) -> Row:
    """A row without its estimate: what was run, its costs relative to the baseline's, and the cost that both share."""
    fields: Named = _fields(question, side.setting, at.depth) | asked
    fields["at"] = OWN_LR if cells.field else ""
    for end, each in (("", side), ("_baseline", baseline)):
        if each is not None:
            fields[f"lr{end}"] = None if math.isnan(each.lr) else each.lr
            fields |= {f"seeds{end}": len(each.results), f"diverged{end}": each.n_diverged}
    if baseline is not None:
        of_baseline = [*baseline.results.values()]
        fields["baseline_value"] = sum(of_baseline) / len(of_baseline) if of_baseline else None
        for name in side.costs:
            own, other = side.cost(name), baseline.cost(name)
            fields[name] = own / other if other else None
        equal = [name for name in BASES if fields[name] is not None and abs(fields[name] - 1) <= MATCHED]
        fields["basis"] = equal[0] if equal else "none"
    return Row(fields=fields, unit=cells.unit, sign=sign(cells.outcome))


def _fields(question: str, setting: str, depth: int | None) -> Named:
    fields = {"question": question, "setting": setting, "context": "", "n_layers": depth}
    return dict.fromkeys(COLUMNS) | fields | {"verdict": "not shown", "reason": ""}


def _estimate(cells: Cells, at: Depth, row: Row, side: CellRuns, baseline: CellRuns) -> None:
    """The contrast of two cells: at each side's own lr, or at the one lr at which either was run."""
    fixed = [each for each in (side, baseline) if len(each.tried) == 1 and not each.was_tuned]
    if fixed and side.lr != baseline.lr:
        lr = fixed[0].lr
        row.fields |= {"at": f"{cells.field}={lr:g}", "lr": lr, "lr_baseline": lr}
        _set_pair(row, side.at_lr(lr), baseline.at_lr(lr), f" at {cells.field} {lr:g}")
    else:
        _set(cells, at, row, {side.setting: 1.0, baseline.setting: -1.0})
        _add_carrying(cells, row, [side, baseline])


def _add_carrying(cells: Cells, row: Row, sides: Sequence[CellRuns]) -> None:
    """The error of carrying lr to the shape of a side, where tuning chose by this outcome."""
    if _is_carried(cells, sides):
        row.fields["at"] = CARRIED_LR
        row.contrast = row.contrast and with_carrying(row.contrast, sides)


def _is_carried(cells: Cells, sides: Sequence[CellRuns]) -> bool:
    return cells.is_tuned and any(side.carry_regret is not None for side in sides)


def _set_pair(row: Row, own: dict[int, float], other: dict[int, float], where: str = "") -> None:
    """The contrast of two cells alone, without a curve, from the outcome of each seed."""
    row.fields |= {"seeds": len(own), "seeds_baseline": len(other)}
    if found := fit_of({0: own, 1: other}).contrast({0: 1.0, 1: -1.0}):
        _set_contrast(row, found)
        lost = row.fields["diverged"], row.fields["diverged_baseline"]
        row.sides = Side(name="the setting", diverged=lost[0]), Side(name="the baseline", diverged=lost[1])
    else:
        _leave_open(row, own, other, where)


def _set_contrast(row: Row, found: Contrast) -> None:
    row.contrast, row.shared = found.effect, found.shared
    if len(found.fitted) == 2:
        row.fields["fitted"], row.fields["fitted_baseline"] = found.fitted


def _leave_open(row: Row, own: dict[int, float], other: dict[int, float], where: str = "") -> None:
    """No interval: the mean difference over the seeds of both, and the reason."""
    common = own.keys() & other.keys()
    row.fields["reason"] = no_interval(len(own), len(other), len(common), where)
    if common:
        value, of_baseline = (sum(side[seed] for seed in common) / len(common) for side in (own, other))
        row.fields |= {"estimate": value - of_baseline, "fitted": value, "fitted_baseline": of_baseline}


def _set(cells: Cells, at: Depth, row: Row, weights: dict[str, float]) -> None:
    """A combination of cells: of an outcome that tuning chose by each at its own lr, else at equal lr."""
    sides = [at.cells[name] for name in weights]
    is_pair = len(sides) == 2
    if found := at.fit.contrast(weights):
        _set_contrast(row, found)
        if is_pair:
            own, other = (
                cells.side(name, side, at.fit.outside(side.setting)) for name, side in zip(SIDES, sides, strict=True)
            )
            row.sides = own, other
    elif {*weights} <= {*at.order}:
        _leave_open(row, sides[0].results, sides[1].results)
        if not is_pair:
            row.fields |= dict.fromkeys(("estimate", "fitted", "fitted_baseline"))
    elif is_pair:
        _set_pair(row, sides[0].results, sides[1].results)
    if cells.at_equal_lr:
        _set_equal_lr(cells, row, at.by_lr, weights, sides)


def _set_equal_lr(cells: Cells, row: Row, found: ByLr, weights: Mapping[Any, float], sides: Sequence[CellRuns]) -> None:
    """The combination at equal lr in place of that at each side's own, which the row keeps beside it: its mean over the
    lr that all sides ran, and for the verdict that at the lr nearest to each side's own. The seed is the unit: runs of
    one seed at several lr are as one, and standard deviations are not divided by their number."""
    row.own, row.contrast, row.shared = row.contrast, None, 0.0
    row.fields["estimate_own_lr"] = row.own.estimate if row.own is not None else row.fields["estimate"]
    row.fields |= dict.fromkeys(("estimate", "fitted", "fitted_baseline")) | {"at": EQUAL_LR, "reason": ""}
    values = found.common(weights)
    at = without_none({lr: found.contrast({(name, lr): of for name, of in weights.items()}) for lr in values})
    if not at:
        row.fields |= {"verdict": "not known", "reason": no_equal_lr(cells.field, bool(values))}
        return
    effects = {lr: contrast.effect for lr, contrast in at.items()}
    row.contrast = Distribution.mean_of([*effects.values()])
    if len(weights) == 2:
        precision = [1 / effect.sd**2 for effect in effects.values()]
        fitted = np.average([contrast.fitted for contrast in at.values()], axis=0, weights=precision)
        row.fields["fitted"], row.fields["fitted_baseline"] = fitted.tolist()
    nearest = dict.fromkeys(min(at, key=lambda lr: abs(math.log(lr / side.lr))) for side in reversed(sides))
    row.ends, row.ends_at = [effects[lr] for lr in nearest], [f"{cells.field} {lr:g}" for lr in nearest]
    row.fields["seeds"] = found.n_seeds(weights, at)


def _depth_slopes(cells: Cells, rows: Sequence[Row]) -> list[Row]:
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
        fields = _fields("depth slope", setting, None) | {"at": at_depths[0].fields["at"]}
        fields["seeds"] = min(row.fields["seeds"] for row in at_depths)
        slope = Row(fields=fields, contrast=_sum([row.contrast for row in at_depths if row.contrast], weights))
        slope.unit = cells.unit
        if all(row.ends for row in at_depths):
            slope.ends = [_sum([row.ends[end] for row in at_depths], weights) for end in (0, -1)]
            slope.ends_at = [f"{name}'s {cells.field}" for name in reversed(SIDES)]
        slopes.append(slope)
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
        weights = _slope_of(values, [(by_changes[part | context], by_changes[context]) for context in contexts])
        row = Row(fields=_fields(SIZES[size], setting, at.depth) | {"context": ", ".join(sorted(follow))})
        row.fields["seeds"] = min(len(at.cells[name].results) for name in weights)
        _set(cells, at, row, weights)
        slopes.append(row)
    return slopes


def _lr_slopes(cells: Cells, at: Depth) -> list[Row]:
    """Of every setting, over the lr that both sides were run at; values of lr at which a run diverged are left out."""
    if not cells.field:
        return []
    common = {name: at.by_lr.common([name, BASELINE]) for name in at.cells if name != BASELINE}
    common = {name: values for name, values in common.items() if len(values) > 1}
    slopes = []
    for setting, values in common.items():
        weights = _slope_of(values, [((setting, lr), (BASELINE, lr)) for lr in values])
        if contrast := at.by_lr.contrast(weights):
            fields = _fields(f"{cells.field} slope", setting, at.depth)
            fields["seeds"] = at.by_lr.n_seeds([setting, BASELINE], values)
            slopes.append(Row(fields=fields, contrast=contrast.effect))
    return slopes


def _slope_of(values: Sequence[float], pairs: Sequence[tuple[Any, Any]]) -> dict[Any, float]:
    """The weights of the cells, from the setting and the baseline at each value."""
    weights = zip(pairs, _per_doubling(values), strict=True)
    return {cell: sign * weight for pair, weight in weights for cell, sign in zip(pair, (1, -1), strict=True)}


def _per_doubling(values: Sequence[float]) -> np.ndarray:
    """The weights of a least-squares slope on log2 of these values."""
    x = np.log2(np.array(values, dtype=float))
    return (x - x.mean()) / ((x - x.mean()) ** 2).sum()


def depth_rows(cells: Cells) -> list[Row]:
    """The baseline at every depth against the shallowest (`effects.depths`)."""
    if len(cells.depths) < 2:
        return []
    depths = depths_of(cells, cells.depths, {BASELINE})
    own = depths.cells
    runs = cells.runs.loc[cells.rows.index[cells.rows["setting"] == BASELINE]]
    first, rows = min(own, default=0), list[Row]()
    for at in cells.depths:
        if at.depth not in own or at.depth == first:
            continue
        row = _row(cells, at, "depth", own[at.depth], own[first], setting=f"n_layers={at.depth}")
        rows.append(row)
        if names := differing_data(runs[runs["n_layers"].isin([at.depth, first])]):
            row.fields["reason"] = f"depths differ in {names}"
            continue
        if found := depths.contrast(at.depth, first):
            _set_contrast(row, found)
        else:
            _leave_open(row, own[at.depth].results, own[first].results)
        if cells.at_equal_lr:
            pair = {depth: own[depth] for depth in (at.depth, first)}
            _set_equal_lr(cells, row, fit_by_lr(pair), {at.depth: 1.0, first: -1.0}, [*pair.values()])
        if _is_carried(cells, [own[at.depth], own[first]]):
            row.fields["at"] = CARRIED_LR
        row.sides = depths.side(at.depth), depths.side(first)
    return judged(rows)


def _sum(parts: Sequence[Distribution], weight_P: np.ndarray) -> Distribution:
    """A combination of independent numbers, as Student's distribution (Satterthwaite)."""
    numbers = [(part.estimate, part.sd**2, part.df, part.seeds_share) for part in parts]
    mean_P, variance_P, df_P, share_P = np.array(numbers).T
    variance_P = variance_P * weight_P**2
    total = variance_P.sum()
    numbers_G = np.array([[weight_P @ mean_P], [math.sqrt(total)], [total**2 / (variance_P**2 / df_P).sum()]])
    return Distribution(*numbers_G, np.ones(1), seeds_share=min(1.0, variance_P @ share_P / total))
