import math

import pytest

from sparsedepth.store.small_sample import mean_interval, paired_share_interval, seed_means, share_interval


def test_an_interval_by_hand():
    """1, 2, 3: mean 2, s = 1, t(2) = 4.30265 and half-width t / sqrt 3."""
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.48413, 2 + 2.48413), abs=1e-4)
    assert mean_interval([5.0] * 4) == (5.0, 5.0, 5.0)


def test_too_few_values_have_no_interval():
    assert mean_interval([]) == (None, None, None)
    assert mean_interval([1.0]) == (1.0, None, None)
    assert mean_interval([1.0, 2.0]) == (1.5, None, None)


def test_runs_that_share_a_seed_count_once_and_runs_without_one_each():
    values = [(0, 1.0), (1, 5.0), (0, 3.0), (None, 7.0), (math.nan, 8.0), (None, 9.0)]
    assert seed_means(values) == [2.0, 5.0, 7.0, 8.0, 9.0]


def test_a_difference_of_shares_of_the_same_trials_by_hand():
    """10 trials, 4 lost and 1 gained: 3 / 12 +- 1.95996 sqrt((6 / 12 - 1 / 16) / 12); alike is not certain."""
    assert paired_share_interval(4, 1, 10) == pytest.approx((0.25 - 0.374236, 0.25 + 0.374236), abs=1e-5)
    lo, hi = paired_share_interval(0, 0, 100)
    assert -0.03 < lo < 0 < hi < 0.03
    assert paired_share_interval(3, 0, 3)[1] == 1


def test_wilsons_interval_of_a_share_by_hand():
    """1 of 4: middle .25 + 3.8415 / 8 = .7302, half 1.95996 sqrt(.1875 / 4 + 3.8415 / 64) = .6406, both over 1.9604."""
    assert share_interval(0.25, 4) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert share_interval(0.0, 4)[0] == 0.0 and share_interval(1.0, 4)[1] == 1.0
