"""`measure --models FILE`: many models on the same bytes of one text, a record each, ranked by the depth they use."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
import yaml
from huggingface_hub import constants
from support.hf_families import FAMILIES, WORDS, save_tokenizer, tiny
from support.hub_cache import cached

import sparsedepth as sd
from sparsedepth.config.load import build
from sparsedepth.config.models_file import ModelsFile
from sparsedepth.probe.load import load_model
from sparsedepth.run.one_by_one import Ledger, one_by_one
from sparsedepth.store.run_record import verify

MEASURES = "loss,variance,usefulness"


def saved(folder, family, dtype=torch.float32, words=WORDS, **fields):
    tiny(family, vocab_size=len(words), **{"num_hidden_layers": 2, **fields}).to(dtype).save_pretrained(folder)
    save_tokenizer(folder, words)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Four models: one in bf16, one with a tokenizer of pairs of words, one broken."""
    folder = tmp_path_factory.mktemp("board")
    (folder / "text.txt").write_text("\n\n".join(f"{i % 30} times {i % 7} is {i * 3 % 29}" for i in range(9000)))
    saved(folder / "gpt2", "gpt2")
    saved(folder / "llama", "llama", torch.bfloat16)
    saved(folder / "olmoe", "olmoe", num_hidden_layers=3)
    saved(folder / "broken", "qwen3")
    (folder / "broken" / "model.safetensors").write_bytes(b"x")
    return folder


def file(place, *names, **fields):
    models = [{"name": str(place / name), "licence": "mit"} for name in names]
    return {"text": str(place / "text.txt"), "bytes": 2000, "seq_len": 16, "models": models, **fields}


@pytest.fixture(scope="module")
def board(place):
    path = place / "models.yaml"
    path.write_text(yaml.safe_dump(file(place, "gpt2", "llama", "broken", "olmoe", "missing")))
    out = place / "out"
    rows = sd.measure(models=path, out=out, measures=MEASURES, device="cpu").records()
    return path, out, rows


def test_a_failing_model_costs_its_row(board):
    path, out, rows = board
    assert [row["family"] for row in rows] == ["gpt2", "llama", None, "olmoe", None]
    assert "is not a valid safetensors file" in rows[2]["note"] and "is neither a folder" in rows[4]["note"]
    assert {row["licence"] for row in rows} == {"mit"}
    made = {each: each.stat().st_mtime_ns for each in out.glob("models/*/complete")}
    assert len(made) == 3
    (out / "measured" / "models.json").unlink()
    again = sd.measure(models=path, out=out, measures=MEASURES, device="cpu").records()
    assert [row["val_loss"] for row in again] == [row["val_loss"] for row in rows]
    assert made == {each: each.stat().st_mtime_ns for each in out.glob("models/*/complete")}
    for each in made:
        verify(each.parent)
    with pytest.raises(ValueError, match="has 'models' with another seq_len=16, now 8; give another -o"):
        path.write_text(path.read_text().replace("seq_len: 16", "seq_len: 8"))
        sd.measure(models=path, out=out, measures=MEASURES, device="cpu")


def test_a_text_with_fewer_bytes_than_asked_for_is_told_with_what_helps(place, tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump(file(place, "gpt2", bytes=10**6)))
    (row,) = sd.measure(models=path, out=tmp_path / "out", measures=MEASURES, device="cpu").records()
    assert row["note"].startswith("bytes=1000000 are ") and row["note"].endswith("; lower bytes, or name a longer text")


def test_a_second_call_that_has_waited_measures_what_the_first_has_left(tmp_path):
    told = []

    def tell(name, known, left):
        told.append(name)

    def work(name):
        return {"weights": name, "bytes": 1, "equal_to": None, "run_id": None}

    first, second, third = (Ledger(tmp_path, "models", {}) for _ in range(3))
    one_by_one({"a": "1", "b": "1"}, first, work, tell)
    one_by_one({"a": "1", "b": "1", "c": "1"}, second, work, tell)
    one_by_one({"d": "1"}, third, work, tell)
    assert told == ["a", "b", "c", "d"] == [*Ledger(tmp_path, "models", {}).models]


@pytest.mark.parametrize("given", [{"revisions": "step1"}, {"keep": 0}, {"name": "mine"}])
def test_what_is_of_one_model_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match=f"--{next(iter(given))} is for one MODEL; leave it out with --models"):
        sd.measure(models=tmp_path / "models.yaml", out=tmp_path / "out", **given)


def test_the_same_bytes_are_scored_and_enough_tokens_fit_the_maps(board, place):
    _, out, _ = board
    with sd.open_store(out) as store:
        row = store.sql(
            "select measure_tokens, val_tokens, fit_tokens, val_loss, residual_variance_last, usefulness from runs "
            "where family = 'gpt2'"
        ).records()[0]
    n_bytes = row["measure_tokens"] * len(place.joinpath("text.txt").read_bytes()) / (9000 * 5)
    assert n_bytes == pytest.approx(2000, rel=0.01) and row["measure_tokens"] == row["val_tokens"]
    assert row["fit_tokens"] == max(16 * 32, row["measure_tokens"])
    amounts = [f"{name}={row[name]}" for name in ("measure_tokens", "val_tokens", "fit_tokens")]
    text = str(place / "text.txt")
    alone = sd.measure(place / "gpt2", data=text, seq_len=16, measures=MEASURES, set=amounts, device="cpu")
    same = ("val_loss", "residual_variance_last", "usefulness")
    assert {name: alone.measurements.summary[name] for name in same} == {name: row[name] for name in same}


def test_weights_below_fp32_are_ranked_apart(board, command, tmp_path):
    _, out, _ = board
    rows = sd.ask(out, "models").frame()
    assert [*rows["weights_dtype"]] == ["float32", "float32", "bfloat16"] and [*rows["rank"]] == [1, 2, 1]
    assert (rows["depth_used"] == rows["needed_layers"] / rows["n_layers"]).all()
    command("query", out, "--ask", "models", "-o", tmp_path / "board.csv")
    command("query", out, "--ask", "models", "-o", tmp_path / "board.json")
    assert len(json.loads((tmp_path / "board.json").read_text())) == 3
    points = sd.plot(out, figure="models", out=tmp_path / "models.png").drawings["models"].data
    assert (
        len(points) == 3
        and points["needed_equal_rise"].between(points["needed_equal_rise_lo"], points["needed_equal_rise_hi"]).all()
    )
    by_layer = sd.plot(out, figure="by_layer").drawings["by_layer"].data
    assert {*by_layer["setting"]} == {"gpt2", "llama", "olmoe"}
    sd.report(out, out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "depth_used" in page and str(out.parent / "olmoe") in page


def test_a_folder_named_by_a_dot_is_read_and_equal_models_share_a_rank(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    other = str(saved(tmp_path / "other", "gpt2", num_hidden_layers=3))
    given = file(place, "gpt2") | {"models": [{"name": "./gpt2"}, {"name": other}]}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(given))
    sd.measure(models=tmp_path / "models.yaml", out=tmp_path / "out", measures=MEASURES, device="cpu")
    rows = sd.ask(tmp_path / "out", "models").records()
    assert [(row["model"], row["needed_equal_rise"], row["rank"]) for row in rows] == [("./gpt2", 0, 1), (other, 0, 1)]


def test_a_layer_is_moved_where_it_runs_if_the_weights_exceed_the_memory(place):
    whole, apart = load_model(place / "llama"), load_model(place / "llama", memory=1.0)
    tokens = torch.arange(12)[None]
    for layer in (1, 2):
        x = whole.probed.embed(tokens)
        torch.testing.assert_close(whole.probed.block(layer, x), apart.probed.block(layer, x), rtol=0, atol=0)
    entry = {"name": str(place / "llama"), "memory": 1e-9}
    found = build(ModelsFile, {"models": [entry]}, "file").models[0]
    assert found.memory == 1e-9 and found.source == str(place / "llama")


def test_models_of_the_hubs_cache_by_name_and_revision(place, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(tmp_path / "hub", "some/model", {"main": place / "gpt2", "old": place / "gpt2", "new": place / "olmoe"})
    shutil.copy(place / "text.txt", tmp_path)
    saved(tmp_path / "windows", "mistral_window", num_hidden_layers=4)
    shutil.copytree(tmp_path / "windows", tmp_path / "qwen")  # the same weights, of another type
    config = json.loads((tmp_path / "windows" / "config.json").read_text())
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    models = [{"name": "some/model"}, *({"name": "some/model", "revision": name} for name in ("old", "new"))]
    models += [{"name": str(tmp_path / name)} for name in ("windows", "qwen")]
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({**file(tmp_path), "models": models}))
    rows = sd.measure(models=tmp_path / "models.yaml", out=tmp_path / "out", measures="loss", device="cpu").records()
    assert [row["name"] for row in rows][:3] == ["some/model", "some/model@old", "some/model@new"]
    assert [row["note"] for row in rows[3:]] == [None, None] and rows[3]["val_loss"] != rows[4]["val_loss"]
    assert rows[1]["note"] == "has the weights of some/model, and is measured there" and rows[2]["val_loss"]


@pytest.mark.chaos
def test_killed_twenty_times_a_board_of_thirty_types_loses_nothing_and_measures_nothing_twice(place, tmp_path):
    """From a hub's cache, by name and offline, beside a model that is not there; a kill falls before, at and after a
    measurement."""
    types = [*{prefix: name for name, (prefix, _) in FAMILIES.items()}.values()][:30]
    for name in types:
        tiny(name, vocab_size=len(WORDS)).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name, WORDS)
        cached(tmp_path / "hub", f"tiny/{name}", {"main": tmp_path / name})
    models = [{"name": f"tiny/{name}"} for name in (*types, "missing")]
    path, out, rng = tmp_path / "models.yaml", tmp_path / "out", random.Random(0)
    path.write_text(yaml.safe_dump({**file(place), "models": models}))
    call = "sd.measure(models=sys.argv[1], out=sys.argv[2], measures=sys.argv[3], device='cpu')"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    def begun(folder):
        command = [sys.executable, "-c", f"import sys, sparsedepth as sd; {call}", str(path), str(folder), MEASURES]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    def points():
        return {each: each.stat().st_mtime_ns for each in out.glob("models/*/complete")}

    seen, told = set(), Counter()
    for kill in range(20):
        process = begun(out)
        lines = [process.stderr.readline()] if kill % 4 else []  # one more is measured, or it has just begun
        time.sleep(rng.uniform(0, 1.5 if lines else 8.0))
        process.send_signal(signal.SIGKILL)
        lines += process.communicate()[1].splitlines()
        told.update(line.partition(":")[0] for line in lines if line.startswith("tiny/"))
        assert seen <= points().items()
        seen = {*points().items()}
    for folder in (out, tmp_path / "undisturbed"):
        assert begun(folder).wait() == 0
    assert seen <= points().items() and len(points()) == 30
    assert {name: n for name, n in told.items() if n > 1 and name != "tiny/missing"} == {}
    rows, undisturbed = (sd.ask(folder, "models").frame() for folder in (out, tmp_path / "undisturbed"))
    assert rows.equals(undisturbed)
    print(f"\n20 kills over {len(models)} models, {len(seen)} measured between them: as if undisturbed")


def test_what_is_no_file_of_models_is_one_line(place, tmp_path, command):
    command("init", "models", tmp_path / "models.yaml")
    ours = build(ModelsFile, yaml.safe_load((tmp_path / "models.yaml").read_text()), "ours")
    assert len(ours.models) == 30 and all(entry.licence for entry in ours.models)
    for content, told in (
        ({"models": []}, "models"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "a is named twice"),
        ({"models": [{"nam": "a"}]}, "did you mean 'name'"),
    ):
        (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(content))
        _, err = command("measure", "--models", tmp_path / "wrong.yaml", "-o", tmp_path / "out", code=2)
        assert told in err and err.count("\n") == 1
    for words, told in (
        (("--models", tmp_path / "wrong.yaml"), "several models need -o DIR"),
        ((), "measure takes MODEL, or --models FILE"),
        ((place / "gpt2", "--models", tmp_path / "wrong.yaml"), "measure takes MODEL, or --models FILE"),
    ):
        _, err = command("measure", *words, code=2)
        assert told in err and err.count("\n") == 1
