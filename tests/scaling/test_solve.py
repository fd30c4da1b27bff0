"""The batched fitter: the same optimum as an independent optimiser, rows that do not disturb each other."""

import numpy as np
import pytest
from scipy.optimize import least_squares
from support.depth_law_points import grid, planted, theta_of

from sparsedepth.scaling.fit import starts
from sparsedepth.scaling.law import Law, design, jacobian
from sparsedepth.scaling.solve import covariance, solve


@pytest.fixture(scope="module")
def plan():
    return design(planted(grid(), noise=0.004), Law())


def test_the_optimum_and_covariance_are_those_of_an_independent_optimiser(plan):
    reference = least_squares(
        lambda theta_P: jacobian(theta_P[None], plan.z)[0][0] - plan.y, theta_of(plan), xtol=1e-14, ftol=1e-14
    )
    found = solve(plan, starts(plan, 20, np.random.default_rng(0))).best()
    assert found.converged[0]
    assert found.cost[0] == pytest.approx(2 * reference.cost, rel=1e-9)
    assert found.theta[0] == pytest.approx(reference.x, rel=1e-4)
    expected = np.linalg.inv(reference.jac.T @ reference.jac) * 2 * reference.cost / (plan.n_points - 7)
    assert covariance(plan, found)[0][0] == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_points_without_noise_give_the_law_back(plan):
    exact = design(planted(grid()), Law())
    found = solve(exact, starts(exact, 20, np.random.default_rng(1))).best()
    assert found.converged[0]
    assert found.theta[0] == pytest.approx(theta_of(exact), abs=1e-6)


def test_a_weight_of_two_is_the_point_twice_and_of_none_its_absence(plan):
    points = planted(grid(), noise=0.004)
    begin_RP = theta_of(plan)[None]
    weight_N = np.ones(len(points))
    weight_N[:10], weight_N[10:20] = 2, 0
    weighted = solve(plan, begin_RP, weight_N[None])
    repeated = points.loc[np.repeat(points.index, weight_N.astype(int))].reset_index(drop=True)
    other = design(repeated, Law())
    moved = solve(other, theta_of(other)[None])
    assert weighted.cost[0] == pytest.approx(moved.cost[0], rel=1e-9)
    assert weighted.theta[0, 3:6] == pytest.approx(moved.theta[0, 3:6], rel=1e-6)


def test_a_row_does_not_depend_on_its_neighbours(plan):
    generator = np.random.default_rng(2)
    weight_RN = generator.multinomial(plan.n_points, np.full(plan.n_points, 1 / plan.n_points), size=300).astype(float)
    start_RP = np.tile(theta_of(plan), (300, 1))
    together = solve(plan, start_RP, weight_RN)
    assert together.converged.all()
    alone = solve(plan, start_RP[200:201], weight_RN[200:201])
    assert alone.theta[0] == pytest.approx(together.theta[200], rel=1e-7)


def test_what_is_not_free_stays_and_has_no_variance(plan):
    free_RP = np.array([[True] * 4 + [False] + [True] * 2])
    start_RP = theta_of(plan)[None] + 0.0
    start_RP[0, 4] = 2.0
    found = solve(plan, start_RP, free_RP=free_RP)
    assert found.converged[0] and found.theta[0, 4] == 2.0
    inside = covariance(plan, found, free_RP=free_RP)[0][0]
    assert (inside[4] == 0).all() and (np.delete(np.diag(inside), 4) > 0).all()


def test_standard_intervals_cover_the_truth_at_their_level():
    """400 data sets fitted as one batch; coverage of 95% has a standard deviation of 1.1% here: 92% to 98%."""
    points = planted(grid())
    plan = design(points, Law())
    truth_P, n_sets = theta_of(plan), 400
    y_RN = plan.y + 0.003 * np.random.default_rng(7).standard_normal((n_sets, plan.n_points))
    found = solve(plan, np.tile(truth_P, (n_sets, 1)), y_RN=y_RN)
    assert found.converged.all()
    errors_RP = np.sqrt(np.einsum("rpp->rp", covariance(plan, found)[0]))
    covered_P = (np.abs(found.theta - truth_P) <= 1.9925 * errors_RP).mean(axis=0)  # t with 80 - 7 degrees of freedom
    assert ((covered_P >= 0.92) & (covered_P <= 0.98)).all(), covered_P
