"""Re-tune fields (the learning rate, usually) for each configuration, with seeds of its own.

Every point of the grid is run with each tuning seed; the best has the lowest mean loss. If it lies on the edge of its
axis, that axis is extended by the ratio of its last two values, and the new points are run: once, or as often as
`tune_extensions` says. The seeds of the results are run at the best point only. A best point that is still on an edge
is used, and flagged: the true best may lie beyond.

A point that diverged, or failed for good, with any seed is the worst, never missing. Of equal points the first (the
lowest) counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsedepth.config.space import grid_points
from sparsedepth.store.tuning_roles import best_point

GridPoint = dict[str, float]
Grid = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class TuningProgress:
    """How far the tuning of one configuration has come."""

    points: list[GridPoint]
    """to run with the tuning seeds, the extension included once it is known"""
    best: GridPoint | None
    """None until every point has a loss"""
    at_edge: tuple[str, ...] = ()
    """the fields of which the best value is on an edge of the extended grid"""


def tune(
    grid: Mapping[str, Sequence[float]], loss_of: Callable[[GridPoint], float | None], extensions: int = 1
) -> TuningProgress:
    """What is to be run, and the best point once it is known. `loss_of` is None for a point without a result yet, and
    math.inf for one that diverged."""
    tried: Grid = {name: list(values) for name, values in grid.items()}
    progress = _judge(tried, loss_of)
    for _ in range(extensions):
        if progress.best is None:
            break
        wider = {name: extended(values, progress.best[name]) for name, values in tried.items()}
        if wider == tried:
            break
        tried, progress = wider, _judge(wider, loss_of)
    return progress


def _judge(grid: Grid, loss_of: Callable[[GridPoint], float | None]) -> TuningProgress:
    points: list[GridPoint] = list(grid_points(grid))
    losses = [loss_of(point) for point in points]
    if None in losses:
        return TuningProgress(points=points, best=None)
    best, at_edge = best_point({tuple(point.values()): loss for point, loss in zip(points, losses, strict=True)})  # ty: ignore[invalid-argument-type] - none is None
    named = tuple(name for name, is_end in zip(grid, at_edge, strict=True) if is_end)
    return TuningProgress(points=points, best=dict(zip(grid, best, strict=True)), at_edge=named)


def extended(values: Sequence[float], best: float) -> list[float]:
    """The axis with one more value where the best is on its edge, by the ratio there: [1, 2, 4] and 4 -> [1, 2, 4, 8].

    Values are rounded to 12 digits, so that 0.1 x 3 is 0.3 on every machine.
    """
    if best == values[-1]:
        return [*values, _round(values[-1] * values[-1] / values[-2])]
    if best == values[0]:
        return [_round(values[0] * values[0] / values[1]), *values]
    return list(values)


def _round(value: float) -> float:
    return float(f"{value:.12g}")
