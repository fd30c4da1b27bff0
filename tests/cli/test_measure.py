"""`sparsedepth measure` on our own runs and on Hugging Face folders."""

import json
import re

import pytest
import torch
import yaml
from families import tiny
from tiny import BASE, corpus, sparsedepth
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3 with a character tokenizer, as transformers saves them."""
    place = tmp_path_factory.mktemp("model") / "qwen3"
    torch.manual_seed(0)
    tiny("qwen3", vocab_size=40, max_position_embeddings=64).save_pretrained(place)
    words = Tokenizer(WordLevel({c: i for i, c in enumerate("?.0123456789 abdeimnorstu")}, unk_token="?"))
    words.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token=".").save_pretrained(place)
    return place


SMALL = ("--seq-len", 32, "--set", "val_tokens=512", "--set", "measure_tokens=128", "--set", "fit_tokens=512")


def test_a_hugging_face_folder(folder, tmp_path):
    text = corpus(tmp_path)
    out, _ = sparsedepth("measure", folder, "--corpus", text, *SMALL, "-o", tmp_path / "scores")
    assert "qwen3, 4 layers" in out and re.search(r"causal_score +\d", out)
    about = json.loads((tmp_path / "scores" / "about.json").read_text())
    assert about["family"] == "qwen3" and about["config"]["seq_len"] == 32
    assert (tmp_path / "scores" / "layers.parquet").exists()
    _, err = sparsedepth("measure", folder, "--corpus", text, *SMALL, "-o", tmp_path / "scores", code=2)
    assert "not an empty folder" in err


def test_a_run_measures_as_its_record_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**BASE, "corpus": str(corpus(tmp_path)), "n_layers": 2}))
    results = tmp_path / "results"
    sparsedepth("train", path, "--out", results, "--threads", 1)
    (run,) = (results / "runs").iterdir()
    sparsedepth("measure", run, "-o", tmp_path / "again")
    record = json.loads((run / "summary.json").read_text())
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    missing = {name for name, value in again.items() if value is None}
    assert missing < set(again) and all(record[name] is None for name in missing)
    assert all(record[name] == pytest.approx(again[name], rel=1e-5) for name in set(again) - missing)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{folder}", "--seq-len", 65), "64 positions"),
        (("{folder}", "--set", "measure_token=3"), "did you mean 'measure_tokens'"),
        (("{tmp}",), "neither a folder"),
        (("{folder}", "--device", "cuda:9"), "cuda:9"),
    ],
)
def test_mistakes(folder, tmp_path, arguments, words):
    filled = [str(word).format(folder=folder, tmp=tmp_path) for word in arguments]
    _, err = sparsedepth("measure", *filled, code=2)
    assert words in err and err.count("\n") == 1


def test_pickled_weights_are_refused_unopened(folder, tmp_path):
    """The canary of a malicious checkpoint is never touched."""
    place = tmp_path / "model"
    place.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (place / file.name).write_bytes(file.read_bytes())
    canary = tmp_path / "canary"
    command = f"cposix\nsystem\n(S'touch {canary}'\ntR."
    (place / "pytorch_model.bin").write_bytes(command.encode())
    _, err = sparsedepth("measure", place, code=2)
    assert "safetensors" in err and err.count("\n") == 1 and not canary.exists()
