"""Depths of one setting at one budget, in one fit: what `effects`, both questions, `scaling depth` and figures compare.

    value(depth) = the optimum of its curve over lr, where lr was tuned (`effects.fit`); else the mean over seeds

A seed is one block over all depths, and the noise is that of each depth, moderated over depths. Budgets are training
FLOPs; those within MATCHED of each other are one."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from sparsedepth.effects.cells import Cells, Depth, depth_of, joined, label_of
from sparsedepth.effects.fit import CellRuns, Contrast, NamedFit, fit_of, fit_with_curves, with_carrying
from sparsedepth.effects.verdict import Side
from sparsedepth.quantities import sign
from sparsedepth.store.search import MATCHED
from sparsedepth.store.setting import BUDGET


@dataclass(frozen=True, kw_only=True)
class SettingDepths:
    cells: Mapping[int, CellRuns]
    """By n_layers, ascending; each has results."""
    depths: Mapping[int, Depth]
    """With their other settings."""
    of: Cells

    @cached_property
    def curves(self) -> NamedFit:
        """Of the depths that were run at several lr."""
        tuned = {depth: cell for depth, cell in self.cells.items() if self.of.is_tuned and cell.tried[1:]}
        return fit_with_curves(tuned, sign(self.of.outcome)) if tuned else NamedFit([], None)

    @cached_property
    def means(self) -> NamedFit:
        """Of their results without a curve."""
        return fit_of({depth: cell.results for depth, cell in self.cells.items()})

    def contrast(self, deep: int, shallow: int) -> Contrast | None:
        """The value of one depth minus that of another, with the error of carrying lr; None where no seeds connect the
        two, or there is no noise to judge by."""
        weights = {deep: 1.0, shallow: -1.0}
        found = self.curves.contrast(weights) or self.means.contrast(weights)
        if found and self.of.is_tuned:
            found = found._replace(effect=with_carrying(found.effect, [self.cells[depth] for depth in weights]))
        return found

    def side(self, depth: int) -> Side:
        """What may withhold a verdict on a depth."""
        at, cell = self.depths[depth], self.cells[depth]
        outside = at.fit.outside(cell.setting) if at.has_curves else 0.0
        return self.of.side(f"{depth} layers", cell, outside)

    def lr_variance(self, depth: int) -> float:
        """Of the results' mean about the outcome at the best lr: by choosing it, or by carrying it there."""
        order, fitted = self.curves.names, self.curves.found
        if fitted and depth in order:
            return fitted.values.choice_C[order.index(depth)]
        regret = self.cells[depth].carry_regret if self.of.is_tuned and depth in self.cells else None
        return 0.0 if regret is None or math.isnan(regret) else regret**2


def depths_of(cells: Cells, depths: Sequence[Depth], names: Collection[str]) -> SettingDepths:
    """A setting at these depths; its names, which have the budget where there are several."""
    own = {at.depth: next((at.cells[name] for name in names if name in at.cells), None) for at in depths}
    with_results = {depth: cell for depth, cell in own.items() if cell and cell.results}
    return SettingDepths(cells=with_results, depths={at.depth: at for at in depths}, of=cells)


def at_budgets(cells: Cells, rows: pd.DataFrame) -> dict[float, dict[str, SettingDepths]]:
    """Budget [FLOPs] -> name of a setting -> its depths there, from the rows of `with_budgets`."""
    found = {}
    for _, at in rows.groupby("budget"):
        depths = [depth_of(cells, own) for _, own in at.groupby("n_layers")]
        sides = {str(name): depths_of(cells, depths, {*own}) for name, own in at.groupby("name")["setting"]}
        found[float(at["budget"].iloc[0])] = sides
    return found


def with_budgets(cells: Cells) -> pd.DataFrame:
    """The rows of cells of all budgets, with their budget [FLOPs], and `name`, the setting without it: 'baseline',
    'depth_scale=lns'."""
    names = {changes: label_of(changes, cells.knobs) for changes in {*cells.rows["changes"]}}
    flops = cells.rows["flops"]
    if not cells.mixes_budgets:  # of a run that diverged those of its equals
        flops = flops.groupby([cells.rows["n_layers"], cells.rows["setting"]]).transform("max")
    return cells.rows.assign(budget=budget_of(flops), name=cells.rows["changes"].map(names))


def budget_of(flops: pd.Series) -> pd.Series:
    """Of budgets that are one, each within MATCHED of the next, the lowest [FLOPs]."""
    return joined(flops, MATCHED)


def budgets_of(runs: pd.DataFrame) -> pd.Series:
    """The train_tokens of each run; where they are not known, its budget of FLOPs, which tells it apart, too."""
    known = runs.reindex(columns=[BUDGET, "train_flops"]).apply(pd.to_numeric).astype(float)
    return known[BUDGET].fillna(budget_of(known["train_flops"]))
