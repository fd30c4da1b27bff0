"""The width and depth with the lowest fitted loss at a parameter budget.

    minimise c_m m^-a_m + c_l (l - s)^-a_l    subject to    N = f m^2 l + v m

f: parameters of a block by m^2 (12 with multi-head attention and a feed-forward part of width 4 m); v: vocabulary
tables, per unit of width. Both are fitted to the points' model_size by least squares on the relative error, which is
reported. The data term does not change the optimum. Percentiles of the optima of bootstrap replicates are the interval.
l is solved for as a real number, and rounded last.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sparsedepth.scaling.fit import Fit
from sparsedepth.scaling.law import predict
from sparsedepth.scaling.uncertainty import Bootstrap, percentiles

SIZE_ERROR = 0.05
"""Relative error of the formula above which points are not of one family."""
MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """N = block m^2 l + table m."""

    block: float
    table: float
    worst: float
    """Largest relative error over the points."""

    def width(self, params: float, n_layers: np.ndarray) -> np.ndarray:
        """The d_model with `params` parameters at each depth: the positive root."""
        a = self.block * n_layers
        return 2 * params / (self.table + np.sqrt(self.table**2 + 4 * a * params))


@dataclass(frozen=True, kw_only=True)
class Optimum:
    params: float
    d_model: float
    n_layers: float
    d_model_interval: tuple[float, float] | None = None
    n_layers_interval: tuple[float, float] | None = None
    n_layers_rounded: int
    """The better of the two neighbouring whole depths, at least one above `minus_layers`."""
    d_model_rounded: int
    """The whole width nearest to the budget at that depth."""
    loss: float | None
    """At the rounded shape [nat/token]; None for a law with a data term and no given tokens."""
    loss_interval: tuple[float, float] | None = None
    sizes: Sizes
    n_at_edge: int = 0
    """Bootstrap replicates with no optimum inside 1 to 10,000 layers."""
    warnings: tuple[str, ...] = ()


def fit_sizes(points: pd.DataFrame) -> Sizes:
    """Parameters of a block and of the tables, from the points. Raises ValueError where model_size is unknown."""
    sizes_N, m_N, l_N = (points[name].to_numpy() for name in ("model_size", "d_model", "n_layers"))
    if np.isnan(sizes_N).any():
        raise ValueError("the points have no model_size, so a parameter budget cannot be split into width and depth")
    columns_N2 = np.stack([m_N**2 * l_N, m_N], axis=1) / sizes_N[:, None]
    block, table = np.linalg.lstsq(columns_N2, np.ones(len(m_N)), rcond=None)[0]
    if table < 0:  # these sizes show no tables
        block, table = 1 / np.mean(columns_N2[:, 0]), 0.0
    if not block > 0:
        raise ValueError("model_size does not grow with d_model^2 x n_layers in these points")
    worst = np.abs(columns_N2 @ np.array([block, table]) - 1).max()
    return Sizes(block=float(block), table=float(table), worst=float(worst))


def optimum(fitted: Fit, boot: Bootstrap | None, params: float, tokens: float | None = None) -> Optimum:
    """The lowest loss of a fitted law at `params` parameters.

    Raises ValueError for a law without width or depth, one that has no interior optimum, or a budget below one layer.
    """
    law = fitted.law
    if not {"width", "depth"} <= {term.name for term in law.terms}:
        raise ValueError(f"width trades against depth only in a law that has both, not in {law.text()}")
    for name, value in (("params", params), ("tokens", tokens)):
        if value is not None and not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value:g} must be a positive number")
    sizes = fit_sizes(fitted.points)
    (depth,), (at_edge,) = _depths(fitted, sizes, params, fitted.theta[None])
    if at_edge:
        raise ValueError(
            f"the law has no best shape at {params:g} parameters: its loss is lowest at n_layers={depth:.3g}, the edge "
            f"of the search"
        )
    layers, width = _rounded(fitted, sizes, params, float(depth))
    has_loss = tokens is not None or "data" not in {term.name for term in law.terms}
    of_fit = Optimum(
        params=params,
        d_model=float(sizes.width(params, depth)),
        n_layers=float(depth),
        n_layers_rounded=layers,
        d_model_rounded=width,
        loss=_loss(fitted, fitted.theta[None], width, layers, tokens)[0] if has_loss else None,
        sizes=sizes,
    )
    of_fit = replace(of_fit, warnings=tuple(_outside(fitted.points, of_fit, tokens)))
    if boot is None or not len(boot.theta):
        return of_fit
    depth_R, at_edge_R = _depths(fitted, sizes, params, boot.theta)
    return replace(
        of_fit,
        d_model_interval=percentiles(sizes.width(params, depth_R)),
        n_layers_interval=percentiles(depth_R),
        loss_interval=percentiles(_loss(fitted, boot.theta, width, layers, tokens)) if has_loss else None,
        n_at_edge=int(at_edge_R.sum()),
    )


def _depths(fitted: Fit, sizes: Sizes, params: float, theta_RP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best depth under each row of parameters, (R,), and whether it lies at the edge of the search."""
    least = fitted.law.minus_layers + 1
    depth_G = np.geomspace(least, MAX_LAYERS, 2000)
    shapes = pd.DataFrame({"n_layers": depth_G, "d_model": sizes.width(params, depth_G), "num_tokens": 1e9})
    loss_RG = np.concatenate(
        [predict(part_RP, fitted.plan, shapes) for part_RP in np.array_split(theta_RP, -(-len(theta_RP) // 50))]
    )
    best_R = loss_RG.argmin(axis=1)
    at_edge_R = (best_R == 0) | (best_R == len(depth_G) - 1)
    inner_R = np.clip(best_R, 1, len(depth_G) - 2)
    rows = np.arange(len(theta_RP))
    left_R, middle_R, right_R = (loss_RG[rows, inner_R + shift] for shift in (-1, 0, 1))
    bend_R = left_R - 2 * middle_R + right_R
    # Minimum of the parabola through three neighbours of the grid, in ln depth.
    shift_R = np.divide(left_R - right_R, 2 * bend_R, out=np.zeros_like(bend_R), where=bend_R > 0)
    step = np.log(depth_G[1] / depth_G[0])
    depth_R = depth_G[inner_R] * np.exp(step * np.clip(shift_R, -1, 1))
    return np.where(at_edge_R, depth_G[best_R], depth_R), at_edge_R


def _rounded(fitted: Fit, sizes: Sizes, params: float, depth: float) -> tuple[int, int]:
    layers = np.unique(np.maximum([np.floor(depth), np.ceil(depth)], np.floor(fitted.law.minus_layers) + 1))
    widths = np.maximum(np.round(sizes.width(params, layers)), 1)
    losses = [_loss(fitted, fitted.theta[None], d, n, 1e9)[0] for d, n in zip(widths, layers, strict=True)]
    best = int(np.argmin(losses))
    return int(layers[best]), int(widths[best])


def _loss(fitted: Fit, theta_RP: np.ndarray, d_model: float, n_layers: float, tokens: float | None) -> np.ndarray:
    at = pd.DataFrame({"d_model": [d_model], "n_layers": [n_layers], "num_tokens": [1.0 if tokens is None else tokens]})
    return predict(theta_RP, fitted.plan, at)[:, 0]


def _outside(points: pd.DataFrame, best: Optimum, tokens: float | None) -> list[str]:
    """Warnings of extrapolation, and of sizes that do not fit the formula."""
    sizes = best.sizes
    shape = {"model_size": best.params, "d_model": best.d_model, "n_layers": best.n_layers}
    if tokens is not None:
        shape["num_tokens"] = tokens
    warnings = []
    for name, value in shape.items():
        lo, hi = points[name].min(), points[name].max()
        if not lo <= value <= hi:
            warnings.append(f"extrapolation: {name}={value:.4g} lies outside the fitted points, {lo:.4g} to {hi:.4g}")
    if sizes.worst > SIZE_ERROR:
        warnings.append(
            f"parameters = {sizes.block:.3g} d_model^2 n_layers + {sizes.table:.3g} d_model misses some points by "
            f"{sizes.worst:.0%}: they are not of one family, so width and depth for the budget are approximate"
        )
    return warnings
