"""Tune fields (usually the learning rate) separately for each configuration, with separate tuning seeds.

Every point of the grid is run with each tuning seed; the best has the lowest mean loss. If it is at an edge of its
axis, the axis is extended by the ratio of its last two values and the new points are run, up to `tune_extensions`
times. The result seeds are run at the best point only. A best point that is still at an edge is used; the store flags
it (`store.tuning_roles`), since the optimum may lie beyond.

A point with a diverged or failed run counts as the worst, not as missing. Of equal points the first (the lowest) wins.
"""

from collections.abc import Callable, Mapping, Sequence

from sparsedepth.config.space import grid_points
from sparsedepth.store.tuning_roles import best_point

GridPoint = dict[str, float]


def tune(
    grid: Mapping[str, Sequence[float]], loss_of: Callable[[GridPoint], float | None], extensions: int = 1
) -> tuple[list[GridPoint], GridPoint | None]:
    """The points to run with the tuning seeds, and the best one once each has a loss: math.inf if it diverged."""
    axes = {name: list(values) for name, values in grid.items()}
    while True:
        points: list[GridPoint] = list(grid_points(axes))
        losses = {tuple(point.values()): loss for point in points if (loss := loss_of(point)) is not None}
        if len(losses) < len(points):
            return points, None
        best = dict(zip(axes, best_point(losses), strict=True))
        wider = {name: extended(values, best[name]) for name, values in axes.items()}
        if wider == axes or extensions == 0:
            return points, best
        axes, extensions = wider, extensions - 1


def extended(values: Sequence[float], best: float) -> list[float]:
    """The axis with one more value if the best is at its edge, by the ratio there: [1, 2, 4] and 4 -> [1, 2, 4, 8].
    Values are rounded to 12 digits, so that 0.1 x 3 is 0.3 on every machine."""
    if best == values[-1]:
        return [*values, float(f"{values[-1] * values[-1] / values[-2]:.12g}")]
    if best == values[0]:
        return [float(f"{values[0] * values[0] / values[1]:.12g}"), *values]
    return list(values)
