"""Documents of real files in every format, and the errors of those that cannot be read."""

import gzip
import json
import os
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparsedepth.config.run import DataConfig, RunConfig
from sparsedepth.data.corpus import MIN_DOCUMENT, documents, fingerprint
from sparsedepth.data.pipeline import prepare


def read(path: Path | str, **fields) -> list[str]:
    return list(documents(DataConfig(corpus=str(path), **fields)))


def test_stdlib_is_source_text_in_a_fixed_order():
    texts = read("stdlib")
    json_source = Path(sysconfig.get_path("stdlib"), "json", "decoder.py").read_text(encoding="utf-8")
    assert json_source in texts
    assert len(texts) > 300 and sum(map(len, texts)) > 5_000_000
    assert texts == read("stdlib")


def test_text_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraph = "x" * 999 + "\n"
    text = (paragraph * 5 + "\n") * 3 + "the end\n"  # 5001 characters up to each blank line
    (tmp_path / "a.txt").write_text(text)
    texts = read(tmp_path / "a.txt")
    assert "".join(texts) == text
    assert [len(each) for each in texts] == [5001, 5001, 5001 + 8]  # the short rest joins the last document
    assert min(map(len, texts)) >= MIN_DOCUMENT
    (tmp_path / "a.txt").write_text("line\n" * 5000)
    assert read(tmp_path / "a.txt") == ["line\n" * 5000], "without blank lines"


def test_folder_of_texts_has_one_document_per_file_in_order_of_path(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b[1].txt").write_text("second\n\nparagraph")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "c.txt").write_text("third")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "notes.md").write_text("another kind")
    (tmp_path / "empty.txt").write_text(" \n")
    assert read(tmp_path) == ["first", "second\n\nparagraph", "third"]


def test_json_lines_do_not_depend_on_the_types_of_other_fields(tmp_path):
    rows = [{"text": "eins", "meta": 1}, {"text": "zwei", "meta": ["list"]}, {"text": None}, {"text": "drei \ud800"}]
    lines = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write(lines)
    assert read(tmp_path / "a.jsonl") == ["eins", "zwei", "drei ?"]
    assert read(tmp_path / "b.json.gz") == ["eins", "zwei", "drei ?"]
    assert read(tmp_path) == ["eins", "zwei", "drei ?"] * 2
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows[:2]).encode("utf-8-sig")))
    assert read(tmp_path / "b.json.gz") == ["eins", "zwei"]


def test_files_as_windows_writes_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "eins"}\r\n{"text": "zwei"}\r\n', encoding="utf-8-sig", newline="")
    (tmp_path / "B.JSON").write_text('[{"text": "drei"}]', encoding="utf-8-sig")
    assert read(tmp_path) == ["drei", "eins", "zwei"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Else the same text in two files, one with the mark, would be two documents: one to train on, one held out."""
    (tmp_path / "a.txt").write_text("the text", encoding="utf-8")
    (tmp_path / "b.txt").write_text("the text", encoding="utf-8-sig")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("the text".encode("utf-8-sig")))
    assert read(tmp_path) == ["the text"] * 3
    assert read(tmp_path / "b.txt") == ["the text"]


def test_parquet_reads_the_named_column(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    pq.write_table(pa.table({"body": [*texts, None], "n": range(301)}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_field="body") == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "does not exist ("),
        ("a.pdf", b"x", "unknown kind '.pdf'; convert it to one of .txt, .jsonl, .json"),
        ("a.txt", b" \n", "contains no text"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8 text"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": ', "a.jsonl, line 2, is not a JSON object; write one object per line"),
        ("a.jsonl", b'["text"]', "line 1, is not a JSON object"),
        ("a.jsonl", b'{"texts": "x"}', "has no field text_field='text'; did you mean 'texts'?"),
        ("a.jsonl", b"", "contains no text"),
        ("a.parquet", b"not parquet", "a.parquet cannot be read"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read(tmp_path / name)
    assert message in str(error.value) and name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        ("hub:", "names no data set; write 'hub:NAME'"),
        ("hub::de", "names no data set; write 'hub:NAME'"),
        ("~no-such-user/a.txt", "no user of this name has a home folder; write the whole path"),
    ],
)
def test_a_corpus_that_names_nothing(tmp_path, corpus, words):
    with pytest.raises(ValueError, match=words):
        prepare(RunConfig(corpus=corpus), tmp_path)


def test_hub_that_cannot_be_reached_says_so(monkeypatch):
    def load_dataset(name, subset, **options):
        raise ConnectionError(f"no {name}\nof {subset}")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        ValueError, match=r"^corpus='hub:some/dataset:sub' cannot be read \(no some/dataset of sub\)"
    ) as told:
        read("hub:some/dataset:sub")
    assert "check the name, the configuration and the network" in str(told.value) and "\n" not in str(told.value)


def test_fingerprint_follows_names_and_sizes(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    first = fingerprint(str(tmp_path))
    assert first is not None and first == fingerprint(str(tmp_path))
    (tmp_path / "a.txt").write_text("longer")
    second = fingerprint(str(tmp_path))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert len({first, second, fingerprint(str(tmp_path))}) == 3
    assert fingerprint(str(tmp_path / "gone")) is None
    assert fingerprint("hub:some/dataset") is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.JSONL.GZ", "a.parquet"])
def test_advice_on_a_corpus_works(tmp_path, name):
    """A field that is missing, one that is there twice, and values that are not text, each followed to the letter."""
    file = tmp_path / name

    def write(fields: list[tuple[str, object]]) -> None:
        if name == "a.parquet":
            pq.write_table(pa.table([[value] for _, value in fields], names=[key for key, _ in fields]), file)
            return
        text = "{" + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields) + "}"
        content = (f"[{text}]" if name == "a.json" else text).encode()
        file.write_bytes(gzip.compress(content) if name.endswith("GZ") else content)

    write([("body", "a text"), ("n", 3)])
    with pytest.raises(ValueError, match=r"has no field text_field='text'; set text_field to one of: body, n"):
        read(file)
    with pytest.raises(ValueError, match=r"holds int in text_field='n', not text; name another field"):
        read(file, text_field="n")
    assert read(file, text_field="body") == ["a text"]
    write([("body", "a text"), ("body", "another")])
    with pytest.raises(ValueError, match=r"'body' (is )?twice.*; rename or delete one") as refused:
        read(file, text_field="body")
    assert "\n" not in str(refused.value)
    write([("body", "a text"), ("other", "another")])
    assert read(file, text_field="body") == ["a text"]


def test_advice_on_paths_works(tmp_path):
    (tmp_path / "notes.md").write_text("a text")
    with pytest.raises(ValueError, match="correct the path"):
        read(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match=r"without any file of the kinds \.txt.*; name one that has some"):
        read(tmp_path)
    (tmp_path / "notes.md").rename(tmp_path / "notes.txt")
    assert read(tmp_path / "notes.txt") == read(tmp_path) == ["a text"]


@pytest.mark.parametrize("has_splits", [True, False])
def test_a_folder_of_save_to_disk_is_told_how_to_become_parquet(tmp_path, has_splits):
    import datasets

    data = datasets.Dataset.from_dict({"text": ["one", "two"]})
    (datasets.DatasetDict(train=data) if has_splits else data).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"was written by save_to_disk of datasets .* write it as Parquet") as refused:
        read(tmp_path / "saved")
    folder = str(refused.value).partition("load_from_disk('")[2].partition("'")[0]
    datasets.load_from_disk(folder).to_parquet(tmp_path / "corpus.parquet")
    assert read(tmp_path / "corpus.parquet") == ["one", "two"]


@pytest.mark.parametrize("name", ["b.jsonl.zst", "b.txt.xz", "b.parquet.gz", "b.csv", "b.ARROW"])
def test_data_beside_a_corpus_that_is_not_read_is_named(tmp_path, name):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=rf"{name} not read; decompress or convert to \.txt"):
        assert read(tmp_path) == ["a text"]


def test_of_a_data_sets_folder_the_training_split_is_read_and_the_rest_said(tmp_path, capsys):
    """As `hf download --repo-type dataset` makes it: splits by name, what describes the set, a licence."""
    for place in ("data/train-00000-of-00001", "data/test-00000-of-00001", "data/validation-00000-of-00001"):
        path = tmp_path / "set" / f"{place}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        split = path.stem.partition("-")[0]
        path.write_text("".join(json.dumps({"text": f"{split} {number}"}) + "\n" for number in range(12)))
    for name in ("LICENSE.txt", "README.txt", "dataset_infos.json", "data/dataset_info.json", "CITATION.txt"):
        (tmp_path / "set" / name).write_text('{\n  "default": {}\n}')
    assert read(tmp_path / "set") == [f"train {number}" for number in range(12)]
    config = RunConfig(corpus=str(tmp_path / "set"), val_fraction=0.3)
    corpus = prepare(config, tmp_path / "data")
    rest = ["CITATION.txt", "LICENSE.txt", "README.txt", "data/dataset_info.json", "data/test-00000-of-00001.jsonl"]
    rest += ["data/validation-00000-of-00001.jsonl", "dataset_infos.json"]
    assert corpus.manifest.left_out == rest
    assert f"read 12 documents in 1 file; left out: {', '.join(rest)}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["train.txt", "test.txt", "dev.txt", "eval-1.txt", "notes.txt"], ["notes.txt", "train.txt"]),
        (["training/a.txt", "testing/a.txt", "valid/a.txt"], ["training/a.txt"]),
        (["test.txt", "validation.txt"], ["test.txt", "validation.txt"]),
        (
            ["trainer.txt", "contest.txt", "latest.txt", "evaluate.txt"],
            ["contest.txt", "evaluate.txt", "latest.txt", "trainer.txt"],
        ),
        (["a.txt", "licence.txt", "LICENSE-MIT.txt", "license_agreement.txt"], ["a.txt", "license_agreement.txt"]),
    ],
)
def test_splits_are_told_by_whole_words_of_names(tmp_path, names, kept):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == kept


def test_links_out_of_a_corpus_and_pipes_are_refused_by_name(tmp_path):
    (tmp_path / "secret.txt").write_text("of the host")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.txt").write_text("ours")
    (folder / "b.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"b\.txt is a link to .*secret\.txt'; name that file, or copy it there"):
        read(folder)
    (folder / "b.txt").unlink()
    os.mkfifo(folder / "b.txt")
    for corpus in (folder, folder / "b.txt"):
        with pytest.raises(ValueError, match=r"b\.txt is a pipe; name a file"):
            read(corpus)


def test_a_snapshot_of_a_data_set_in_the_hubs_cache_is_read(tmp_path):
    repository = tmp_path / "datasets--me--set"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "0123").write_text('{"text": "one"}\n')
    data = repository / "snapshots" / "ab" / "data"
    data.mkdir(parents=True)
    (data / "train.jsonl").symlink_to(Path("..", "..", "..", "blobs", "0123"))
    assert read(data.parent) == ["one"]
