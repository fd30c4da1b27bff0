"""One law of loss against compute for a baseline and a setting, at all budgets of both.

    ln L = ln(L_inf + exp(a - alpha (x + ln m + d x))),   x = ln C less its mean;   ln m = d = 0 at the baseline

m is what the setting is worth in compute: the baseline needs m times its compute for the same loss. With d = 0 it is
the same at all budgets; d is its drift. Fitted to means over seeds by least squares with L_inf >= 0: those of the
baseline, and at its budgets the setting's differences from it, as what a budget does to both is no gain. Seeds are the
unit (branches of a trunk share its seed), with Student's distribution; the choice of lr adds the larger of |sum weight
sd| and sqrt(sum (weight sd)^2) of each side: budgets that it moves alike, or apart. Two tests: of d, and of the law, by
the parts of the means that no parameter moves (Bonferroni). Where the law is rejected, each budget has the slope
between it and the next instead.

Shapes: S seeds, N cells (side, budget), P parameters (L_inf, a, alpha, ln m, d), B budgets of the setting, M parts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from sparsedepth.quantities.levels import ALPHA
from sparsedepth.scaling.points import blocks_of
from sparsedepth.store.search import MATCHED
from sparsedepth.store.small_sample import Z, t_critical, two_sided_p

STARTS = (0.0, 0.3, 0.6, 0.85)
"""Of L_inf, as shares of the lowest loss."""
MIN_BUDGETS = 3
"""Of the baseline."""
EXACT = 1e-9
"""Means of ln L that are nearer to the law than this are on it."""


Cell = tuple[bool, float]
"""Whether it is the setting's, and its budget [FLOPs]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ladder:
    """The losses of a baseline and of a setting at their budgets, of the seeds that all of these have."""

    C_N: np.ndarray
    """Budgets [FLOPs]."""
    is_setting_N: np.ndarray
    log_loss_SN: np.ndarray
    lr_sd_N: np.ndarray
    """Of ln L, by the choice of lr; of a cell with a `base`, of its difference from that."""
    base_N: np.ndarray
    """The baseline's cell at the same budget; the cell itself without."""

    @property
    def n_seeds(self) -> int:
        return len(self.log_loss_SN)

    @property
    def mean_N(self) -> np.ndarray:
        return self.log_loss_SN.mean(axis=0)

    @cached_property
    def difference_NN(self) -> np.ndarray:
        """From ln L of the cells to what the law is fitted to."""
        own_NN = np.eye(len(self.base_N))
        return own_NN - own_NN[self.base_N] * (self.base_N != np.arange(len(own_NN)))[:, None]

    @cached_property
    def middle(self) -> float:
        """ln C, on average over the baseline's budgets."""
        return float(np.log(self.C_N[~self.is_setting_N]).mean())

    @property
    def x_N(self) -> np.ndarray:
        """ln C, from the middle."""
        return np.log(self.C_N) - self.middle


class Worth(NamedTuple):
    """What a setting is worth at one of its budgets, as ln m."""

    log_m: float
    half: float | None
    """Half the width of its 95% interval; None for one seed."""


@dataclass(frozen=True, kw_only=True)
class LawOfBoth:
    worth_B: Sequence[Worth]
    has_drift: bool = False
    is_rejected: bool = False
    """By slopes."""
    p_drift: float | None = None
    """None where the setting has one budget, or there is one seed."""
    p_misfit: float | None = None
    """Of the law; None where it has a parameter for every mean, or there is one seed."""
    L_inf: float | None = None
    alpha: float | None = None


def law_of_both(ladder: Ladder) -> LawOfBoth:
    """The shared multiplier; with drift where that is shown; by slopes where the law is rejected."""
    setting_N = ladder.is_setting_N
    steady = _fit(ladder, drift=False)
    drifting = _fit(ladder, drift=True) if setting_N.sum() > 1 else steady
    p_misfit = _misfit(ladder, drifting)
    if p_misfit is not None and p_misfit < ALPHA:
        worth_B = [_by_slope(ladder, n) for n in np.flatnonzero(setting_N)]
        return LawOfBoth(worth_B=worth_B, is_rejected=True, p_misfit=p_misfit)
    p_drift = None if drifting is steady else _p(ladder, float(drifting.theta_P[4]), drifting.weight_PN[4])
    has_drift = p_drift is not None and p_drift < ALPHA
    found = drifting if has_drift else steady
    weight_BP = np.zeros((setting_N.sum(), len(found.theta_P)))
    weight_BP[:, 3] = 1.0
    if has_drift:
        weight_BP[:, 4] = ladder.x_N[setting_N]
    return LawOfBoth(
        worth_B=[
            Worth(log_m, _half_width(ladder, weight_N))
            for log_m, weight_N in zip((weight_BP @ found.theta_P).tolist(), weight_BP @ found.weight_PN, strict=True)
        ],
        has_drift=has_drift, p_drift=p_drift, p_misfit=p_misfit, L_inf=float(found.theta_P[0]),
        alpha=float(found.theta_P[2]),
    )  # fmt: skip


Shape = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""ln L from three parameters and effective x, its derivative by x, and by the three, (N, 3)."""


class FittedLaw(NamedTuple):
    law: Shape
    theta_P: np.ndarray
    fitted_N: np.ndarray
    jacobian_NP: np.ndarray
    residual_N: np.ndarray
    """Of what the law is fitted to."""
    cost: float
    difference_NN: np.ndarray
    free_P: np.ndarray
    """Whether a parameter is not at its bound."""

    @property
    def by_row_PN(self) -> np.ndarray:
        """What each row that is fitted adds to each parameter, to first order."""
        by_row_PN = np.zeros(self.jacobian_NP.T.shape)
        by_row_PN[self.free_P] = np.linalg.pinv(self.jacobian_NP[:, self.free_P])
        return by_row_PN

    @property
    def weight_PN(self) -> np.ndarray:
        """What each mean adds to each parameter, to first order."""
        return self.by_row_PN @ self.difference_NN

    def is_within(self, lowest: float) -> bool:
        """Whether the first parameter, L_inf, is not negative and below the lowest loss."""
        return self.law is parabola or 0 <= self.theta_P[0] < lowest


def _fit(ladder: Ladder, *, drift: bool) -> FittedLaw:
    """From several values of L_inf; the first of them keeps it at 0."""
    n = 4 + drift
    found = [solve(ladder, start_of(ladder, share, n), np.arange(n) >= (share == 0), offset_law) for share in STARTS]
    lowest = float(np.exp(ladder.mean_N.min()))
    return min((each for each in found if each.is_within(lowest)), key=lambda each: each.cost)


def start_of(ladder: Ladder, share: float, n: int) -> np.ndarray:
    """n parameters, with L_inf at this share of the lowest loss, and a setting that is worth nothing."""
    y_N, baseline_N = ladder.mean_N, ~ladder.is_setting_N
    L_inf = share * float(np.exp(y_N.min()))
    slope, level = np.polyfit(ladder.x_N[baseline_N], np.log(np.exp(y_N[baseline_N]) - L_inf), 1)
    return np.array([L_inf, level, max(-slope, 0.01), *[0.0] * (n - 3)])


def solve(ladder: Ladder, start_P: np.ndarray, free_P: np.ndarray, law: Shape) -> FittedLaw:
    """Least squares from a start, in the parameters that are free."""
    x_N, setting_N, y_N = ladder.x_N, ladder.is_setting_N.astype(float), ladder.difference_NN @ ladder.mean_N

    def full(free: np.ndarray) -> np.ndarray:
        theta_P = start_P.copy()
        theta_P[free_P] = free
        return theta_P

    def at(theta_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the law is fitted to, and its derivatives, (N, P)."""
        log_m, *d = theta_P[3:]
        log_loss_N, by_x_N, by_shape_NX = law(theta_P[:3], x_N + setting_N * (log_m + sum(d) * x_N))
        by_m_N = by_x_N * setting_N
        moves = np.stack([by_m_N, *(by_m_N * x_N for _ in d)], axis=1)
        jacobian_NP = np.concatenate([by_shape_NX, moves], axis=1)
        return ladder.difference_NN @ log_loss_N, ladder.difference_NN @ jacobian_NP

    solved = least_squares(
        lambda free: at(full(free))[0] - y_N,
        start_P[free_P],
        jac=lambda free: at(full(free))[1][:, free_P],
        **{"method": "lm", "xtol": 1e-12, "ftol": 1e-14, "gtol": 1e-14, "max_nfev": 300},
    )
    end_P = full(solved.x)
    fitted_N, jacobian_NP = at(end_P)
    return FittedLaw(
        law=law, theta_P=end_P, fitted_N=fitted_N, jacobian_NP=jacobian_NP, residual_N=y_N - fitted_N,
        cost=float(solved.cost), difference_NN=ladder.difference_NN, free_P=free_P,
    )  # fmt: skip


def offset_law(shape_X: np.ndarray, x_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ln (L_inf + exp(a - alpha x)), from (L_inf, a, alpha)."""
    L_inf, a, alpha = shape_X
    part_N = np.exp(np.clip(a - alpha * x_N, -60, 60))
    loss_N = np.maximum(L_inf + part_N, 1e-12)
    by_shape_NX = np.stack([np.ones_like(x_N), part_N, -part_N * x_N], axis=1) / loss_N[:, None]
    return np.log(loss_N), -alpha * part_N / loss_N, by_shape_NX


def parabola(shape_X: np.ndarray, x_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a - alpha x + q x^2, from (q, a, alpha)."""
    q, a, alpha = shape_X
    return a - alpha * x_N + q * x_N**2, 2 * q * x_N - alpha, np.stack([x_N**2, np.ones_like(x_N), -x_N], axis=1)


def _p(ladder: Ladder, estimate: float, weight_N: np.ndarray) -> float | None:
    """Student's test that a combination of the means is 0; None for one seed."""
    if ladder.n_seeds < 2:
        return None
    error = math.hypot(*_errors(ladder, weight_N))
    if error <= EXACT:
        return 1.0 if abs(estimate) <= 1e3 * EXACT else 0.0
    return two_sided_p(abs(estimate) / error, ladder.n_seeds - 1)


def _misfit(ladder: Ladder, found: FittedLaw) -> float | None:
    """The least p of the parts that no parameter moves, times their number; None without such a part, or for one
    seed."""
    left_NN = np.linalg.svd(found.jacobian_NP[:, found.free_P], full_matrices=True)[0]
    rest_MN = left_NN[:, found.free_P.sum() :].T
    off_M = rest_MN @ (ladder.difference_NN @ ladder.mean_N - found.fitted_N)
    tests = zip(off_M.tolist(), rest_MN @ ladder.difference_NN, strict=True)
    p_M = [p for off, weight_N in tests if (p := _p(ladder, off, weight_N)) is not None]
    return min(1.0, min(p_M) * len(p_M)) if p_M else None


def _errors(ladder: Ladder, weight_N: np.ndarray) -> tuple[float, float]:
    """The standard error of a combination of the means, by seeds and by the choice of lr."""
    seeds = float((ladder.log_loss_SN @ weight_N).std(ddof=1)) / math.sqrt(ladder.n_seeds)
    own_N = weight_N.copy()  # a difference takes the baseline's part along
    has_base_N = ladder.base_N != np.arange(len(own_N))
    np.add.at(own_N, ladder.base_N[has_base_N], weight_N[has_base_N])
    moved_N = own_N * ladder.lr_sd_N
    sides = [moved_N[ladder.is_setting_N], moved_N[~ladder.is_setting_N]]
    return seeds, math.hypot(*(max(abs(side.sum()), np.linalg.norm(side)) for side in sides))


def _half_width(ladder: Ladder, weight_N: np.ndarray) -> float | None:
    """Of the 95% interval; None for one seed."""
    if ladder.n_seeds < 2:
        return None
    seeds, lr = _errors(ladder, weight_N)
    return math.hypot(t_critical(ladder.n_seeds - 1) * seeds, Z * lr)


def _by_slope(ladder: Ladder, setting: int) -> Worth:
    """The gain over the baseline at the nearest budget, by the slope from there to the next budget, or the one
    before."""
    x_N, y_N = ladder.x_N, ladder.mean_N
    baseline = np.flatnonzero(~ladder.is_setting_N)
    baseline = baseline[np.argsort(x_N[baseline])]
    place = int(np.abs(x_N[baseline] - x_N[setting]).argmin())
    at = baseline[place]
    is_gain = y_N[setting] < y_N[at]
    other = place + 1 if (is_gain and place + 1 < len(baseline)) or place == 0 else place - 1
    far = baseline[other]
    slope = (y_N[far] - y_N[at]) / (x_N[far] - x_N[at])
    gain = (y_N[setting] - y_N[at]) / slope
    weight_N = np.zeros(len(x_N))
    weight_N[setting] += 1 / slope
    weight_N[at] -= 1 / slope
    weight_N[[far, at]] -= np.array([1, -1]) * gain / slope / (x_N[far] - x_N[at])
    return Worth(float(x_N[at] - x_N[setting] + gain), _half_width(ladder, weight_N))


def ladder_of(losses: Mapping[Cell, Mapping[int, float]], lr_variance: Mapping[Cell, float]) -> Ladder | None:
    """From (is the setting, FLOPs) -> seed -> loss, and -> the variance by the choice of lr. Of seeds that have all
    cells: most cells, for at most a third of the seeds. Where no two seeds are in three budgets of the baseline and one
    of the setting, every cell is one run, its mean over seeds; None for fewer cells."""
    blocks = [block for block in blocks_of(losses) if _is_enough([is_setting for is_setting, _ in block[1]])]
    most = max((len(seeds) for seeds, _ in blocks), default=0)
    n_seeds = [len(of) for of in losses.values() if of]
    if n_seeds and np.median(n_seeds) > 1:
        if not most:
            return None
        enough = [block for block in blocks if 3 * len(block[0]) >= 2 * most]
        seeds, cells = max(enough, key=lambda block: (len(block[1]), len(block[0]), block))
        loss_SN = np.array([[losses[cell][seed] for cell in cells] for seed in seeds])
    else:
        cells = sorted(cell for cell, of in losses.items() if of)
        if not _is_enough([is_setting for is_setting, _ in cells]):
            return None
        loss_SN = np.array([[np.mean([*losses[cell].values()]) for cell in cells]])
    is_setting_N, C_N = (np.array(column) for column in zip(*cells, strict=True))
    if (loss_SN <= 0).any():
        raise ValueError(f"a loss of {loss_SN.min():g}: its law is of ln loss, and so of losses above 0")
    return Ladder(
        C_N=C_N, is_setting_N=is_setting_N.astype(bool), log_loss_SN=np.log(loss_SN),
        lr_sd_N=np.sqrt([lr_variance.get(cell, 0.0) for cell in cells]) / loss_SN.mean(axis=0),
        base_N=np.array([_base(cells, number) for number in range(len(cells))]),
    )  # fmt: skip


def _base(cells: Sequence[Cell], number: int) -> int:
    """The baseline's cell at the budget of a cell of the setting; the cell itself without."""
    is_setting, C = cells[number]
    at = [n for n, (other, budget) in enumerate(cells) if is_setting and not other and abs(C / budget - 1) < MATCHED]
    return at[0] if at else number


def _is_enough(is_setting: Sequence[bool]) -> bool:
    n_setting = sum(is_setting)
    return n_setting > 0 and len(is_setting) - n_setting >= MIN_BUDGETS
