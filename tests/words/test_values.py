import datetime
import math
from decimal import Decimal

import pytest
from hypothesis import given, settings, strategies as st

from sparsedepth.words.values import assignment, readable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.14159, "3.142"),
        (0.00123456, "0.001235"),
        (9.99999, "10.00"),
        (12345.678, "12346"),
        (1.5e-7, "1.500e-07"),
        (1.23456e12, "1.235e+12"),
        (math.nan, "-"),
        (-math.inf, "-"),
        (None, "-"),
        (True, "true"),
        (Decimal("0.10"), "0.10"),
        ([1, 0.5, None], "[1, 0.5, null]"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
    ],
)
def test_values_for_people(value, text):
    assert readable(value) == text


@settings(max_examples=50)
@given(st.floats(1e-4, 9.9e6))
def test_four_significant_digits_are_kept(value):
    assert float(readable(value)) == pytest.approx(value, rel=0.5001e-3)


def test_a_mapping_is_shown_as_it_is_set():
    assert (
        assignment("lr_of", '[["embed", 2.0], ["residual_scalars", 0.01]]')
        == "lr_of={embed: 2, residual_scalars: 0.01}"
    )
