"""Counts over thresholds, by hand."""

import pytest

from sparsedepth.measure.effective_layers import share_above

INCREASES = [0.5, 0.15, 0.1, 0.06, 0.01, -0.02]


@pytest.mark.parametrize(("threshold", "count"), [(0.02, 4), (0.05, 4), (0.1, 2), (0.2, 1), (0.5, 0)])
def test_strictly_more_than_the_threshold_counts(threshold, count):
    assert share_above(INCREASES, threshold) == pytest.approx(count / 6)


@pytest.mark.parametrize("increases", [[], [0.5, None]])
def test_an_unknown_increase_makes_the_count_unknown(increases):
    assert share_above(increases, 0.1) is None
