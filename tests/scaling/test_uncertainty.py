"""Bootstrap and held-out error: at nominal coverage, and refused where too few points are left."""

from dataclasses import replace

import numpy as np
import pytest
from support.depth_law_points import TRUTH, grid, planted

from sparsedepth.scaling.fit import fit
from sparsedepth.scaling.law import TERMS, Law, design
from sparsedepth.scaling.uncertainty import bootstrap, held_out

DEPTH = Law(terms=tuple(term for term in TERMS if term.name == "depth"))


@pytest.fixture(scope="module")
def found():
    return fit(planted(grid(), noise=0.003))


def test_bootstrap_intervals_bracket_the_fit_and_are_as_wide_as_its_errors(found):
    boot = bootstrap(found, 200)
    for name, (lo, hi) in boot.intervals.items():
        assert lo < found.parameter(name).value < hi
    assert boot.theta[:, 4].std() == pytest.approx(np.sqrt(found.covariance[4, 4]), rel=0.3)
    assert (bootstrap(found, 30).theta == boot.theta[:30]).all()
    assert "a_l" not in bootstrap(fit(found.points, Law(fixed={"a_l": 1.0})), 20).intervals


@pytest.mark.slow
def test_the_bootstrap_covers_the_truth():
    """120 data sets of 60 points and one term. A coverage of 95% has a standard deviation of 2%, and a pair bootstrap
    of so few points runs a little short: 87% to 99%."""
    points = grid(widths=(512,), tokens=tuple(np.linspace(1e9, 1.1e9, 6)), depths=(2, 4, 6, 8, 12, 16, 24, 32, 48, 64))
    mean = np.exp(np.log(points["n_layers"]).mean())
    loss = 1.7 + 0.15 * (points["n_layers"] / mean) ** -TRUTH["a_l"]
    noise_RN = 0.01 * np.random.default_rng(11).standard_normal((120, len(points)))
    covered = []
    for i, noise_N in enumerate(noise_RN):
        one = fit(points.assign(loss=loss * np.exp(noise_N)), DEPTH, n_starts=2)
        lo, hi = bootstrap(one, 100, seed=i).intervals["a_l"]
        covered.append(lo <= TRUTH["a_l"] <= hi)
    assert 0.87 <= np.mean(covered) <= 0.99


def test_held_out_error_is_that_of_the_noise(found):
    one = held_out(found)
    assert one.rmse_fitted == pytest.approx(np.sqrt(found.cost / 80))
    assert one.rmse_fitted < one.rmse < 1.3 * one.rmse_fitted
    assert one.mean_abs == pytest.approx(0.003 * np.sqrt(2 / np.pi), rel=0.25)
    poor = held_out(fit(found.points, DEPTH))
    assert poor.rmse > 20 * one.rmse  # two terms missing
    with pytest.raises(ValueError, match="80 points in 1 folds"):
        held_out(found, n_folds=1)


def test_folds_are_advised_that_can_be_fitted(found):
    eight = replace(found, plan=design(found.points[:8], Law()), points=found.points[:8])
    with pytest.raises(ValueError, match=r"8 points in 8 folds leave too few to fit 7 parameters; --folds 0 none"):
        held_out(eight, n_folds=8)


def test_too_few_replicates_are_refused(found):
    with pytest.raises(ValueError, match="19 bootstrap replicates have no 95% interval"):
        bootstrap(found, 19)
