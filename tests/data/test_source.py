"""The door to a run's sequences: one module for each kind of corpus, and no file of another kind on the way."""

import json

import numpy as np
import pytest
from reference import run_config
from support.entered_files import entered_files
from support.tiny_sweep import corpus

from sparsedepth.config.corpus import PAIRS, TASK, TEXT, corpus_name, kind_of
from sparsedepth.data.sequences import check_files, open_source

OWN = {
    "text": set(),
    "pairs": {"data/pairs.py"},
    "task": {"data/tasks/stream.py", "data/tasks/k_hop.py", "data/tasks/draws.py"},
}
"""Files that only a run of the kind may enter; pairs are text with answers."""


@pytest.mark.parametrize(
    ("named", "kind", "place", "origin"),
    [
        ("stdlib", TEXT, "stdlib", "built in"),
        ("hub:wikitext:v2", TEXT, "wikitext:v2", "hub"),
        ("some/task:of/text.txt", TEXT, "some/task:of/text.txt", "files"),
        ("sft:pairs.jsonl", PAIRS, "pairs.jsonl", "files"),
        ("task:k_hop", TASK, "k_hop", "built in"),
    ],
)
def test_a_corpus_names_its_kind_and_place(named, kind, place, origin):
    name = corpus_name(named)
    assert (name.kind, name.place, name.origin) == (kind, place, origin)
    assert kind_of(None) is kind_of(3) is TEXT


def named(kind, tmp_path) -> dict:
    if kind == "text":
        return {"corpus": str(corpus(tmp_path)), "val_fraction": 0.2, "vocab_size": 257}
    if kind == "pairs":
        rows = [{"prompt": f"{n} and {n}?", "answer": str(2 * n)} for n in range(60)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {"corpus": f"sft:{tmp_path / 'pairs.jsonl'}", "val_fraction": 0.3, "vocab_size": 257}
    return {"corpus": "task:k_hop", "vocab_size": None}


@pytest.mark.parametrize("kind", OWN)
def test_a_run_enters_no_file_of_another_kind(kind, tmp_path):
    config = run_config(**{"seq_len": 32, "batch_tokens": 128, "train_tokens": 1280, **named(kind, tmp_path)})

    def read() -> None:
        check_files(config.corpus)
        source = open_source(config, tmp_path / "data")
        first = source.batch(config, 0)
        assert len(first) == config.batch_tokens // config.seq_len
        assert (first.inputs == source.batch(config, 0).inputs).all()
        rows = {row.tobytes() for row in np.asarray(source.held_out(config.seq_len, 4 * config.seq_len).inputs)}
        assert rows.isdisjoint(row.tobytes() for row in np.asarray(first.inputs))

    entered = entered_files(read)
    others = set().union(*(files for other, files in OWN.items() if other != kind))
    assert not entered & others
    assert OWN[kind] <= entered
