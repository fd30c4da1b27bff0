"""Shards are whole or absent, made once whoever asks, and say when they are damaged."""

import fcntl
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsedepth.config.run import RunConfig
from sparsedepth.data import text
from sparsedepth.data.pipeline import Corpus, data_id, prepare
from sparsedepth.data.text import KIND, TextSource
from sparsedepth.data.tokenizer import _END, ByteTokenizer
from sparsedepth.files import sha256

CHILD = """
import os, pathlib, signal, sys
from sparsedepth.config.run import RunConfig
from sparsedepth.data import pipeline

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def die_later(kept, file, text, ids, add=pipeline._TokenFile.add):
    add(kept, file, text, ids)
    if kept.documents == 40:
        die()

if sys.argv[3] == "in a shard":
    pipeline._TokenFile.add = die_later
elif sys.argv[3] == "at the manifest":
    pipeline.write_json = die
locked, make_folder = pipeline.locked, pipeline._make_folder
pipeline.locked = lambda *given: (print("waiting", flush=True), locked(*given))[1]
pipeline._make_folder = lambda *given: (print("tokenising", flush=True), make_folder(*given))
corpus = pipeline.prepare(RunConfig(corpus=sys.argv[1]), pathlib.Path(sys.argv[2]))
print(corpus.manifest.data_hash, flush=True)
"""


def config(corpus: Path | str, **fields: Any) -> RunConfig:
    return RunConfig(corpus=str(corpus), **fields)


def start(corpus: Path, root: Path, death: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(corpus), str(root), death]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def documents(ids: np.ndarray, corpus: Corpus) -> list[str]:
    ends = np.flatnonzero(ids == corpus.manifest.eod)
    assert ends[-1] == len(ids) - 1
    return [corpus.tokenizer().decode(part.tolist()) for part in np.split(ids, ends + 1)[:-1]]


def test_every_document_is_in_one_shard_with_its_end(texts, tmp_path):
    corpus = prepare(config(texts), tmp_path / "data")
    train, val = documents(corpus.train, corpus), documents(corpus.val, corpus)
    assert sorted(train + val) == sorted(file.read_text() for file in texts.iterdir())
    manifest = corpus.manifest
    assert (manifest.train.documents, manifest.val.documents) == (len(train), len(val)) and len(val) > 0
    assert manifest.train.bytes == sum(len(text.encode()) for text in train)
    assert manifest.val.tokens == len(corpus.val) == manifest.val.bytes + len(val)  # a byte is a token; one end each
    assert TextSource(corpus).bytes_per_token == manifest.val.bytes / len(corpus.val)
    assert corpus.train.dtype == np.uint16
    assert manifest.train.sha256 == sha256(corpus.folder / "train.bin")


def test_bpe_is_trained_on_training_text_only(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"word{i} " * 20)
    seen: list[str] = []
    train_bpe = text.make_tokenizer

    def spy(name, training_texts, max_size):
        seen.extend(training_texts)
        return train_bpe(name, seen, max_size)

    monkeypatch.setattr(text, "make_tokenizer", spy)
    corpus = prepare(config(folder, tokenizer="bpe:264", val_fraction=0.3), tmp_path / "data")
    assert sorted(seen) == sorted(documents(corpus.train, corpus))
    assert len(documents(corpus.val, corpus)) == 40 - len(seen) > 0
    assert set(corpus.manifest.versions) == {"python", "sparsedepth", "tokenizers"}


def test_the_same_configuration_gives_the_same_bytes_and_a_second_call_reads_them(texts, tmp_path):
    one = prepare(config(texts), tmp_path / "one")
    two = prepare(config(texts, seq_len=128, seed=5), tmp_path / "two")
    assert one.manifest == two.manifest
    before = one.folder.stat().st_mtime_ns
    assert prepare(config(texts), tmp_path / "one").manifest.data_hash == one.manifest.data_hash
    assert one.folder.stat().st_mtime_ns == before


def test_data_id_follows_exactly_the_fields_that_change_tokens():
    base = RunConfig()
    for changed in ({"tokenizer": "bpe:264"}, {"val_fraction": 0.1}, {"max_corpus_tokens": 9}, {"corpus": "x.txt"}):
        assert data_id(RunConfig.model_validate(changed), KIND) != data_id(base, KIND)
    for same in ({"seed": 1}, {"seq_len": 128}, {"chunk_len": 512}, {"vocab_size": 300}, {"text_field": "body"}):
        assert data_id(RunConfig.model_validate(same), KIND) == data_id(base, KIND)
    assert data_id(config("x.jsonl", text_field="body"), KIND) != data_id(config("x.jsonl"), KIND)


def test_three_documents_are_enough_and_one_is_not(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": name}) + "\n" for name in ("one", "two", "three")))
    corpus = prepare(config(tmp_path / "a.jsonl"), tmp_path / "data")
    assert (corpus.manifest.train.documents, corpus.manifest.val.documents) == (2, 1)
    (tmp_path / "b.jsonl").write_text('{"text": "only"}\n{"text": "only"}\n')
    with pytest.raises(ValueError, match="1 distinct document"):
        prepare(config(tmp_path / "b.jsonl"), tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir() if path.is_dir()] == [corpus.folder.name]


def test_max_corpus_tokens_stops_the_reading(texts, tmp_path):
    corpus = prepare(config(texts, max_corpus_tokens=500), tmp_path / "data")
    assert 500 <= len(corpus.train) < 500 + 140  # no document is cut, and the longest has 138 bytes
    assert len(corpus.val) > 0


def test_held_out_documents_stand_in_order_of_their_hash(texts, tmp_path):
    corpus = prepare(config(texts, val_fraction=0.4), tmp_path / "data")
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in documents(corpus.val, corpus)]
    assert len(hashes) > 10 and hashes == sorted(hashes)


def test_shards_inside_the_corpus_folder_are_refused(texts):
    with pytest.raises(ValueError, match="would read its own output"):
        prepare(config(texts), texts / "data")
    assert not (texts / "data").exists()


def test_large_vocabularies_take_four_bytes(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "size", 70_000)
    corpus = prepare(config(texts, vocab_size=70_000), tmp_path / "data")
    assert corpus.train.dtype == np.uint32 and len(documents(corpus.train, corpus)) > 0


def test_vocab_size_is_checked_against_finished_shards_too(texts, tmp_path):
    prepare(config(texts), tmp_path / "data")
    with pytest.raises(ValueError, match="has 257 tokens and the model vocab_size=100"):
        prepare(config(texts, vocab_size=100), tmp_path / "data")


def test_two_processes_at_once_tokenise_once(texts, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    with open(root / f".{data_id(config(texts), KIND)}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        children = [start(texts, root) for _ in range(2)]
        for child in children:  # both run, and both stand before the lock
            assert child.stdout is not None and "waiting" in child.stdout.readline()
    output = [child.communicate(timeout=300)[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted("tokenising" in lines for lines in output) == [False, True]
    assert output[0][-1] == output[1][-1] == prepare(config(texts), root).manifest.data_hash


@pytest.mark.parametrize("death", ["in a shard", "at the manifest"])
def test_killed_half_way_leaves_nothing_that_looks_finished(texts, tmp_path, death):
    root = tmp_path / "data"
    child = start(texts, root, death)
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    left = [path for path in root.iterdir() if path.is_dir()]
    assert len(left) == 1 and ".tmp-" in left[0].name and not (left[0] / "manifest.json").exists()
    corpus = prepare(config(texts), root)
    assert [path for path in root.iterdir() if path.is_dir()] == [corpus.folder]
    assert corpus.manifest == prepare(config(texts), tmp_path / "fresh").manifest


def test_a_failure_leaves_no_folder(texts, tmp_path):
    (texts / "30.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"30\.txt is not UTF-8 text .*; save it as UTF-8"):
        prepare(config(texts), tmp_path / "data")
    assert [path.suffix for path in (tmp_path / "data").iterdir()] == [".lock"]


def test_damage_is_named_with_its_fix(texts, tmp_path):
    corpus = prepare(config(texts, tokenizer="bpe:264"), tmp_path / "data")
    for name in ("train.bin", "val.bin", "tokenizer.json", "manifest.json"):
        path = corpus.folder / name
        whole = path.read_bytes()
        for broken, reason in ((bytes([whole[0] ^ 1]) + whole[1:], "damaged"), (whole[:-2], ""), (None, "missing")):
            path.unlink()
            if broken is not None:
                path.write_bytes(broken)
            with pytest.raises(ValueError, match=f"{name} .*{reason}.*delete the folder .* and run again"):
                prepare(config(texts, tokenizer="bpe:264"), tmp_path / "data")
            path.write_bytes(whole)
    again = prepare(config(texts, tokenizer="bpe:264"), tmp_path / "data")
    assert again.manifest == corpus.manifest


def test_a_local_tokenizer_that_changed_is_refused_and_one_that_is_gone_is_not_needed(texts, tmp_path):
    folder, other = (tmp_path / name for name in ("tokenizer", "other"))
    for path, size in ((folder, "bpe:264"), (other, "bpe:270")):
        path.mkdir()
        prepare(config(texts, tokenizer=size, vocab_size=300), tmp_path / "made").tokenizer().save(path)
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}))
    run = config(texts, tokenizer=str(folder), vocab_size=300)
    corpus = prepare(run, tmp_path / "data")
    shutil.copyfile(other / "tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer='.*' has changed since .* was made from it"):
        prepare(run, tmp_path / "data")
    folder.rename(tmp_path / "elsewhere")
    assert prepare(run, tmp_path / "data").manifest == corpus.manifest


def test_text_that_changed_is_refused_and_text_that_is_gone_is_not_needed(texts, tmp_path):
    corpus = prepare(config(texts), tmp_path / "data")
    (texts / "new.txt").write_text("more")
    with pytest.raises(ValueError, match="has changed since"):
        prepare(config(texts), tmp_path / "data")
    texts.rename(tmp_path / "elsewhere")
    assert prepare(config(texts), tmp_path / "data").manifest.data_hash == corpus.manifest.data_hash


def test_an_end_of_document_that_is_not_the_tokenizers_is_refused(texts, tmp_path):
    assert prepare(config(texts, mask_documents=True), tmp_path).manifest.eod == 256
    with pytest.raises(ValueError, match="eod=10, and tokenizer='byte' ends a document with 256; set eod=256"):
        prepare(config(texts, mask_documents=True, eod=10), tmp_path)
