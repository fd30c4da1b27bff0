import csv
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from sparsedepth.store.query_result import QueryResult
from sparsedepth.words import formats

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
    assert formats.to_csv(answer) == "a,b,c\n0.30000000000000004,,-5\n,true,x"


def test_json_is_exact_and_null_is_null():
    answer = QueryResult(columns=("a", "a", "b"), rows=((0.1 + 0.2, None, [1.0, math.inf]),))
    assert json.loads(formats.to_json(answer)) == [{"a": 0.30000000000000004, "a_2": None, "b": [1.0, None]}]


def test_markdown_and_latex():
    rows = ("| norm | val_loss | steps |", "| --- | ---: | ---: |", "| pre | 3.142 | 256 |", "| post | - | - |")
    assert formats.to_markdown(ANSWER).split("\n") == [*rows]
    head, line = r"norm & val\_loss & steps \\", r"\hline"
    rows = (line, head, line, r"pre & 3.142 & 256 \\", r"post & - & - \\", line)
    assert formats.to_latex(ANSWER).split("\n") == [r"\begin{tabular}{lrr}", *rows, r"\end{tabular}"]


@pytest.mark.parametrize("format", formats.FORMATS)
def test_every_format_renders_nothing_and_one_value(format):
    assert isinstance(formats.render(QueryResult(columns=("x",), rows=()), format), str)
    assert formats.render(QueryResult(columns=("x" * 40,) * 9, rows=()), "table") == "no rows"
    assert "3.5" in formats.render(QueryResult(columns=("x",), rows=((3.5,),)), format)
    with pytest.raises(ValueError, match="format='html' is not one of table, csv, json, markdown, latex"):
        formats.render(ANSWER, "html")


# Text from anyone


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("format", formats.FORMATS)
def test_no_control_character_gets_out(format, text):
    shown = formats.render(QueryResult(columns=(text,), rows=((text,), ([text],))), format)
    assert all(character.isprintable() or character == "\n" for character in shown)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_spreadsheet_sees_no_formula(text):
    for row in csv.reader(io.StringIO(formats.to_csv(QueryResult(columns=(text,), rows=((text,),))))):
        (cell,) = row
        assert not cell.lstrip().startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_sees_one_cell_without_markup(text):
    shown = formats.to_markdown(QueryResult(columns=("x",), rows=((text,),))).split("\n")
    assert len(shown) == 3
    bare = shown[2].removeprefix("| ").removesuffix(" |").replace("\\\\", "")
    for character in "|<>[]*`":
        assert bare.count(character) == bare.count("\\" + character)


@pytest.mark.parametrize("text", HOSTILE)
def test_latex_sees_only_escapes(text):
    row = formats.to_latex(QueryResult(columns=("x",), rows=((text,),))).split("\n")[4].removesuffix(r" \\")
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
    assert [len(row) for row in csv.reader(io.StringIO(formats.to_csv(answer)))] == [2] * (len(rows) + 1)
    assert [row["name"] for row in json.loads(formats.to_json(answer))] == [name for name, _ in rows]
    assert len(formats.to_markdown(answer).split("\n")) == len(rows) + 2
    assert len(formats.to_latex(answer).split("\n")) == len(rows) + 6


def test_parquet_holds_exact_numbers_and_nulls():
    import pyarrow.parquet as pq

    columns = ("n", "n", "x", "mixed", "empty", "text", "list")
    rows = ((2**60, 1, 0.1, 1, None, "=cmd()", [1.0]), (None, 2, None, "a", None, None, None))
    table = pq.read_table(io.BytesIO(formats.encode(QueryResult(columns=columns, rows=rows), "parquet")))
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
    assert formats.choose_format(asked, out and Path(out)) == chosen


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
        formats.choose_format(asked, out and Path(out))
