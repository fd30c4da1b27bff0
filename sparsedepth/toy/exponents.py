"""The depth exponent of the toys: how the loss falls with student depth, by kind of teacher (2602.05970, 5).

    L(l) = c l^-alpha + L_rest,    c > 0, L_rest >= 0

Fitted per teacher by least squares on relative errors, sum_l (L_fit(l) / L(l) - 1)^2, because losses span decades. At
fixed alpha this is linear in c and L_rest (non-negative least squares), so only alpha is searched, over all of ALPHAS:
no starting point, no local optimum. The interval is Student's over teachers.

Also the slope of log L against log l, which equals alpha if L_rest = 0; it is defined even if alpha and L_rest cannot
be separated. An alpha at an end of ALPHAS is not identified and is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsedepth.effects.intervals import Estimate, estimate
from sparsedepth.toy.config import ToyConfig

if TYPE_CHECKING:
    import pandas as pd

ALPHAS = (0.05, 12.0)
MIN_DEPTHS = 4
"""Three unknowns fit three depths exactly."""

REPLICATES = ("n_layers", "teacher_seed", "seed")
SETTINGS = tuple(name for name in ToyConfig.model_fields if name not in REPLICATES)
"""The fields that define a setting with one exponent: all but depth and replicates."""


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """c l^-alpha + rest."""

    alpha: float | None
    c: float
    rest: float
    slope: float
    """-d log L / d log l, by least squares."""

    def __call__(self, depth: np.ndarray) -> np.ndarray:
        """The fitted loss; by the slope if alpha is not identified."""
        return self.c * depth ** -(self.alpha if self.alpha is not None else self.slope) + self.rest


def fit_power_law(depth: Sequence[float] | np.ndarray, loss: Sequence[float] | np.ndarray) -> PowerLaw:
    """The best c, alpha and L_rest. Raises ValueError for fewer than MIN_DEPTHS depths, or a loss not above 0."""
    from scipy.optimize import minimize_scalar

    depth_L, loss_L = np.asarray(depth, float), np.asarray(loss, float)
    if len(set(depth_L)) < MIN_DEPTHS:
        raise ValueError(
            f"{len(set(depth_L))} depths do not determine three unknowns; train at least {MIN_DEPTHS} depths"
        )
    if not (np.isfinite(loss_L).all() and (loss_L > 0).all()):
        raise ValueError(f"losses {loss_L.tolist()} must be finite and positive")
    grid = np.geomspace(*ALPHAS, 60)
    errors = [_linear(alpha, depth_L, loss_L)[2] for alpha in grid]
    best = int(np.argmin(errors))
    slope = float(-np.polyfit(np.log(depth_L), np.log(loss_L), 1)[0])
    if best in (0, len(grid) - 1):
        return PowerLaw(alpha=None, c=float(np.exp(np.mean(np.log(loss_L * depth_L**slope)))), rest=0.0, slope=slope)
    minimum = minimize_scalar(
        lambda alpha: _linear(alpha, depth_L, loss_L)[2],
        bounds=(grid[best - 1], grid[best + 1]), method="bounded", options={"xatol": 1e-9},
    )  # fmt: skip
    c, rest, _ = _linear(minimum.x, depth_L, loss_L)
    return PowerLaw(alpha=float(minimum.x), c=c, rest=rest, slope=slope)


def _linear(alpha: float, depth_L: np.ndarray, loss_L: np.ndarray) -> tuple[float, float, float]:
    """The best c and L_rest at this alpha, and the remaining error."""
    from scipy.optimize import nnls

    shallowest = depth_L.min()
    design_L2 = np.stack(((depth_L / shallowest) ** -alpha / loss_L, 1 / loss_L), axis=1)
    (c, rest), error = nnls(design_L2, np.ones_like(loss_L))
    return float(c * shallowest**alpha), float(rest), float(error)


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """One setting's exponent, from all its teachers."""

    setting: dict[str, Any]
    alpha: Estimate
    slope: Estimate
    depths: tuple[int, ...]
    teachers: dict[int, PowerLaw]
    """by teacher_seed"""
    losses: "pd.DataFrame"
    """columns n_layers, teacher_seed, test_loss: mean over student seeds"""


def exponents(toys: "pd.DataFrame") -> list[Exponent]:
    """One per setting with at least MIN_DEPTHS depths, from the rows of `toys`. Teachers without a loss at some depth
    are left out."""
    fitted = []
    for key, rows in toys.groupby(list(SETTINGS), dropna=False, sort=True):
        by_teacher = rows.groupby(["n_layers", "teacher_seed"])["test_loss"].mean().unstack("teacher_seed")
        complete = by_teacher.loc[:, (by_teacher > 0).all()]
        if len(complete) < MIN_DEPTHS or complete.empty:
            continue
        depths = complete.index.to_numpy(float)
        fits = {int(teacher): fit_power_law(depths, complete[teacher].to_numpy()) for teacher in complete}
        alphas = [fit.alpha for fit in fits.values() if fit.alpha is not None]
        fitted.append(
            Exponent(
                setting=dict(zip(SETTINGS, key if isinstance(key, tuple) else (key,), strict=True)),
                alpha=estimate(alphas if len(alphas) == len(fits) else []),
                slope=estimate([fit.slope for fit in fits.values()]),
                depths=tuple(int(depth) for depth in complete.index),
                teachers=fits,
                losses=complete.stack().rename("test_loss").reset_index(),
            )
        )
    return fitted


def varied(fitted: Sequence[Exponent]) -> list[str]:
    """The fields that distinguish the settings, the paper's first, without redundant ones."""
    first = ("target", "integrator", "rho", "temperature")
    names: list[str] = []
    n_settings = 1
    for name in (*first, *(name for name in SETTINGS if name not in first)):
        values = {tuple(str(exponent.setting[known]) for known in (*names, name)) for exponent in fitted}
        if len(values) > n_settings:
            names, n_settings = [*names, name], len(values)
    return names
