"""A fit recovers what was planted, and says what the points cannot tell; the law's formula by hand, and its
derivatives against differences."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support.depth_law_points import PARTS, TRUTH, E, grid, planted, theta_of

from sparsedepth.scaling.fit_law import bootstrap, fit_law, refit
from sparsedepth.scaling.law import TERMS, Law, design
from sparsedepth.scaling.report import Report, log_correlations
from sparsedepth.words.scaling import law_text, law_warnings


def warnings_of(fitted):
    return law_warnings(Report(source="x", fit=fitted, n_excluded=0, boot=None))


@pytest.fixture(scope="module")
def found():
    return fit_law(planted(grid(), noise=0.003))


def test_known_exponents_are_recovered_within_their_intervals(found):
    values = found.parameters
    for name, truth in {**TRUTH, "E": E, **{f"{name}_part": part for name, part in PARTS.items()}}.items():
        one = values[name]
        assert one.lo < truth < one.hi, name
    assert found.n_reached > 10 and found.gradient < 1e-5
    assert found.objective == pytest.approx(100 * 0.003**2 * 73 / 80, rel=0.3)  # noise variance, 7 of 80 spent
    assert warnings_of(found) == []


def test_the_coefficients_are_in_stated_units(found):
    values = found.parameters
    mean_depth = np.exp(np.log(found.points["n_layers"]).mean())
    part = values["c_l"].value * (100 * mean_depth) ** -values["a_l"].value
    assert part == pytest.approx(values["depth_part"].value)
    assert values["c_l"].unit == "nat/token x (n_layers x 100)^a"


def test_a_fit_is_deterministic_and_blind_to_the_order_of_points(found):
    assert (fit_law(found.points).theta == found.theta).all()
    shuffled = fit_law(found.points.sample(frac=1, random_state=0))
    assert shuffled.theta == pytest.approx(found.theta, rel=1e-4)


def test_a_fixed_exponent_stays_and_costs_more(found):
    held = fit_law(found.points, Law(fixed={"a_l": 2.0}))
    assert held.parameters["a_l"].value == 2.0
    assert held.objective > found.objective and held.df == found.df + 1
    one = held.parameters["a_l"]
    assert (one.stderr, one.lo, one.hi) == (None, None, None)


def test_a_term_that_matters_cannot_be_left_out_for_free(found):
    without = fit_law(found.points, Law(terms=tuple(term for term in TERMS if term.name != "depth")))
    assert law_text(without.law) == "L = c_m m^-a_m + c_D D^-a_D + E"
    assert without.objective > 20 * found.objective


def test_a_constant_predictor_is_dropped_by_name():
    found = fit_law(planted(grid(widths=(512,)), noise=0.003))
    assert "a_m" not in found.law.names
    assert warnings_of(found)[0].startswith(
        "d_model is 512 at all 20 points: the width term cannot be distinguished from E"
    )


def test_two_depths_need_a_fixed_exponent():
    points = planted(grid(depths=(8, 32)), noise=0.003)
    free = fit_law(points)
    assert "a_l" not in free.law.names and "--fix a_l=1 keeps it" in warnings_of(free)[0]
    assert fit_law(points, Law(fixed={"a_l": 1.2})).parameters["a_l"].value == 1.2
    with pytest.raises(ValueError, match="no term of the law can be identified: d_model is"):
        fit_law(planted(grid(widths=(512,), depths=(8, 32), tokens=(1e9,))), Law())


def test_width_and_depth_that_move_together_cannot_be_told_apart():
    points = grid(widths=(256,), tokens=tuple(np.geomspace(1e9, 1e11, 6)))
    points["d_model"] = 64 * points["n_layers"] * np.exp(0.02 * np.random.default_rng(0).standard_normal(len(points)))
    found = fit_law(planted(points, noise=0.003))
    assert log_correlations(found)["width", "depth"] > 0.99
    said = " ".join(warnings_of(found))
    assert "log width and log depth correlate at 1.00" in said
    assert "is not distinguishable from 0" in said  # one of the two takes all that both could


def test_a_loss_that_does_not_fall_leaves_nothing_to_its_term():
    points = grid(widths=(512,), tokens=(1e9,), depths=(4, 8, 16, 32, 64, 128, 256))
    found = fit_law(points.assign(loss=2 + 0.01 * np.log(points["n_layers"])), Law(fixed={"a_l": 1.0}))
    assert any("depth_part is at its bound, 0" in warning for warning in warnings_of(found))
    assert all(
        np.isfinite(value) for one in found.parameters.values() for value in (one.lo, one.hi) if value is not None
    )


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="7 points cannot fit 7 parameters"):
        fit_law(planted(grid()).sample(7, random_state=3))


CHINCHILLA = {"c_m": 274.7, "a_m": 0.9455, "c_l": 3004.0, "a_l": 1.325, "c_D": 8.494, "a_D": 0.2991, "E": 1.754}
"""The optimum of the depth law at the 203 points of 2602.05970."""


def test_the_published_optimum_is_reached_along_its_flat_valley():
    """Losses of that optimum, at random shapes whose width and depth correlate as there: 0.92."""
    generator = np.random.default_rng(0)
    layers_N = np.round(np.exp(generator.uniform(np.log(12), np.log(47), 203)))
    width_N = 64 * np.round(8.5 * layers_N**0.6 * np.exp(0.11 * generator.standard_normal(203)))
    points = pd.DataFrame({"d_model": width_N, "n_layers": layers_N})
    points["num_tokens"] = np.exp(generator.uniform(np.log(2.5e8), np.log(3.2e11), 203))
    law = CHINCHILLA
    parts = law["c_m"] * width_N ** -law["a_m"] + law["c_l"] * (100 * layers_N) ** -law["a_l"]
    points["loss"] = parts + law["c_D"] * (points["num_tokens"] / 1e6) ** -law["a_D"] + law["E"]
    found = fit_law(points)
    assert log_correlations(found)["width", "depth"] == pytest.approx(0.92, abs=0.03)
    assert {name: found.parameters[name].value for name in law} == pytest.approx(law, rel=1e-3)
    assert found.n_reached > 10


def test_a_weight_of_two_is_the_point_twice_and_of_none_its_absence():
    points = planted(grid(), noise=0.004)
    weight_N = np.ones(len(points))
    weight_N[:10], weight_N[10:20] = 2, 0
    plan = design(points, Law())
    weighted = refit(plan, theta_of(plan), weight_N=weight_N)
    other = design(points.loc[np.repeat(points.index, weight_N.astype(int))].reset_index(drop=True), Law())
    twice = refit(other, theta_of(other))
    assert weighted.cost == pytest.approx(twice.cost, rel=1e-9)
    assert weighted.theta_P[4:] == pytest.approx(twice.theta_P[4:], rel=1e-4)


def test_standard_intervals_cover_the_truth_at_their_level():
    """80 data sets: a coverage of 95% has a standard deviation of 2.4%."""
    covered = []
    for seed in range(80):
        parameters = fit_law(planted(grid(), noise=0.003, seed=seed), n_starts=1, seed=1).parameters.values()
        covered.append([one.lo < TRUTH[one.name] < one.hi for one in parameters if one.name in TRUTH])
    assert (np.abs(np.mean(covered, axis=0) - 0.95) <= 0.06).all()


# The bootstrap


def test_bootstrap_intervals_bracket_the_fit_and_are_as_wide_as_its_errors(found):
    boot = bootstrap(found, 200)
    for name, (lo, hi) in boot.intervals.items():
        assert lo < found.parameters[name].value < hi
    assert boot.theta[:, 5].std() == pytest.approx(np.sqrt(found.covariance[5, 5]), rel=0.3)
    assert (bootstrap(found, 30).theta == boot.theta[:30]).all()
    assert "a_l" not in bootstrap(fit_law(found.points, Law(fixed={"a_l": 1.0})), 20).intervals


@pytest.mark.slow
def test_the_bootstrap_covers_the_truth():
    """120 data sets of 60 points and one term. A coverage of 95% has a standard deviation of 2%, and a pair bootstrap
    of so few points runs a little short: 87% to 99%."""
    depth = Law(terms=tuple(term for term in TERMS if term.name == "depth"))
    points = grid(widths=(512,), tokens=tuple(np.linspace(1e9, 1.1e9, 6)), depths=(2, 4, 6, 8, 12, 16, 24, 32, 48, 64))
    mean = np.exp(np.log(points["n_layers"]).mean())
    loss = 1.7 + 0.15 * (points["n_layers"] / mean) ** -TRUTH["a_l"]
    noise_RN = 0.01 * np.random.default_rng(11).standard_normal((120, len(points)))
    covered = []
    for i, noise_N in enumerate(noise_RN):
        one = fit_law(points.assign(loss=loss * np.exp(noise_N)), depth, n_starts=2)
        lo, hi = bootstrap(one, 100, seed=i).intervals["a_l"]
        covered.append(lo <= TRUTH["a_l"] <= hi)
    assert 0.87 <= np.mean(covered) <= 0.99


def test_too_few_replicates_are_refused(found):
    with pytest.raises(ValueError, match="19 bootstrap replicates have no 95% interval"):
        bootstrap(found, 19)


# The law


def test_a_loss_by_hand():
    """100^-1/2 x 10 + 400^-1/2 x 8 + 1^-0.3 x 0.5 + 1 = 1 + 0.4 + 0.5 + 1: l counts hundredths, D millions."""
    plan = design(pd.DataFrame([{"d_model": 100.0, "n_layers": 4.0, "num_tokens": 1e6, "loss": 3.0}]), Law())
    theta_P = np.array([0.0, math.log(1.0), math.log(0.4), math.log(0.5), 0.5, 0.5, 0.3])
    stated = {number.name: number.of(theta_P) for number in plan.quantities()}
    assert [stated[name] for name in ("c_m", "c_l", "c_D")] == pytest.approx([10, 8, 0.5])
    assert np.exp(plan.at(theta_P)[0]) == pytest.approx([2.9])
    # four times as deep: 1600^-1/2 x 8 = 0.2
    deep = replace(plan, z=plan.z + np.array([[0], [math.log(4)], [0]]))
    assert np.exp(deep.at(theta_P)[0]) == pytest.approx([2.7])


def test_the_jacobian_is_the_derivative():
    plan = design(planted(grid()), Law())
    theta_P = theta_of(plan)
    by_NP = plan.at(theta_P)[1]
    for p in range(len(theta_P)):
        shift = 1e-6 * np.eye(len(theta_P))[p]
        up, down = (plan.at(theta_P + sign * shift)[0] for sign in (1, -1))
        assert by_NP[:, p] == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed": {"a_x": 1.0}}, "cannot fix 'a_x': the exponents of this law are a_D, a_l, a_m"),
        ({"fixed": {"a_l": -1.0}}, "cannot fix a_l=-1.0"),
        ({"terms": TERMS[:1], "fixed": {"a_l": 1.0}}, "cannot fix 'a_l'"),
        ({"terms": ()}, "nothing to fit"),
    ],
)
def test_a_law_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Law(**options)
