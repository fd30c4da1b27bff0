"""Power laws, and the least squares that all laws of scaling are fitted by.

    L = E + sum_k exp(a_k - alpha_k z_k),      z_k = ln x_k less its mean

Shapes: N rows, K terms, P parameters (E, a_1 .. a_K, alpha_1 .. alpha_K, then others of a law)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

LARGEST = 60.0
"""Logarithms of terms are cut off here, so that no step of a fit overflows."""
EVALUATIONS = 400
At = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Parameters -> what the law says of each row, and its derivatives, (N, P)."""


def power_law(theta_P: np.ndarray, z_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L at each row, and its derivatives by E, a and alpha, (N, 1 + 2 K)."""
    a_K, alpha_K = theta_P[1 : 1 + 2 * len(z_KN)].reshape(2, -1)
    part_KN = np.exp(np.clip(a_K[:, None] - alpha_K[:, None] * z_KN, -LARGEST, LARGEST))
    by_PN = np.concatenate([np.ones((1, z_KN.shape[1])), part_KN, -z_KN * part_KN])
    return theta_P[0] + part_KN.sum(axis=0), by_PN.T


class Solved(NamedTuple):
    theta_P: np.ndarray
    free_P: np.ndarray
    """Whether a parameter is not held where it started."""
    jacobian_NP: np.ndarray
    residual_N: np.ndarray
    """Of the rows about the law."""

    @property
    def cost(self) -> float:
        return float(self.residual_N @ self.residual_N)

    @property
    def by_row_PN(self) -> np.ndarray:
        """What each row adds to each parameter, to first order."""
        by_row_PN = np.zeros(self.jacobian_NP.T.shape)
        by_row_PN[self.free_P] = np.linalg.pinv(self.jacobian_NP[:, self.free_P])
        return by_row_PN


def solve(at: At, y_N: np.ndarray, start_P: np.ndarray, free_P: np.ndarray, tolerance: float = 1e-13) -> Solved:
    """Least squares from a start, in the parameters that are free (Levenberg and Marquardt)."""

    def full(free: np.ndarray) -> np.ndarray:
        theta_P = start_P.copy()
        theta_P[free_P] = free
        return theta_P

    end_P = full(
        least_squares(
            lambda free: at(full(free))[0] - y_N,
            start_P[free_P],
            jac=lambda free: at(full(free))[1][:, free_P],
            method="lm",
            max_nfev=EVALUATIONS,
            xtol=tolerance,
            ftol=tolerance,
            gtol=tolerance,
        ).x
    )
    fitted_N, jacobian_NP = at(end_P)
    return Solved(end_P, free_P, jacobian_NP, y_N - fitted_N)
