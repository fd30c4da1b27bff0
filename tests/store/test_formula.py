"""Formulas over columns: what they compute, worked out by hand, and what is not of the grammar."""

import numpy as np
import pytest

from sparsedepth.store.formula import parse

COLUMNS = {"x": [1.0, 4.0], "y": [2.0, 0.5], "D/N": [3.0, 5.0], "word": ["a", "b"]}


def value(text, is_condition=False):
    formula = parse(text, COLUMNS, is_condition)
    return np.asarray(
        formula.values(lambda name: np.array(COLUMNS[name]), lambda name: np.array(COLUMNS[name]))
    ).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x", [1, 4]),
        ("D/N", [3, 5]),
        ("`D/N` * 2 - x", [5, 6]),
        ("x + y * 2", [5, 5]),
        ("-(x ** 2) / y", [-0.5, -32]),
        ("sqrt(x) + log2(x)", [1, 4]),
        ("round(y / 3)", [1, 0]),
        ("2 ** -1", 0.5),
    ],
)
def test_arithmetic(text, expected):
    assert value(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x >= 2", [False, True]),
        ("x == 1 or y == 0.5", [True, True]),
        ("not x < 2 and word != 'a'", [False, True]),
        ("word == 'a'", [True, False]),
    ],
)
def test_conditions(text, expected):
    assert value(text, True) == expected


@pytest.mark.parametrize(
    "text",
    ["", "x +", "z", "x.real", "x[0]", "__import__('os')", "lambda: 1", "print(x)", "x if y else 1", "[1]", "'a'",
     "True", "sqrt(x, y)", "sqrt(x=1)", "x // y", "x = 1", "1e999", "1j", "(" * 300 + "x" + ")" * 300, "x" * 600,
     "x < 2", "x @ y", "f'{x}'", "x; y", "(x := 1)"],
)  # fmt: skip
def test_what_is_not_of_the_grammar(text):
    with pytest.raises(ValueError) as told:
        parse(text, COLUMNS)
    assert "\n" not in str(told.value)


def test_a_condition_is_no_number():
    for text in ("x", "x + 1", "1", "word", "x < 1 < y", "word < 'a' + 1"):
        with pytest.raises(ValueError):
            parse(text, COLUMNS, True)


def test_overflow_is_infinite_and_no_crash():
    assert value("9.0 ** 9 ** 9 ** 9") == float("inf")
