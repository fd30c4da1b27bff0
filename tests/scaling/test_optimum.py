"""The best shape at a budget: against the closed form, inside the points and beyond them."""

from dataclasses import replace

import numpy as np
import pytest
from support.depth_law_points import grid, planted

from sparsedepth.scaling.fit import fit
from sparsedepth.scaling.law import TERMS, Law, predict
from sparsedepth.scaling.optimum import fit_sizes, optimum
from sparsedepth.scaling.uncertainty import bootstrap


@pytest.fixture(scope="module")
def found():
    return fit(planted(grid(), noise=0.002))


def test_the_sizes_are_read_from_the_points(found):
    sizes = fit_sizes(found.points)
    assert (sizes.block, sizes.table) == (pytest.approx(12), pytest.approx(32_000))
    assert sizes.worst < 1e-9
    params = 12 * 512**2 * 8 + 32_000 * 512
    assert sizes.width(params, np.array([8.0]))[0] == pytest.approx(512)


def test_without_tables_the_optimum_has_a_closed_form(found):
    """N = f m^2 l, so m^-a_m = (N / f)^(-a_m/2) l^(a_m/2): M l^(a_m/2) + C l^-a_l is lowest where
    l^(a_l + a_m/2) = 2 a_l C / (a_m M)."""
    points = found.points.assign(model_size=10 * found.points["d_model"] ** 2 * found.points["n_layers"])
    bare = fit(points)
    values = {one.name: one.value for one in bare.parameters()}
    params = 3e8
    depth_c = values["c_l"] * 100 ** -values["a_l"]
    width_c = values["c_m"] * (params / 10) ** (-values["a_m"] / 2)
    power = 1 / (values["a_l"] + values["a_m"] / 2)
    expected = (2 * values["a_l"] * depth_c / (values["a_m"] * width_c)) ** power
    best = optimum(bare, None, params)
    assert best.n_layers == pytest.approx(expected, rel=1e-4)
    assert best.d_model == pytest.approx(np.sqrt(params / 10 / expected), rel=1e-4)
    assert best.n_layers_rounded in (int(expected), int(expected) + 1)


def test_no_shape_of_the_budget_does_better_and_the_interval_holds_it(found):
    best = optimum(found, bootstrap(found, 200), 3e8, tokens=1e10)
    for factor in (0.9, 1.1):
        depth = np.array([best.n_layers * factor])
        shapes = found.points[:1].assign(n_layers=depth, d_model=best.sizes.width(3e8, depth), num_tokens=1e10)
        at_best = shapes.assign(n_layers=best.n_layers, d_model=best.d_model)
        here, there = (predict(found.theta[None], found.plan, one)[0, 0] for one in (shapes, at_best))
        assert there < here
    assert best.n_layers_interval[0] < best.n_layers < best.n_layers_interval[1]
    assert best.loss_interval[0] < best.loss < best.loss_interval[1]
    assert best.warnings == () and best.n_at_edge == 0


def test_beyond_the_points_is_called_extrapolation(found):
    warnings = " ".join(optimum(found, None, 1e13, tokens=1e15).warnings)
    for name in ("model_size=1e+13", "n_layers=", "d_model=", "num_tokens=1e+15"):
        assert f"extrapolation: {name}" in warnings


def test_the_loss_needs_tokens_only_where_the_law_has_data(found):
    assert optimum(found, None, 3e8).loss is None
    one_budget = planted(grid(tokens=(1e9,)), noise=0.002)
    assert optimum(fit(one_budget), None, 3e8).loss is not None


def test_sizes_of_another_family_are_called_rough(found):
    odd = found.points.assign(model_size=found.points["model_size"] * np.linspace(0.5, 2, 80))
    assert any("not of one family" in warning for warning in optimum(fit(odd), None, 3e8).warnings)


def test_what_has_no_answer_is_refused(found):
    with pytest.raises(ValueError, match="only in a law that has both"):
        optimum(fit(found.points, Law(terms=TERMS[1:])), None, 1e8)
    with pytest.raises(ValueError, match="params=-1 must be a positive number"):
        optimum(found, None, -1)
    with pytest.raises(ValueError, match="the points have no model_size"):
        optimum(fit(found.points.assign(model_size=np.nan)), None, 1e8)
    rising = replace(found, theta=found.theta * np.array([1, 1, 1, 1, -1, 1, 1]))
    with pytest.raises(ValueError, match="the law has no best shape"):
        optimum(rising, None, 3e8)
