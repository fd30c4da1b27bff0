import csv
import datetime
import io
import json
import math
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from sparsedepth.store import query_result
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.plain_text import wrapped

ANSWER = QueryResult(columns=("norm", "val_loss", "steps"), rows=(("pre", 3.14159, 256), ("post", None, None)))

HOSTILE = [
    "=cmd|' /C calc'!A0",
    "+1+1",
    "-1+1",
    "@SUM(A1)",
    "\t=1+1",
    "\r=1",
    " =1",
    "<script>alert(1)</script>",
    r"\input{/etc/passwd}",
    "a & b % c # d $ e_f ^ ~ { }",
    "[x](javascript:alert(1)) ![i](http://e/x.png)",
    "| a | b |\n| c |",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eevil\u2066\u200b",
    'quote" comma, line\nbreak',
    "\x00",
]


def test_csv_is_exact_and_null_is_empty():
    answer = QueryResult(columns=("a", "b", "c"), rows=((0.1 + 0.2, None, -5), (math.nan, True, "x")))
    assert query_result.to_csv(answer) == "a,b,c\n0.30000000000000004,,-5\n,true,x"


def test_json_is_exact_and_null_is_null():
    answer = QueryResult(columns=("a", "a", "b"), rows=((0.1 + 0.2, None, [1.0, math.inf]),))
    assert json.loads(query_result.to_json(answer)) == [{"a": 0.30000000000000004, "a_2": None, "b": [1.0, None]}]


def test_markdown_and_latex():
    rows = ("| norm | val_loss | steps |", "| --- | ---: | ---: |", "| pre | 3.142 | 256 |", "| post | - | - |")
    assert query_result.to_markdown(ANSWER).split("\n") == [*rows]
    head, line = r"norm & val\_loss & steps \\", r"\hline"
    rows = (line, head, line, r"pre & 3.142 & 256 \\", r"post & - & - \\", line)
    assert query_result.to_latex(ANSWER).split("\n") == [r"\begin{tabular}{lrr}", *rows, r"\end{tabular}"]


@pytest.mark.parametrize("format", query_result.FORMATS)
def test_every_format_renders_nothing_and_one_value(format):
    assert isinstance(query_result.render(QueryResult(columns=("x",), rows=()), format), str)
    assert query_result.render(QueryResult(columns=("x" * 40,) * 9, rows=()), "table") == "no rows"
    assert "3.5" in query_result.render(QueryResult(columns=("x",), rows=((3.5,),)), format)
    with pytest.raises(ValueError, match="format='html' is not one of table, csv, json, markdown, latex"):
        query_result.render(ANSWER, "html")


# Text from anyone


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("format", query_result.FORMATS)
def test_no_control_character_gets_out(format, text):
    shown = query_result.render(QueryResult(columns=(text,), rows=((text,), ([text],))), format)
    assert all(character.isprintable() or character == "\n" for character in shown)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_spreadsheet_sees_no_formula(text):
    for row in csv.reader(io.StringIO(query_result.to_csv(QueryResult(columns=(text,), rows=((text,),))))):
        (cell,) = row
        assert not cell.lstrip().startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_sees_one_cell_without_markup(text):
    shown = query_result.to_markdown(QueryResult(columns=("x",), rows=((text,),))).split("\n")
    assert len(shown) == 3
    bare = shown[2].removeprefix("| ").removesuffix(" |").replace("\\\\", "")
    for character in "|<>[]*`":
        assert bare.count(character) == bare.count("\\" + character)


@pytest.mark.parametrize("text", HOSTILE)
def test_latex_sees_only_escapes(text):
    row = query_result.to_latex(QueryResult(columns=("x",), rows=((text,),))).split("\n")[4].removesuffix(r" \\")
    known = ["textbackslash", "textasciicircum", "textasciitilde", "textless", "textgreater", "textbar"]
    for command in known:
        row = row.replace("\\" + command + "{}", "")
    for character in "{}$&#%_":
        row = row.replace("\\" + character, "")
    row = row.replace("{[}", "").replace("{*}", "")
    assert not set(row) & set("\\{}$&#%_^~")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.text(), st.none() | st.floats() | st.integers() | st.booleans()), max_size=4))
def test_any_text_keeps_the_shape_of_every_format(rows):
    answer = QueryResult(columns=("name", "x"), rows=tuple(rows))
    assert [len(row) for row in csv.reader(io.StringIO(query_result.to_csv(answer)))] == [2] * (len(rows) + 1)
    assert [row["name"] for row in json.loads(query_result.to_json(answer))] == [name for name, _ in rows]
    assert len(query_result.to_markdown(answer).split("\n")) == len(rows) + 2
    assert len(query_result.to_latex(answer).split("\n")) == len(rows) + 6


def test_parquet_holds_exact_numbers_and_nulls():
    import pyarrow.parquet as pq

    columns = ("n", "n", "x", "mixed", "empty", "text", "list")
    rows = ((2**60, 1, 0.1, 1, None, "=cmd()", [1.0]), (None, 2, None, "a", None, None, None))
    table = pq.read_table(io.BytesIO(query_result.encode(QueryResult(columns=columns, rows=rows), "parquet")))
    assert table.column_names == ["n", "n_2", "x", "mixed", "empty", "text", "list"]
    assert table.to_pylist() == [
        {"n": 2**60, "n_2": 1, "x": 0.1, "mixed": "1", "empty": None, "text": "=cmd()", "list": [1.0]},
        {"n": None, "n_2": 2, "x": None, "mixed": "a", "empty": None, "text": None, "list": None},
    ]


@pytest.mark.parametrize(
    ("asked", "out", "chosen"),
    [
        (None, None, "table"),
        ("csv", None, "csv"),
        (None, "a.md", "markdown"),
        (None, "a.TEX", "latex"),
        (None, "a.parquet", "parquet"),
        (None, "a.txt", "table"),
        ("json", "a.txt", "json"),
        ("csv", "x.dat", "csv"),
    ],
)
def test_the_format_is_as_asked_or_as_the_file_ends(asked, out, chosen):
    assert query_result.choose_format(asked, out and Path(out)) == chosen


@pytest.mark.parametrize(
    ("asked", "out", "says"),
    [
        ("json", "a.csv", "-o 'a.csv' is for csv, and --format is 'json'; drop one"),
        ("table", "a.JSON", "-o 'a.JSON' is for json, and --format is 'table'; drop one"),
        (None, "x.xlsx", r"-o 'x.xlsx': .xlsx is no format of a result; end in .*\.csv"),
        ("parquet", None, r"-o FILE\.parquet"),
        ("xml", None, "'xml' is not one of table, csv"),
    ],
)
def test_a_format_that_is_none_or_not_that_of_the_file_is_refused(asked, out, says):
    with pytest.raises(ValueError, match=says):
        query_result.choose_format(asked, out and Path(out))


def test_what_a_query_rounded_has_its_digits_and_what_it_did_not_has_four():
    """round(x, 2), round(x, 6), an average, round(x, 0), a cost; in a column the most digits that any value has."""
    rows = ((0.81, 0.123456, 0.1 + 0.2, 4.0, 6.4e11), (0.5, 0.75, 1 / 3, 10.0, 8e10), (None, 1.0, None, 3.0, 1e9))
    shown = QueryResult(columns=tuple("abcde"), rows=rows).with_decimals()
    assert [[query_result.readable(value) for value in row] for row in shown.rows] == [
        ["0.81", "0.123456", "0.3000", "4", "6.400e+11"],
        ["0.50", "0.750000", "0.3333", "10", "8.000e+10"],
        ["-", "1.000000", "-", "3", "1.000e+09"],
    ]
    assert query_result.to_csv(QueryResult(columns=("a",), rows=((Decimal("0.50"),),))) == "a\n0.5"


def test_a_table_is_aligned():
    assert query_result.table(ANSWER, width=80) == (
        "norm  val_loss  steps\n"
        "----  --------  -----\n"
        "pre      3.142    256\n"
        "post         -      -"
    )  # fmt: skip


def test_rows_too_wide_stand_below_each_other():
    assert query_result.table(ANSWER, width=17) == (
        "row 1 -----------\n"
        "norm      pre\n"
        "val_loss  3.142\n"
        "steps     256\n"
        "row 2 -----------\n"
        "norm      post\n"
        "val_loss  -\n"
        "steps     -"
    )


def test_names_and_texts_take_several_lines_before_a_table_falls_apart():
    answer = QueryResult(columns=("val_loss", "setting"), rows=((3.14159, "lns, one key head"), (None, "as_is")))
    assert query_result.table(answer, width=14) == (
        " val_  setting\n"
        " loss\n"
        "-----  -------\n"
        "3.142  lns,\n"
        "       one key\n"
        "       head\n"
        "    -  as_is"
    )  # fmt: skip


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(st.text(max_size=100), st.floats(), st.integers() | st.none()), max_size=5),
    width=st.integers(30, 120),
)
def test_a_table_fits_the_terminal(rows, width):
    text = query_result.table(QueryResult(columns=("name", "x", "n"), rows=tuple(rows)), width=width)
    assert all(len(line) <= width for line in text.split("\n"))


def test_long_text_is_shortened_and_the_last_column_takes_the_room_left():
    answer = QueryResult(columns=("a", "b"), rows=(("x" * 100, "y" * 100),))
    assert query_result.table(answer, width=142).split("\n")[2] == "x" * 57 + "..." + "  " + "y" * 77 + "..."
    assert query_result.table(answer, width=300).split("\n")[2] == "x" * 57 + "..." + "  " + "y" * 100


def test_rows_left_out_are_counted():
    text = query_result.table(
        QueryResult(columns=("x",), rows=tuple((i,) for i in range(1500))), width=80, max_rows=100
    )
    assert text.count("\n") == 102
    assert text.endswith("99\n... and 1,400 more rows; csv or json has them all")


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
    assert query_result.readable(value) == text


@settings(max_examples=50)
@given(st.floats(1e-4, 9.9e6))
def test_four_significant_digits_are_kept(value):
    assert float(query_result.readable(value)) == pytest.approx(value, rel=0.5001e-3)


def test_sentences_go_on_two_columns_further_in():
    assert wrapped(["a b c", "", "  one two three"], 9) == "a b c\n\n  one two\n    three\n"
    assert wrapped(["\none two three", "four"], 9) == "\none two\n  three\nfour\n"


def test_both_ends_of_an_interval_give_way_together():
    wide = QueryResult(columns=("name", "lo", "hi", "note"), rows=(("a" * 12, "b" * 12, "c" * 12, "d " * 9),))
    head = query_result.fit(wide, ("lo hi",), 50).text.splitlines()[0].split()
    assert head == ["name", "note"] and "lo" in query_result.fit(wide, ("lo hi",), 80).text


def test_a_fitted_table_says_which_columns_it_shows_and_names_those_it_left_out():
    """By name, not by the text: a cell may hold a column's name, and a narrow head may be broken over lines. A column
    without a value is not columns that did not fit."""
    columns = ("name", "lo", "hi", "empty", "note")
    wide = QueryResult(columns=columns, rows=(("lo " * 4, "b" * 12, "c" * 12, None, "d " * 9),))
    narrow = query_result.fit(wide, ("empty", "lo hi"), 50)
    assert narrow.columns == ("name", "note") and narrow.text.endswith("\ncolumns that did not fit: lo, hi")
    assert "left out" not in query_result.fit(wide, ("empty", "lo hi"), 80).text
    by_value = query_result.fit(wide, (), 20)  # a line for each value
    assert by_value.columns == ("name", "lo", "hi", "note") and len(by_value.text.splitlines()) > 4
