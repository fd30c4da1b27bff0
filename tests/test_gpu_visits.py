"""`make gpu` without a GPU: visits keep their time, a step that fails or hangs stops nothing, all of it runs dry."""

import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
SCRIPT = FOLDER / "visit.py"


@pytest.fixture(scope="module")
def visit():
    spec = importlib.util.spec_from_file_location("visit", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["visit"] = module  # where dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_visits_have_their_time_and_their_most_valuable_steps_fit(visit):
    first, second = visit.VISITS["first"], visit.VISITS["second"]
    assert (first.seconds, second.seconds) == (530, 240)
    assert sum(step.seconds for step in first.steps[:5]) <= first.seconds
    assert sum(step.seconds for step in second.steps[1:]) <= second.reserved
    for steps in (first.steps, second.steps):
        assert len({step.name for step in steps}) == len(steps)


def test_a_step_that_fails_or_hangs_stops_nothing(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(visit, "LEAST_SECONDS", 3)
    code = {
        "works": "-c \"print('fine')\"",
        "fails": '-c "raise SystemExit(3)"',
        "hangs": "-c \"import signal, time; signal.signal(15, signal.SIG_IGN); print('begun'); time.sleep(60)\"",
        "last": "-c \"print('end')\"",
    }
    steps = [
        visit.Step(name=name, seconds=1 if name == "hangs" else 30, command="", dry=command, grace=1)
        for name, command in code.items()
    ]
    rows = visit.run_visit("first", visit.Visit(300, steps), tmp_path, dry=True)
    assert [row["end"] for row in rows] == ["ok", "exit 3", "ended after 3 s", "ok"]
    assert [json.loads(line) for line in (tmp_path / "first.steps.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "first.log").read_text().split() == ["fine", "begun", "end"]


def test_steps_without_time_are_left_out_and_the_first_one_leaves_room_for_the_others(visit, tmp_path, monkeypatch):
    step = visit.Step(name="a", seconds=999, command="-c pass", dry="-c pass", grace=1)
    rows = visit.run_visit("first", visit.Visit(5, [step]), tmp_path, dry=False)
    assert rows == [{"step": "a", "end": "left out, no time", "seconds": None, "at": 0}]
    monkeypatch.setattr(visit, "LEAST_SECONDS", 2)
    hangs = visit.Step(name="b", seconds=1, command='-c "import time; time.sleep(60)"', dry="", grace=1)
    rows = visit.run_visit("second", visit.Visit(9, [hangs, step], reserved=25), tmp_path, dry=False, seconds=28)
    assert [row["end"] for row in rows] == ["ended after 3 s", "ok"]


def test_a_study_travels_without_weights_text_and_unfinished_runs(visit, tmp_path):
    for name in ("runs/a/complete", "runs/a/model.safetensors", "data/corpus.bin", "work/b/lock", "study.journal"):
        path = tmp_path / "study" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    visit.pack_study(tmp_path)
    (tmp_path / "study").rename(tmp_path / "before")
    visit.unpack_study(tmp_path)
    kept = {str(path.relative_to(tmp_path / "study")) for path in (tmp_path / "study").rglob("*") if path.is_file()}
    assert kept == {"runs/a/complete", "study.journal"}
    with tarfile.open(tmp_path / "second.study.tgz") as archive:
        assert "./runs/a/complete" in archive.getnames()


@pytest.mark.slow
def test_all_of_it_runs_dry(tmp_path):
    command = [sys.executable, str(SCRIPT), "first", "second", "--dry", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=1800)
    rows = [json.loads(line) for name in ("first", "second") for line in (tmp_path / f"{name}.steps.jsonl").open()]
    assert {row["end"] for row in rows} == {"ok"}
    trained = [json.loads(line) for line in (tmp_path / "first.train.jsonl").open()]
    assert len(trained) == 10 and all(len(row["losses"]) == 8 for row in trained)
    assert len(json.loads((tmp_path / "first.facts.json").read_text())) == 7
    outputs = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {"first.sweep.tgz", "first.many.jsonl", "second.study.tgz", "second.table.txt"} <= outputs
