"""Tables of others: the file that is named is read, whatever its path looks like; names and values are normalised."""

import hashlib
import os

import pandas as pd
import pyarrow as pa
import pytest

from sparsedepth.store.table_file import by_value, named, open_table, read_texts

PLACES = ("runs[1]", "runs?", "runs*", "{runs,other}", "**", "loss=9", "~", "$HOME", "a b", "ä'\"")


def rows_of(path, columns=list):
    with open_table(read_texts(path, columns)) as table:
        names = [name for name in read_texts(path, columns).columns.column_names]
        return [row[1:] for row in table.rows(", ".join(f'"{name}"' for name in names), "texts")], list(table.notes)


@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_a_path_is_no_pattern(tmp_path, form):
    """Of the file and of its folder, each beside a file that the pattern would match; a Hive folder is no column."""
    wanted, other = pd.DataFrame({"loss": ["1.5"]}), pd.DataFrame({"loss": ["9.5"]})

    def write(frame, path):
        path.parent.mkdir(exist_ok=True)
        if form == "parquet":
            frame.to_parquet(path)
        elif form in ("csv", "tsv"):
            frame.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
        else:
            frame.to_json(path, orient="records", lines=form == "jsonl")

    for name in ("runs1", "runs", "other", "loss=9", "a"):
        write(other, tmp_path / f"{name}.{form}")
        write(other, tmp_path / name / f"t.{form}")
    for place in PLACES:
        for path in (tmp_path / f"{place}.{form}", tmp_path / place / f"t.{form}"):
            write(wanted, path)
            texts = read_texts(path, list)
            assert texts.columns.to_pylist() == [{"loss": "1.5"}], path
            assert texts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_temporary_folder_may_look_like_a_pattern(tmp_path, monkeypatch):
    folder = tmp_path / "loss=9" / "[a]"
    folder.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    pd.DataFrame({"loss": [1.5]}).to_parquet(tmp_path / "t.parquet")
    assert rows_of(tmp_path / "t.parquet")[0] == [("1.5",)]


def test_what_is_no_regular_file_is_refused_by_name(tmp_path):
    outside, folder = tmp_path / "secret.csv", tmp_path / "folder"
    outside.write_text("loss\n1\n")
    folder.mkdir()
    (folder / "link.csv").symlink_to(outside)
    (folder / "own.csv").write_text("loss\n2\n")
    (folder / "latest.csv").symlink_to("own.csv")
    (folder / "dir.csv").mkdir()
    os.mkfifo(folder / "pipe.csv")
    for name, told in (
        ("link", f"is a link to '{outside}'; name that file"),
        ("pipe", "is a pipe"),
        ("dir", "is a folder"),
    ):
        with pytest.raises(ValueError, match=f"{name}.csv {told}"):
            read_texts(folder / f"{name}.csv", list)
    assert rows_of(folder / "latest.csv")[0] == [("2",)], "a link within its folder"


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", "0"), ("0.0", "0"), ("00", "0"), ("01", "1"), ("1.50", "1.5"), ("-2.0", "-2"), ("True", "true"),
     ("1e3", "1e3"), ("0e12345", "0e12345"), ("1.2.3", "1.2.3"), ("baseline", "baseline"), ("7.", "7"),
     ("1E+03", "1000"), ("1.50e-02", "0.015"),
     ("9007199254740993.0", "9007199254740993"), ("12345678901234567891", "12345678901234567891")],
)  # fmt: skip
def test_one_text_for_a_value(text, value):
    """Ids of any length keep their digits, and hexadecimal ones their letters."""
    assert by_value(text) == value


def test_blanks_and_nameless_columns_are_left_out_and_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("variant , loss,,\nlns ,1,,\n lns,\u00a02,,\n  ,3,,\n")
    rows, notes = rows_of(path)
    assert rows == [("lns", "1"), ("lns", "2"), (None, "3")]
    assert notes == [
        "2 columns without a name left out",
        "blanks around 2 names left out, such as 'variant'",
        "blanks around 3 values of 'variant' left out",
        "blanks around 1 value of 'loss' left out",
    ]
    with pytest.raises(ValueError, match="column 'loss' is twice"):
        named(["loss", "loss "])


def test_the_chosen_columns_alone_are_read_and_a_choice_may_refuse(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    assert read_texts(path, lambda names: names[1:]).columns.to_pydict() == {"b": ["2", "4"]}
    with open_table(read_texts(path, lambda names: [])) as table:
        assert table.n_rows == 2 and table.rows("1", "texts") == [(1, 1), (2, 1)]

    def refuse(names):
        raise ValueError(f"nothing is wanted of {names}")

    with pytest.raises(ValueError, match=r"^nothing is wanted of \['a', 'b'\]$"):
        read_texts(path, refuse)


def test_a_column_of_a_blank_is_no_column(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{" ": 1, "nothing": 2}\n')
    assert rows_of(path)[0] == [("2",)]
    assert isinstance(read_texts(path, list).columns, pa.Table)
