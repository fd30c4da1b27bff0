"""`sparsedepth measure` on our own runs and on Hugging Face folders."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.handmade_models import found_by, scored_text
from support.hf_families import tiny
from support.tiny_sweep import BASE, corpus, sparsedepth
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from sparsedepth.measure.interventions import add_causal_rows
from sparsedepth.probe.load import load_model
from sparsedepth.run.measure_existing_model import measuring_config
from sparsedepth.store.run_record import read_record, verify
from sparsedepth.store.subject import MeasuredModel


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


def test_a_hugging_face_folder(folder, tmp_path, command):
    text, place = corpus(tmp_path), tmp_path / "models" / "qwen"
    out, _ = sparsedepth("measure", folder, "--data", text, *SMALL, "-o", place)
    assert "qwen3, 4 layers" in out and re.search(r"causal_score +\d", out)
    assert [path.name for path in place.parent.iterdir()] == ["qwen"]  # nothing half-written beside it
    verify(place)
    read = read_record(place)
    assert isinstance(read.subject, MeasuredModel) and read.subject.family == "qwen3" and read.subject.seq_len == 32
    assert len(read.tables["layers"]) and read.run_id == read.manifest["run_id"]
    assert "note: the model is at chance" in out and "needed_layers_10mnat" in out  # its weights are random
    summary = read.summary
    assert summary["bigram_loss"] < summary["unigram_loss"] < summary["val_loss"] and summary["chance_loss"] is None
    answer, _ = command("query", place, "select model, n_layers, lr, seed from runs", "--format", "json")
    assert json.loads(answer) == [{"model": str(folder), "n_layers": 4, "lr": None, "seed": None}]
    _, err = command("measure", folder, "--data", text, *SMALL, "-o", place, code=2)
    assert "not an empty folder" in err


def test_the_default_length_is_the_models_and_a_tokenizer_is_missed_before_weights_are_read(folder, tmp_path, command):
    assert measuring_config(load_model(folder), {}).seq_len == 64
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("token*", "*.safetensors"))
    _, err = command("measure", bare, code=2)
    assert "has no tokenizer.json; copy the model's there, or measure on --tokens" in err


def test_given_tokens_are_what_is_measured(folder, tmp_path, command):
    ids = np.random.default_rng(0).integers(0, 40, (8, 33))
    np.save(tmp_path / "all.npy", ids)
    np.save(tmp_path / "first.npy", ids[:4].astype(np.uint16))
    np.save(tmp_path / "last.npy", ids[4:])
    measures = ("--measures", "usefulness,causal,permutation,variance,weights", "--format", "json")
    halves, warned = command("measure", folder, "--tokens", tmp_path / "all.npy", *measures)
    assert "tokens make it 6%: give more sequences of tokens\n" in warned
    fewer = (*measures, "--set", "fit_tokens=32")  # of the 128 that are there
    _, err = command("measure", folder, "--tokens", tmp_path / "all.npy", *fewer, code=2)
    assert "d_model=32 needs more than 33; raise fit_tokens\n" in err
    both = ("--tokens", tmp_path / "first.npy", "--fit-tokens", tmp_path / "last.npy")
    named, err = command("measure", folder, *both, *measures, "-o", tmp_path / "record")
    assert halves == named and "written" in err
    nothing, _ = command("measure", folder, *both, "--measures", "weights,experts")
    assert "\nnot defined for this model: experts; see `sparsedepth metrics`" in nothing
    fewer = ("--set", "measure_tokens=64", "--set", "fit_tokens=96")
    titled, _ = command("measure", folder, *both, "--measures", "weights", *fewer)
    assert "\n2 sequences of 32 tokens scored, the loss on 4; maps fitted and n-grams counted on 3 others\n" in titled
    found = {score["name"]: score for score in json.loads(named)}
    causal = found["causal_score"]
    assert causal["n_tokens"] == 4 * 32 and causal["interval"][0] <= causal["global"] <= causal["interval"][1]
    effects = [value for row in causal["matrix"] for value in row if value is not None]
    assert len(effects) == 6 and causal["matrix_first_layer"] == 1
    assert causal["global"] == pytest.approx(sum(effects) / 6)  # the mean over pairs s < l
    variance = found["residual_variance_last"]
    assert variance["first_layer"] == 0 and len(variance["per_layer"]) == 5
    assert variance["per_layer"][-1] == pytest.approx(variance["global"])
    assert found["weight_sparsity"]["n_tokens"] is None and found["weight_sparsity"]["metric"].endswith("@0.001")
    assert all(score["definition"] and {"source", "unit"} < set(score) for score in found.values())
    model = json.loads((tmp_path / "record" / "model.json").read_text())
    probed = load_model(folder).probed
    slow = found_by(add_causal_rows, probed, scored_text(torch.from_numpy(ids[:4]))).summary["causal_score"]
    assert causal["global"] == pytest.approx(slow, rel=1e-6) and model["fit_tokens"] == 128


def test_targets_say_which_positions_count(folder, tmp_path, command):
    ids = np.random.default_rng(0).integers(0, 40, (8, 33))
    np.save(tmp_path / "shifted.npy", ids)
    np.save(tmp_path / "ids.npy", ids[:, :-1])
    np.save(tmp_path / "all.npy", ids[:, 1:])
    np.save(tmp_path / "some.npy", np.where(np.arange(32) % 4 == 3, ids[:, 1:], -100))
    measures = ("--measures", "loss,usefulness", "--format", "json")

    def measured(*files):
        out, _ = command("measure", folder, *files, *measures)
        return {score["name"]: score for score in json.loads(out)}

    beside = measured("--tokens", tmp_path / "ids.npy", "--targets", tmp_path / "all.npy")
    assert beside == measured("--tokens", tmp_path / "shifted.npy")
    some = measured("--tokens", tmp_path / "ids.npy", "--targets", tmp_path / "some.npy")
    assert (beside["val_loss"]["n_tokens"], some["val_loss"]["n_tokens"]) == (128, 32)
    assert some["val_loss"]["global"] != beside["val_loss"]["global"]
    for wrong, says in (
        (("--targets", tmp_path / "all.npy"), "--targets needs --tokens"),
        (("--tokens", tmp_path / "shifted.npy", "--targets", tmp_path / "all.npy"), "holds [8, 32] and"),
    ):
        _, err = command("measure", folder, *wrong, code=2)
        assert says in err and err.count("\n") == 1


def test_a_run_measures_as_its_record_says_and_stands_beside_it(tmp_path, command):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**BASE, "corpus": str(corpus(tmp_path)), "n_layers": 2}))
    results = tmp_path / "results"
    sparsedepth("train", path, "--out", results, "--threads", 1)
    (trained,) = (results / "runs").iterdir()
    command("measure", trained, "-o", results / "models" / "again")
    record = json.loads((trained / "summary.json").read_text())
    again = json.loads((results / "models" / "again" / "summary.json").read_text())
    found = {name: value for name, value in again.items() if value is not None}
    assert "usefulness" in found and "train_loss" not in found
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    assert numbers == pytest.approx({name: record[name] for name in numbers}, rel=1e-5)
    answer, _ = command("query", results, "select model is null, n_layers, d_model from runs", "--format", "json")
    assert sorted(tuple(row.values()) for row in json.loads(answer)) == [(False, 2, 16), (True, 2, 16)]
    _, err = command("measure", trained, "-o", results / "runs" / "again", code=2)
    assert "results/models" in err and err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, command):
    (tmp_path / "file").write_text("")
    _, err = command("measure", "no-such-model", "-o", tmp_path / "file" / "m", code=2)
    assert "cannot be written" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{folder}", "--seq-len", 65), "64 positions"),
        (("{folder}", "--set", "measure_token=3"), "did you mean 'measure_tokens'"),
        (("{tmp}",), "has neither config.yaml (a run) nor config.json"),
        (("{folder}/config.json",), "name its folder, /"),
        (("{tokens}",), "measure a model of your own code by sparsedepth.watch"),
        (("{folder}", "--device", "cuda:9"), "cuda:9"),
        (("{folder}", "--measures", "causal,usefullness"), "'usefullness' is unknown; did you mean 'usefulness'?"),
        (("{folder}", "--measures", "all", "--set", "measures=[causal]"), "set the same field"),
        (("{folder}", "--seq-len", 8, "--set", "seq_len=16"), "--seq-len and --set seq_len=... set the same field"),
        (("{folder}", "--fit-tokens", "x.npy"), "needs --tokens"),
        (("{folder}", "--data", "stdlib", "--tokens", "x.npy"), "two sources"),
        (("{folder}", "--tokens", "{tokens}"), "are from 0 to 40, and"),
        (
            ("{folder}", "--tokens", "{tokens}", "--seq-len", 8),
            "seq_len=8: the given tokens have 16 per sequence; leave seq_len out",
        ),
    ],
)
def test_a_mistake_in_what_measure_is_given_is_one_line(folder, tmp_path, arguments, words, command):
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.arange(41 * 17).reshape(-1, 17) % 41)
    filled = [str(word).format(folder=folder, tmp=tmp_path, tokens=tokens) for word in arguments]
    _, err = command("measure", *filled, code=2)
    assert words in err and err.count("\n") == 1


def test_a_model_that_computes_nan_is_one_line_that_says_where(folder, tmp_path, command):
    """Each of its weights is a finite number."""
    place = Path(shutil.copytree(folder, tmp_path / "model"))
    weights = load_file(place / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"].fill_(3e38)
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    np.save(tmp_path / "all.npy", np.random.default_rng(0).integers(0, 40, (4, 17)))
    _, err = command("measure", place, "--tokens", tmp_path / "all.npy", "--measures", "variance", code=2)
    assert "computes NaN or infinity after layer 3 of 4" in err and err.count("\n") == 1
