"""Counts of layers by hand; `test_usefulness` has the models."""

import pytest

from sparsedepth.measure.bootstrap import BootstrapEstimate
from sparsedepth.measure.usefulness import needed_layers, share_above


def test_a_needed_block_costs_more_than_the_threshold_and_for_sure():
    def block(value, lo):
        return BootstrapEstimate(value=value, lo=lo, hi=None if lo is None else 9.0, n_sequences=4)

    blocks = [block(0.3, 0.1), block(0.3, -0.1), block(0.04, 0.03), block(-0.2, -0.3)]  # sure; unsure; cheap; better
    counted = BootstrapEstimate(value=2.0, lo=2.0, hi=3.0, n_sequences=4)
    needed = needed_layers(blocks, 0.05, counted)
    assert (needed.value, needed.lo, needed.hi) == (1, 1, 3)
    assert needed_layers([block(0.3, None)], 0.05, counted).value is None  # one sequence has no interval


INCREASES = [0.5, 0.15, 0.1, 0.06, 0.01, -0.02]


@pytest.mark.parametrize(("threshold", "count"), [(0.02, 4), (0.05, 4), (0.1, 2), (0.2, 1), (0.5, 0)])
def test_strictly_more_than_the_threshold_counts(threshold, count):
    assert share_above(INCREASES, threshold) == pytest.approx(count / 6)


@pytest.mark.parametrize("increases", [[], [0.5, None]])
def test_an_unknown_increase_makes_the_count_unknown(increases):
    assert share_above(increases, 0.1) is None
