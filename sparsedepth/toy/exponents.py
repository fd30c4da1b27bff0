"""The depth exponent of the toys: how loss falls with the student's depth, for each kind of teacher (2602.05970, 5).

    L(l) = c l^-alpha + L_rest,    c > 0, L_rest >= 0

Fitted for each teacher by least squares on relative errors, sum_l (L_fit(l) / L(l) - 1)^2, because losses span
decades. At a given alpha this is linear in c and L_rest (non-negative least squares), so alpha alone is searched, over
the whole of ALPHAS: there is no start to choose and no local optimum. The interval is Student's over teachers.

Also the slope of log L against log l, which is alpha if L_rest = 0: where the fit cannot tell alpha from L_rest, the
slope is still known. An alpha at an end of ALPHAS is no measurement and is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsedepth.effects.intervals import Estimate, estimate
from sparsedepth.toy.config import AXES, ToyConfig

if TYPE_CHECKING:
    import pandas as pd

ALPHAS = (0.05, 12.0)
MIN_DEPTHS = 4
"""Three unknowns fit three depths exactly."""

REPLICATES = ("n_layers", "teacher_seed", "seed")
SETTINGS = tuple(name for name in ToyConfig.model_fields if name not in REPLICATES)
"""What one exponent belongs to: every field but depth and the replicates."""


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """c l^-alpha + rest."""

    alpha: float | None
    c: float
    rest: float
    slope: float
    """-d log L / d log l, by least squares."""

    def __call__(self, depth: np.ndarray) -> np.ndarray:
        """The fitted loss; where alpha is no measurement, that of the slope alone."""
        return self.c * depth ** -(self.alpha if self.alpha is not None else self.slope) + self.rest


def fit_power_law(depth: Sequence[float] | np.ndarray, loss: Sequence[float] | np.ndarray) -> PowerLaw:
    """The best c, alpha and L_rest. Raises ValueError for fewer than MIN_DEPTHS depths, or a loss not above 0."""
    from scipy.optimize import minimize_scalar

    depth_L, loss_L = np.asarray(depth, float), np.asarray(loss, float)
    if len(set(depth_L)) < MIN_DEPTHS:
        raise ValueError(f"{len(set(depth_L))} depths cannot fix three unknowns; train at least {MIN_DEPTHS} depths")
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
    """The best c and L_rest at this alpha, and the error left."""
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
    """By teacher_seed."""
    losses: "pd.DataFrame"
    """Columns n_layers, teacher_seed, test_loss: mean over the students' seeds."""


def exponents(toys: "pd.DataFrame") -> list[Exponent]:
    """One per setting, from the rows of `toys`; settings with fewer than MIN_DEPTHS depths are left out. A teacher
    counts if it has a loss at every depth of its setting."""
    fitted = []
    for key, rows in toys.groupby(list(SETTINGS), dropna=False, sort=True):
        by_teacher = rows.groupby(["n_layers", "teacher_seed"])["test_loss"].mean().unstack("teacher_seed")
        whole = by_teacher.loc[:, (by_teacher > 0).all()]
        if len(whole) < MIN_DEPTHS or whole.empty:
            continue
        depths = whole.index.to_numpy(float)
        fits = {int(teacher): fit_power_law(depths, whole[teacher].to_numpy()) for teacher in whole}
        alphas = [fit.alpha for fit in fits.values() if fit.alpha is not None]
        fitted.append(
            Exponent(
                setting=dict(zip(SETTINGS, key if isinstance(key, tuple) else (key,), strict=True)),
                alpha=estimate(alphas if len(alphas) == len(fits) else []),
                slope=estimate([fit.slope for fit in fits.values()]),
                depths=tuple(int(depth) for depth in whole.index),
                teachers=fits,
                losses=whole.stack().rename("test_loss").reset_index(),
            )
        )
    return fitted


def varied(fitted: Sequence[Exponent]) -> list[str]:
    """The fields that tell the settings apart, the paper's first; one that only goes along with these is left out."""
    first = ("target", "integrator", "rho", "temperature")
    names: list[str] = []
    n_settings = 1
    for name in (*first, *(name for name in SETTINGS if name not in first)):
        values = {tuple(str(exponent.setting[known]) for known in (*names, name)) for exponent in fitted}
        if len(values) > n_settings:
            names, n_settings = [*names, name], len(values)
    return names


assert set(AXES) <= {*SETTINGS, *REPLICATES}
