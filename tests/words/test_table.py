from hypothesis import given, settings, strategies as st

from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.table import fitted_table, table

ANSWER = QueryResult(columns=("norm", "val_loss", "steps"), rows=(("pre", 3.14159, 256), ("post", None, None)))


def test_a_table_is_aligned():
    assert table(ANSWER, width=80) == (
        "norm  val_loss  steps\n"
        "----  --------  -----\n"
        "pre      3.142    256\n"
        "post         -      -"
    )  # fmt: skip


def test_rows_too_wide_stand_below_each_other():
    assert table(ANSWER, width=17) == (
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
    assert table(answer, width=14) == (
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
    text = table(QueryResult(columns=("name", "x", "n"), rows=tuple(rows)), width=width)
    assert all(len(line) <= width for line in text.split("\n"))


def test_long_text_is_shortened_and_the_last_column_takes_the_room_left():
    answer = QueryResult(columns=("a", "b"), rows=(("x" * 100, "y" * 100),))
    assert table(answer, width=142).split("\n")[2] == "x" * 57 + "..." + "  " + "y" * 77 + "..."
    assert table(answer, width=300).split("\n")[2] == "x" * 57 + "..." + "  " + "y" * 100


def test_rows_left_out_are_counted():
    text = table(QueryResult(columns=("x",), rows=tuple((i,) for i in range(1500))), width=80, max_rows=100)
    assert text.count("\n") == 102
    assert text.endswith("99\n... and 1,400 more rows; csv or json has them all")


def test_both_ends_of_an_interval_give_way_together():
    wide = QueryResult(columns=("name", "lo", "hi", "note"), rows=(("a" * 12, "b" * 12, "c" * 12, "d " * 9),))
    head = fitted_table(wide, ("lo hi",), 50).text.splitlines()[0].split()
    assert head == ["name", "note"] and "lo" in fitted_table(wide, ("lo hi",), 80).text


def test_a_fitted_table_says_which_columns_it_shows_and_names_those_it_left_out():
    """By name, not by the text: a cell may hold a column's name, and a narrow head may be broken over lines. A column
    without a value is not columns that did not fit."""
    columns = ("name", "lo", "hi", "empty", "note")
    wide = QueryResult(columns=columns, rows=(("lo " * 4, "b" * 12, "c" * 12, None, "d " * 9),))
    narrow = fitted_table(wide, ("empty", "lo hi"), 50)
    assert narrow.columns == ("name", "note") and narrow.text.endswith("\ncolumns that did not fit: lo, hi")
    assert "left out" not in fitted_table(wide, ("empty", "lo hi"), 80).text
    by_value = fitted_table(wide, (), 20)  # a line for each value
    assert by_value.columns == ("name", "lo", "hi", "note") and len(by_value.text.splitlines()) > 4


def test_an_answer_without_rows_or_with_blank_names_is_a_table():
    assert fitted_table(QueryResult(columns=("a", "b"), rows=())).text == "no rows"
    assert table(QueryResult(columns=(" ",), rows=(("",),)), 80) == "\n-\n"
