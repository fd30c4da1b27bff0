"""`measure MODEL --revisions`: a training from its checkpoints, in folders or a cache of the hub."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from support.handmade_models import integers
from support.hf_families import WORDS, save_tokenizer
from support.hub_cache import cached, copied, training

import sparsedepth as sd
from sparsedepth.probe.load import load_model
from sparsedepth.probe.revisions import Revision, revisions
from sparsedepth.run import one_by_one
from sparsedepth.store.run_record import verify

MEASURES = "variance,causal,usefulness"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = training(tmp_path_factory.mktemp("series") / "run", [0, 2, 10, 30, 40], num_hidden_layers=2)
    copied(folder, "checkpoint-40", "checkpoint-5")
    (folder / "checkpoint-30" / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.fixture
def ids(tmp_path):
    np.save(tmp_path / "ids.npy", integers(34, 8, 17).numpy())
    return tmp_path / "ids.npy"


def series(run, ids, out, revisions="checkpoint-*", **options):
    return sd.measure(run, revisions=revisions, tokens=ids, measures=MEASURES, out=out, device="cpu", **options)


def test_each_checkpoint_is_a_point_and_the_others_are_told(run, ids, tmp_path, capsys):
    rows = series(run, ids, tmp_path / "out", tokens_per_step=64, set={"seed": 3}).records()
    assert [row["name"].rpartition("-")[2] for row in rows] == ["0", "2", "5", "10", "30", "40"]
    assert [row["step"] for row in rows] == [0, 2, 5, 10, 30, 40]
    assert [row["tokens_trained"] for row in rows] == [0, 128, None, 640, None, 2560]
    assert [row["causal_score"] is None for row in rows] == [False, False, True, False, True, False]
    assert rows[2]["note"] == "has the weights of checkpoint-40, and is measured there"
    assert "is not a valid safetensors file" in rows[4]["note"]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 6 and told[0].startswith("checkpoint-40: ") and "; 5 left, about " in told[0]
    alone = sd.measure(run / "checkpoint-10", tokens=ids, measures=MEASURES, device="cpu").measurements.summary
    with sd.open_store(tmp_path / "out") as store:
        stored = store.sql(
            "select steps, seed, causal_score, usefulness_loss_increase, family, weights_dtype, checkpoint, cluster, "
            "model from runs order by steps"
        ).rows
        steps = store.sql("select distinct step from layers order by 1").rows
    assert stored[2][:4] == pytest.approx((10, 3, alone["causal_score"], alone["usefulness_loss_increase"]))
    assert stored[2][4:] == ("llama", "float32", str(run / "checkpoint-10"), "run", None)
    assert steps == ((0,), (2,), (10,), (40,))
    for folder in (tmp_path / "out" / "runs").iterdir():
        verify(folder)


def test_the_same_call_measures_what_is_left_and_nothing_twice(run, ids, tmp_path, monkeypatch):
    out = tmp_path / "out"
    work, calls = one_by_one._own_process, []
    monkeypatch.setattr(one_by_one, "_own_process", lambda each: calls.append(1) or work(each))
    first = series(run, ids, out, "checkpoint-10,checkpoint-2")
    assert len(calls) == 2
    made = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/complete")}
    every = series(run, ids, out)
    assert len(calls) == 2 + 4 and every.records()[3]["causal_score"] == first.records()[1]["causal_score"]
    series(run, ids, out)
    assert len(calls) == 6 + 1  # the broken one is tried again
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())
    (out / "measured" / "run.json").unlink()  # the ledger is lost: the records are found
    assert [row["causal_score"] for row in series(run, ids, out).records()] == [
        row["causal_score"] for row in every.records()
    ]
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())
    for changes, told in (({"tokens_per_step": 8}, "tokens_per_step"), ({"set": {"seed": 1}}, "seed")):
        with pytest.raises(ValueError, match=f"has 'run' with another {told}=.*, now .*; give another -o"):
            series(run, ids, out, **changes)


@pytest.mark.chaos
def test_killed_twenty_times_a_series_of_forty_loses_nothing_and_measures_nothing_twice(ids, tmp_path):
    """Two checkpoints have the weights of others, one is broken; kills fall before, at and after a measurement."""
    steps, out, rng = [*range(0, 400, 10)], tmp_path / "out", random.Random(0)
    run = training(tmp_path / "run", steps, num_hidden_layers=2)
    for copy, of in ((5, 200), (15, 390)):
        copied(run, f"checkpoint-{of}", f"checkpoint-{copy}")
    (run / "checkpoint-300" / "model.safetensors").write_bytes(b"no weights")
    code = f"""
import sparsedepth as sd
given = dict(tokens={str(ids)!r}, measures={MEASURES!r}, device="cpu")
sd.measure({str(run)!r}, revisions="checkpoint-*", out={str(out)!r}, **given)
"""
    seen, told = set(), Counter()
    for kill in range(20):
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        lines = [process.stderr.readline()] if kill % 4 else []  # one more is measured, or it has just begun
        time.sleep(rng.uniform(0, 1.5 if lines else 8.0))
        process.send_signal(signal.SIGKILL)
        lines += process.communicate()[1].splitlines()
        told.update(line.partition(":")[0] for line in lines if line.startswith("checkpoint-"))
        points = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/complete")}
        assert seen <= points.items()
        seen = set(points.items())
    rows = series(run, ids, out).records()
    assert [row["step"] for row in rows] == sorted([*steps, 5, 15])
    assert [row["step"] for row in rows if row["causal_score"] is None] == [5, 15, 300]
    points = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/complete")}
    assert seen <= points.items() and len(points) == 39
    assert {name: n for name, n in told.items() if n > 1 and name != "checkpoint-300"} == {}
    undisturbed = series(run, ids, tmp_path / "other").records()
    assert [row["causal_score"] for row in rows] == [row["causal_score"] for row in undisturbed]
    print(f"\n20 kills over {len(rows)} checkpoints, {len(seen)} measured between them: as if undisturbed")


def test_a_killed_model_costs_its_row(run, ids, tmp_path, monkeypatch):
    from sparsedepth.watch import series as module

    def load(source, **options):
        if source.endswith("-2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return load_model(source, **options)

    monkeypatch.setattr(module, "load_model", load)
    rows = series(run, ids, tmp_path / "out", "checkpoint-0,checkpoint-2").records()
    assert rows[0]["note"] is None and "its process ended with -9, as where memory runs out" in rows[1]["note"]


def test_a_hubs_cache_is_read_offline_by_name(run, ids, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(tmp_path / "hub", "some/model", {f"step{n}": run / f"checkpoint-{n}" for n in (2, 10)})
    cached(tmp_path / "hub", "some/model", {"main": run / "checkpoint-40"})
    assert [each.name for each in revisions("some/model", ["*"])] == ["main", "step10", "step2"]
    rows = series("some/model", ids, tmp_path / "out", "*,step7").records()
    assert [row["name"] for row in rows] == ["step2", "step7", "step10", "main"]
    assert rows[3]["note"].startswith("its name tells no step, such as 'step1000'")
    assert "model 'some/model' at revision 'step7' is not a local folder and cannot be downloaded" in rows[1]["note"]
    assert rows[0]["causal_score"] and rows[2]["causal_score"]
    alone = sd.measure("some/model@step10", tokens=ids, measures=MEASURES, device="cpu")
    assert alone.measurements.summary["causal_score"] == rows[2]["causal_score"]
    with pytest.raises(ValueError, match=r"'stop\*': none of 'some/model' fits; it has main, step10, step2"):
        series("some/model", ids, tmp_path / "out", "stop*")
    with pytest.raises(ValueError, match=r"does not list the revisions of 'no/model' .*nor does its cache.*hf auth"):
        series("no/model", ids, tmp_path / "out", "stop*")


def test_downloads_are_deleted_after_use_and_those_of_the_user_stay(run, ids, tmp_path, monkeypatch):
    hub, far = tmp_path / "hub", tmp_path / "far"
    cached(hub, "some/model", {"step2": run / "checkpoint-2"})
    cached(far, "some/model", {"step10": run / "checkpoint-10", "step40": run / "checkpoint-40"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    sizes = []

    def download(name, *, revision, allow_patterns, cache_dir):
        ours = Path(cache_dir or hub)
        place = f"models--{name.replace('/', '--')}"
        if cache_dir:
            if not (ours / place / "snapshots").exists() or not [*(ours / place).glob("snapshots/*")]:
                shutil.rmtree(ours / place, ignore_errors=True)
                shutil.copytree(far / place, ours / place, symlinks=True)
            sizes.append(len([*ours.glob("*/snapshots/*")]))
        ref = ours / place / "refs" / revision
        return ours / place / "snapshots" / (ref.read_text() if ref.exists() else revision)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    rows = series("some/model", ids, tmp_path / "out", "step2,step10,step40", keep=0).records()
    assert [row["note"] for row in rows] == [None] * 3
    assert len([*hub.glob("*/snapshots/*")]) == 1 and not (tmp_path / "out" / "downloads").exists()


@pytest.mark.parametrize(
    ("name", "step"),
    [("step1000", 1000), ("stage1-step140000-tokens294B", 140000), ("checkpoint-50", 50), ("main", None),
     ("global_step7", 7), ("step_00012", 12), ("step10k", None), ("v2-iter-300", 300)],
)  # fmt: skip
def test_the_step_is_read_of_the_name(name, step):
    assert Revision(name=name, source="", key="").step == step


def test_what_is_no_series_is_a_row_or_one_line(run, ids, tmp_path, command, capsys):
    double = tmp_path / "double"
    for name in ("checkpoint-2", "step2"):
        shutil.copytree(run / "checkpoint-2", double / name)
    (double / "checkpoint-7").mkdir()
    rows = series(double, ids, tmp_path / "out", "*").records()
    notes = {row["name"]: row["note"] for row in rows}
    assert notes["step2"] == "step 2 is that of checkpoint-2, too; name one of them in --revisions"
    assert notes["checkpoint-7"].endswith("nor config.json (a Hugging Face model); copy the model again")
    capsys.readouterr()
    for words, told in (
        (("-o", tmp_path / "x", "--revisions", "nothing-*"), "fits; it has checkpoint-2"),
        (("--revisions", "*"), "several models need -o DIR"),
        (("--keep", 0), "--keep is for several checkpoints; add --revisions"),
        (("--measures", "loss"), "(a Hugging Face model); name its checkpoints by --revisions '*'"),
        (("-o", tmp_path / "x", "--revisions", "*", "--set", "measure_token=3"), "did you mean 'measure_tokens'"),
    ):
        _, err = command("measure", double, *words, code=2)
        assert told in err and err.count("\n") == 1
    _, err = command("measure", tmp_path / "gone", "--revisions", "step*", "-o", tmp_path / "none", code=2)
    assert "is neither a folder, with config.yaml (a run)" in err and "nor a hub's name" in err


def test_text_is_read_in_one_tokenizer(run, tmp_path):
    """A revision with another one is a row with that reason."""
    mixed = tmp_path / "mixed"
    for step in (2, 10):
        shutil.copytree(run / f"checkpoint-{step}", mixed / f"checkpoint-{step}")
    save_tokenizer(mixed / "checkpoint-2", {word: index for index, word in enumerate(reversed(WORDS))})
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{i % 30} times {i % 7} is {i * 3 % 29}" for i in range(9000)))
    sizes = ["val_tokens=512", "measure_tokens=128", "fit_tokens=512"]
    rows = sd.measure(
        mixed, revisions="*", data=str(text), measures=MEASURES, out=tmp_path / "out", seq_len=16, set=sizes
    ).records()
    assert "'mixed' in " in rows[0]["note"] and "is another training (tokens=" in rows[0]["note"]
    assert rows[1]["causal_score"]
    with sd.open_store(tmp_path / "out") as store:
        assert store.sql("select text, measure_tokens from runs").rows == ((str(text), 128),)


def test_two_trainings_side_by_side_at_equal_tokens(run, ids, tmp_path, command):
    for name, wanted in (("a", "checkpoint-0,checkpoint-2,checkpoint-10"), ("b", "checkpoint-2,checkpoint-40")):
        series(run, ids, tmp_path / "out", wanted, name=name, tokens_per_step=64)
    rows = sd.ask(tmp_path / "out", "trainings").records()
    assert [(row["tokens_trained"], row["training"]) for row in rows] == [(128, "a"), (128, "b")]
    assert "One run each" in command("query", tmp_path / "out", "--ask", "trainings")[0]
    history = sd.plot(tmp_path / "out", figure="history").drawings["history"].data
    assert {*history["setting"]} == {"baseline, a", "baseline, b"} and set(history["n_seeds"]) == {1}


@pytest.mark.slow
def test_a_program_that_has_computed_on_several_threads_does_not_wait_for_ever():
    """A fork lacks OpenMP's threads, and waits for them in its first computation on several."""
    computes = "(torch.ones(2**22).exp().sum(), torch.get_num_threads())[1]"
    script = f"""if True:
        import torch
        from sparsedepth.run import one_by_one
        one_by_one.PROBE_SECONDS = 3
        for _ in range(2):
            one_by_one._compute_on_one_thread()
            print(one_by_one._own_process(lambda: {{"threads": {computes}}})["threads"])
            torch.set_num_threads(2)
            {computes}
    """
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "2"})  # fmt: skip
    assert told.stdout.split() == ["2", "1"] and "on one thread, as this process has computed on several" in told.stderr
