"""The answer of a ladder of shapes: which depth per width is best at equal FLOPs, and whether that moves.

Of all runs that differ in size alone (the setting that most have; of several the baseline), one value for each shape
and number of tokens, where other fields than lr and batch were tuned at their best: the mean over seeds, or where lr
and batch were grids the lowest of

    L = quadratic in ln lr and ln batch, fitted to the runs within a factor NEAR of the best one

at a point inside the grid; else the best one. The error of that choice is part of what the law leaves (`aspect`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sparsedepth.config.run import CELL_FIELDS
from sparsedepth.effects.depths import budget_of
from sparsedepth.quantities.quantity import WATCHED
from sparsedepth.scaling.aspect import AspectLaw, Best, Doubling, aspect_law
from sparsedepth.scaling.points import SIZE_FIELDS
from sparsedepth.store.connection import Store
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.setting import read_settings
from sparsedepth.store.tuning_roles import IS_CHOSEN, parse_tuned_fields

GRIDS = ("lr", "batch_tokens")
NEAR = 4.2
MIN_SHAPES = 5
MOST_BUDGETS = 4
COLUMNS = ("train_flops", "best_aspect", "lo", "hi", "log2_best", "is_within")


@dataclass(frozen=True, kw_only=True)
class ShapesAnswer:
    """`law` is None with a reason."""

    law: AspectLaw | None = None
    reason: str = ""
    best: Sequence[Best] = ()
    """At each budget, or at the least, the middle and the largest one [FLOPs]."""
    doublings: Sequence[Doubling] = ()
    """At the middle budget."""
    n_left_out: int = 0
    """Runs of other settings."""
    is_counted: bool = True
    """Whether FLOPs are the runs' own; else they are 6 x parameters x tokens."""
    has_seeds: bool = False
    """Whether a shape was run twice."""
    n_optima: int = 0
    """Points that are a fitted optimum of lr and batch."""

    @property
    def decides(self) -> bool:
        """Whether the question of depth is answered by these shapes: else depths are judged by seeds."""
        return self.law is not None and not self.has_seeds

    @property
    def table(self) -> QueryResult:
        """Layers per 64 of width."""
        rows = [
            (one.flops, *(None if x is None else 2.0**x for x in (one.estimate, one.lo, one.hi)), one.estimate,
             one.is_within)
            for one in self.best
        ]  # fmt: skip
        return QueryResult(columns=COLUMNS, rows=tuple(rows))


def shapes_answer(store: Store) -> ShapesAnswer | None:
    """None where fewer than MIN_SHAPES shapes of several widths and depths were run."""
    tuned = {
        name
        for (names,) in store.sql("SELECT DISTINCT tuned_fields FROM runs").rows
        for name in parse_tuned_fields(names)
    }
    others = [name for name in CELL_FIELDS if name not in {*SIZE_FIELDS, *GRIDS, *tuned}]
    runs = store.frame(
        "SELECT cell_id, n_layers, d_model, tokens_trained AS tokens, lr, batch_tokens, val_loss AS loss, train_flops "
        "IS NOT NULL AS is_counted, coalesce(train_flops, 6.0 * coalesce(params_active, params_total) * "
        f"tokens_trained) AS flops, md5(CAST((n_heads / n_kv_heads, {', '.join(others)}) AS VARCHAR)) AS setting "
        f"FROM runs WHERE outcome = 'ok' AND val_loss IS NOT NULL AND origin IS DISTINCT FROM '{WATCHED}' AND "
        f"{IS_CHOSEN if tuned - {*GRIDS} else 'true'} ORDER BY run_id"
    )
    runs = runs.dropna(subset=["n_layers", "d_model", "tokens", "flops", "loss"])
    shapes = runs[["n_layers", "d_model"]].drop_duplicates()
    if len(shapes) < MIN_SHAPES or min(shapes.nunique()) < 2:
        return None
    settings = read_settings(store)
    runs = runs.assign(is_baseline=runs["cell_id"] == (settings and settings.baseline.cell_id))
    by_setting = runs.groupby("setting").agg(n=("loss", "size"), is_baseline=("is_baseline", "any"))
    most = by_setting.sort_values(["n", "is_baseline"]).index[-1]
    own = runs[runs["setting"] == most]
    points = pd.DataFrame([*(_point(cell) for _, cell in own.groupby(["n_layers", "d_model", "tokens"]))])
    answer = ShapesAnswer(
        n_left_out=len(runs) - len(own),
        is_counted=bool(own["is_counted"].all()),
        n_optima=int(points["is_optimum"].sum()),
        has_seeds=bool(own.drop(columns=["cell_id", "loss"]).duplicated().any()),
    )
    try:
        law = aspect_law(points)
    except ValueError as error:
        return replace(answer, reason=str(error))
    budgets = sorted({*budget_of(points["flops"])})
    if len(budgets) > MOST_BUDGETS:
        budgets = [budgets[0], np.exp(np.log(points["flops"]).mean()), budgets[-1]]
    return replace(answer, law=law, best=law.best_at(budgets), doublings=law.doublings(math.exp(law.middle)))


def _point(cell: pd.DataFrame) -> dict[str, float | str | bool]:
    """One shape at one number of tokens."""
    first, lowest, grid = cell.iloc[0], None, cell
    if len(cell) > 1:
        grid = cell.groupby([*GRIDS], dropna=False)["loss"].mean().reset_index()
        lowest = _lowest(grid)
    return {
        "n_layers": first["n_layers"], "d_model": first["d_model"], "tokens": first["tokens"], "flops": first["flops"],
        "loss": grid["loss"].min() if lowest is None else lowest, "is_optimum": lowest is not None,
        "cluster": f"{first['n_layers']:g} {first['d_model']:g}",
    }  # fmt: skip


def _lowest(grid: pd.DataFrame) -> float | None:
    """Of the quadratic surface about the best run; None where it has no lowest point there."""
    varied = [name for name in GRIDS if grid[name].nunique() > 2]
    fixed = grid.drop(columns=["loss", *varied])
    best = fixed.loc[grid["loss"].idxmin()]
    grid = grid[(fixed.eq(best) | best.isna()).all(axis=1)]
    log_NX = np.log(grid[varied].to_numpy(float))
    log_NX -= log_NX[int(grid["loss"].to_numpy().argmin())]
    is_near = (np.abs(log_NX) <= np.log(NEAR)).all(axis=1)
    near_NX, loss_N, n = log_NX[is_near], grid["loss"].to_numpy()[is_near], len(varied)
    i_X, j_X = np.triu_indices(n)
    if not varied or is_near.sum() < len(i_X) + n + 3:
        return None
    design = np.concatenate([np.ones((len(near_NX), 1)), near_NX, near_NX[:, i_X] * near_NX[:, j_X]], axis=1)
    level, *rest = np.linalg.lstsq(design, loss_N, rcond=None)[0]
    slope, hessian = np.array(rest[:n]), np.zeros((n, n))
    hessian[i_X, j_X] = rest[n:]
    hessian += hessian.T
    if np.linalg.eigvalsh(hessian).min() <= 0:
        return None
    at = -np.linalg.solve(hessian, slope)
    inside = (at >= near_NX.min(axis=0)).all() and (at <= near_NX.max(axis=0)).all()
    return level + slope @ at / 2 if inside else None
