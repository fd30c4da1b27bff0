"""Many weighted least-squares fits of the law at once, by Levenberg and Marquardt's method.

    minimise  S(theta) = sum_n w_n r_n (r_n - lambda_c mean_c r),   r_n = ln L(theta, x_n) - ln L_n
    step:     (H + lambda diag J'J) d = -J'r,    lambda shrinks where the step gained and grows where it did not

H is the exact second derivative of S / 2, J'J and the residual's part: along the valley in which width trades against
depth, J'J alone needs hundreds of steps.

lambda_c is 0 where points are independent (`law.ClusterEffect`: points of a cluster have one weight).

One row is one fit: a start, a bootstrap replicate (w: how often each point was drawn), a fold (w: 0 or 1), a profile
(an exponent not free), or a simulated data set (its own ln L). All rows step together, with one (R, P, P) solve per
step, until they converge: when no column of J has a cosine above 1e-8 with the residual (the gradient test of MINPACK),
or the residual is rounding error.

Shapes: R fits, N points, P parameters; see `law`.
"""

from dataclasses import dataclass

import numpy as np

from sparsedepth.scaling.law import ClusterEffect, DesignMatrix, contributions, jacobian

GRADIENT = 1e-8
ROUNDING = 1e-13
"""A root-mean-square residual of ln L below this is zero."""
MAX_STEPS = 500
ROWS_AT_A_TIME = 128
"""Keeps the Jacobians in cache."""
STUCK = 1e12
"""Damping at which a row stops: not even a tiny step lowers its cost."""
NEGLIGIBLE = 1e-7
"""A parameter that changes ln L by less per unit has no effect: its term has vanished."""
UNIDENTIFIED = 1e7
"""Condition number of the Jacobian above which some combination of parameters is not identified."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    theta: np.ndarray
    """(R, P)."""
    cost: np.ndarray
    """S, the weighted sum of squared residuals of ln L, (R,)."""
    gradient: np.ndarray
    """Largest cosine between the residual and a column of the Jacobian, (R,)."""
    converged: np.ndarray
    """Whether each row met the gradient test, (R,)."""

    def best(self) -> "Solution":
        """The row of least cost."""
        i = int(np.argmin(self.cost))
        row = slice(i, i + 1)
        return Solution(
            theta=self.theta[row], cost=self.cost[row], gradient=self.gradient[row], converged=self.converged[row]
        )


def solve(
    plan: DesignMatrix,
    start_RP: np.ndarray,
    weight_RN: np.ndarray | None = None,
    free_RP: np.ndarray | None = None,
    y_RN: np.ndarray | None = None,
) -> Solution:
    """Fit every row from its start. Weights default to 1, all but the law's fixed exponents are free, and `y_RN`
    (ln loss) replaces the points' own."""
    shape = (len(start_RP), plan.n_points)
    root_RN = np.sqrt(np.broadcast_to(1.0 if weight_RN is None else weight_RN, shape))
    free_RP = np.broadcast_to(plan.law.free if free_RP is None else free_RP, start_RP.shape)
    y_RN = np.broadcast_to(plan.y if y_RN is None else y_RN, shape)
    parts = [
        _solve(plan, start_RP[rows], root_RN[rows], free_RP[rows], y_RN[rows])
        for rows in (slice(i, i + ROWS_AT_A_TIME) for i in range(0, len(start_RP), ROWS_AT_A_TIME))
    ]
    theta_RP, cost_R, gradient_R, converged_R = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Solution(theta=theta_RP, cost=cost_R, gradient=gradient_R, converged=converged_R)


def _solve(
    plan: DesignMatrix, start_RP: np.ndarray, root_RN: np.ndarray, free_RP: np.ndarray, y_RN: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    theta_RP = start_RP.astype(float)
    cost_R = _cost(theta_RP, plan, root_RN, y_RN)
    gradient_R = np.full(len(theta_RP), np.inf)
    damping_R = np.full(len(theta_RP), 1e-2)
    weight_R = (root_RN**2).sum(axis=1)
    zero_R = ROUNDING**2 * weight_R
    active = np.arange(len(theta_RP))
    for _ in range(MAX_STEPS):
        parts = (theta_RP[active], plan, root_RN[active], y_RN[active], free_RP[active])
        hessian_RPP, slope_RP, size_RP = _derivatives(*parts)
        moves_RP = size_RP > NEGLIGIBLE**2 * weight_R[active, None]
        gradient_R[active] = _cosine(slope_RP * moves_RP, size_RP, cost_R[active])
        keep = (gradient_R[active] > GRADIENT) & (cost_R[active] > zero_R[active]) & (damping_R[active] < STUCK)
        if not keep.any():
            break
        active = active[keep]
        new_RP = theta_RP[active] + _step(hessian_RPP[keep], slope_RP[keep], size_RP[keep], damping_R[active])
        new_cost_R = _cost(new_RP, plan, root_RN[active], y_RN[active])
        improved = new_cost_R <= cost_R[active] * (1 + 1e-13)
        theta_RP[active[improved]], cost_R[active[improved]] = new_RP[improved], new_cost_R[improved]
        damping_R[active] = np.where(improved, np.maximum(damping_R[active] / 8, 1e-12), damping_R[active] * 4)
    return theta_RP, cost_R, gradient_R, (gradient_R <= GRADIENT) | (cost_R <= zero_R)


def _derivatives(
    theta_RP: np.ndarray, plan: DesignMatrix, root_RN: np.ndarray, y_RN: np.ndarray, free_RP: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """H (R, P, P), J'r (R, P) and the squared length of J's columns (R, P); zero for fixed parameters."""
    z_KN = plan.z
    log_loss_RN, by_RPN = jacobian(theta_RP, z_KN)
    residual_RN = log_loss_RN - y_RN
    pull_RN = root_RN**2 * _whitened(residual_RN, plan.shared)
    by_RPN = by_RPN * free_RP[:, :, None]
    white_RPN = root_RN[:, None] ** 2 * _whitened(by_RPN, plan.shared)
    # d2 ln L = d2 L / L - (dL / L)(dL / L)', and L's own second derivatives stay within a term.
    hessian_RPP = (white_RPN - by_RPN * pull_RN[:, None]) @ by_RPN.transpose(0, 2, 1)
    slope_RP = (by_RPN @ pull_RN[:, :, None])[:, :, 0]
    n_terms = len(z_KN)
    for k in range(n_terms):
        g, a = k, n_terms + k
        by_a_RN = by_RPN[:, a] * pull_RN
        hessian_RPP[:, g, g] += slope_RP[:, g]
        hessian_RPP[:, g, a] += by_a_RN.sum(axis=1)
        hessian_RPP[:, a, g] = hessian_RPP[:, g, a]
        hessian_RPP[:, a, a] -= by_a_RN @ z_KN[k]
    hessian_RPP[:, -1, -1] += slope_RP[:, -1]
    size_RP = np.einsum("rpn,rpn->rp", by_RPN, white_RPN)
    return hessian_RPP, slope_RP, size_RP


def _whitened(values: np.ndarray, shared: ClusterEffect | None) -> np.ndarray:
    """The values (..., N) minus the share of their cluster's mean that a random effect explains."""
    return values if shared is None else values - shared.mean_share(values)


def _cost(theta_RP: np.ndarray, plan: DesignMatrix, root_RN: np.ndarray, y_RN: np.ndarray) -> np.ndarray:
    """S of each row; infinite where the law overflows, so that such a step is never taken."""
    with np.errstate(all="ignore"):
        term_RKN, e_R = contributions(theta_RP, plan.z)
        residual_RN = root_RN * (np.log(term_RKN.sum(axis=1) + e_R[:, None]) - y_RN)
        cost_R = np.einsum("rn,rn->r", residual_RN, _whitened(residual_RN, plan.shared))
    return np.where(np.isfinite(cost_R), cost_R, np.inf)


def _cosine(slope_RP: np.ndarray, size_RP: np.ndarray, cost_R: np.ndarray) -> np.ndarray:
    norm_RP = np.sqrt(size_RP * cost_R[:, None])
    return np.divide(np.abs(slope_RP), norm_RP, out=np.zeros_like(norm_RP), where=norm_RP > 0).max(axis=1)


def _step(hessian_RPP: np.ndarray, slope_RP: np.ndarray, size_RP: np.ndarray, damping_R: np.ndarray) -> np.ndarray:
    """The next step, solved in units of the Jacobian's columns for good scaling; 0 for fixed parameters."""
    scale_RP = np.sqrt(np.where(size_RP > 1e-300, size_RP, 1.0))
    scaled_RPP = hessian_RPP / (scale_RP[:, :, None] * scale_RP[:, None, :])
    diagonal = np.arange(scaled_RPP.shape[1])
    scaled_RPP[:, diagonal, diagonal] += np.where(size_RP > 1e-300, damping_R[:, None], 1.0)
    slope_RP1 = (slope_RP / scale_RP)[:, :, None]
    try:
        step_RP = -np.linalg.solve(scaled_RPP, slope_RP1)[:, :, 0] / scale_RP
    except np.linalg.LinAlgError:  # two terms are collinear in some row
        step_RP = -(np.linalg.pinv(scaled_RPP) @ slope_RP1)[:, :, 0] / scale_RP
    # Unclipped, a vanishing column would go to infinity in one step, where there is no gradient.
    return np.clip(step_RP, -2.0, 2.0)


def covariance(
    plan: DesignMatrix, solution: Solution, free_RP: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """s^2 (J'J)^-1 of every row, (R, P, P), with s^2 = S / (N - free parameters), and the condition number of J with
    columns of length 1, (R,). Every point has the weight 1.

    Zero for fixed parameters, NaN for those without effect (NEGLIGIBLE), or for all if the others are not identified
    (UNIDENTIFIED).
    """
    free_RP = np.broadcast_to(plan.law.free if free_RP is None else free_RP, solution.theta.shape)
    by_RPN = jacobian(solution.theta, plan.z)[1]
    gram_RPP = by_RPN @ _whitened(by_RPN, plan.shared).transpose(0, 2, 1)
    size_RP = np.sqrt(np.einsum("rpp->rp", gram_RPP))
    moves_RP = free_RP & (size_RP > NEGLIGIBLE * np.sqrt(plan.n_points))
    out_RPP = np.where(free_RP[:, :, None] & free_RP[:, None, :], np.nan, 0.0)
    condition_R = np.full(len(free_RP), np.inf)
    for i, moves_P in enumerate(moves_RP):
        values, vectors = np.linalg.eigh(
            gram_RPP[i][np.ix_(moves_P, moves_P)] / np.outer(size_RP[i, moves_P], size_RP[i, moves_P])
        )
        if values[0] > 0:
            condition_R[i] = np.sqrt(values[-1] / values[0])
        df = plan.n_points - free_RP[i].sum()
        if condition_R[i] < UNIDENTIFIED and df > 0:
            inverse = (vectors / values) @ vectors.T / np.outer(size_RP[i, moves_P], size_RP[i, moves_P])
            out_RPP[i][np.ix_(moves_P, moves_P)] = solution.cost[i] / df * inverse
    return out_RPP, condition_R
