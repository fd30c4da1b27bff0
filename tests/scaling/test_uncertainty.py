"""The bootstrap: at nominal coverage, and refused for too few replicates."""

import numpy as np
import pytest
from support.depth_law_points import TRUTH, grid, planted

from sparsedepth.scaling.fit import fit
from sparsedepth.scaling.law import TERMS, Law
from sparsedepth.scaling.uncertainty import bootstrap

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


def test_too_few_replicates_are_refused(found):
    with pytest.raises(ValueError, match="19 bootstrap replicates have no 95% interval"):
        bootstrap(found, 19)
