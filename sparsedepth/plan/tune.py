"""Tune fields (usually the learning rate) separately for each configuration, with separate tuning seeds.

Every point of the grid is run with each tuning seed; the best has the lowest mean loss. If it is at an edge of its
axis, the axis is extended by the ratio of its last two values and the new points are run, up to `tune_extensions`
times. The result seeds are run at the best point only. A best point that is still at an edge is used and flagged, since
the optimum may lie beyond.

A point with a diverged or failed run counts as the worst, not as missing. Of equal points the first (the lowest) wins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsedepth.config.space import grid_points
from sparsedepth.store.tuning_roles import best_point

GridPoint = dict[str, float]
Grid = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class TuningProgress:
    points: list[GridPoint]
    """to run with the tuning seeds, including extensions so far"""
    best: GridPoint | None
    """None until every point has a loss"""
    at_edge: tuple[str, ...] = ()
    """fields whose best value is at an edge of the extended grid"""


def tune(
    grid: Mapping[str, Sequence[float]], loss_of: Callable[[GridPoint], float | None], extensions: int = 1
) -> TuningProgress:
    """The points to run, and the best one once known. `loss_of` is None for a point without a result yet, and math.inf
    for one that diverged."""
    current: Grid = {name: list(values) for name, values in grid.items()}
    progress = _progress(current, loss_of)
    for _ in range(extensions):
        if progress.best is None:
            break
        wider = {name: extended(values, progress.best[name]) for name, values in current.items()}
        if wider == current:
            break
        current, progress = wider, _progress(wider, loss_of)
    return progress


def _progress(grid: Grid, loss_of: Callable[[GridPoint], float | None]) -> TuningProgress:
    points: list[GridPoint] = list(grid_points(grid))
    losses = [loss_of(point) for point in points]
    if None in losses:
        return TuningProgress(points=points, best=None)
    best, at_edge = best_point({tuple(point.values()): loss for point, loss in zip(points, losses, strict=True)})  # ty: ignore[invalid-argument-type] - none is None
    edge_fields = tuple(name for name, is_edge in zip(grid, at_edge, strict=True) if is_edge)
    return TuningProgress(points=points, best=dict(zip(grid, best, strict=True)), at_edge=edge_fields)


def extended(values: Sequence[float], best: float) -> list[float]:
    """The axis with one more value if the best is at its edge, by the ratio there: [1, 2, 4] and 4 -> [1, 2, 4, 8].
    Values are rounded to 12 digits, so that 0.1 x 3 is 0.3 on every machine."""
    if best == values[-1]:
        return [*values, _round(values[-1] * values[-1] / values[-2])]
    if best == values[0]:
        return [_round(values[0] * values[0] / values[1]), *values]
    return list(values)


def _round(value: float) -> float:
    return float(f"{value:.12g}")
