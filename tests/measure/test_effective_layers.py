"""Counts over thresholds."""

from hypothesis import given
from hypothesis import strategies as st

from sparsedepth.measure.effective_layers import THRESHOLDS, count_above, effective_layers

INCREASES = st.lists(st.floats(-1, 2), min_size=1, max_size=12)


def test_by_hand():
    affine, skipped = [0.5, 0.1, 0.06, -0.2], [3.0, 0.15, 0.15, 0.0]
    found = effective_layers(affine, skipped)
    assert [one.threshold for one in found] == [0.02, 0.05, 0.1, 0.2]
    assert [one.affine_layers for one in found] == [3, 3, 1, 1]  # 0.1 does not exceed 0.1
    assert [one.identity_layers for one in found] == [3, 3, 3, 1]
    assert [one.affine_share for one in found] == [0.75, 0.75, 0.25, 0.25]
    assert found[2].identity_share == 0.75


def test_what_is_unknown_is_not_counted_as_useless():
    (found,) = effective_layers([0.5, None], [0.5, 0.5], [0.1])
    assert (found.affine_layers, found.affine_share, found.identity_layers) == (None, None, 2)
    assert count_above([], 0.1) is None


@given(increases=INCREASES)
def test_a_higher_threshold_counts_no_more(increases):
    found = effective_layers(increases, increases)
    counts = [one.affine_layers for one in found]
    assert counts == sorted(counts, reverse=True) and len(counts) == len(THRESHOLDS)
    assert all(one.affine_layers == one.identity_layers for one in found)
