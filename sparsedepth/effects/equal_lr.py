"""Cells at each value of the tuned field apart, for outcomes by which tuning did not choose."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsedepth.effects.fit import Fit, fit_of

if TYPE_CHECKING:
    from sparsedepth.effects.cells import CellRuns


@dataclass(frozen=True)
class ByLr:
    """Cells at each value of the tuned field apart, in one fit without curves."""

    order: list[tuple[Any, float]]
    """(cell, value of the tuned field), without values at which a run of the cell diverged."""
    seeds: list[int]
    fitted: Fit | None

    def common(self, names: Collection[Any]) -> list[float]:
        """The values at which all these cells were run, ascending."""
        tried = [{lr for other, lr in self.order if other == name} for name in names]
        return sorted(set[float].intersection(*tried))

    def n_seeds(self, names: Collection[Any], values: Collection[float]) -> int:
        """The fewest seeds of a cell at one of these values."""
        parts = zip(self.order, self.seeds, strict=True)
        return min(seeds for (name, lr), seeds in parts if name in names and lr in values)


def fit_by_lr(cells: "Mapping[Any, CellRuns]") -> ByLr:
    parts: dict[tuple[Any, float], dict[int, float]] = {}
    for name, cell in cells.items():
        for lr in sorted({*cell.tried} - {*cell.lr_N[cell.diverged_N]}):
            if by_seed := cell.at_lr(lr):
                parts[name, float(lr)] = by_seed
    fitted = fit_of([*parts.values()]) if parts else None
    return ByLr([*parts], [len(by_seed) for by_seed in parts.values()], fitted)
