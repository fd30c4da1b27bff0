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


def test_a_visit_is_a_call_of_350_seconds_that_begins_with_what_no_card_has_seen(visit):
    assert [(name, one.seconds) for name, one in visit.VISITS.items()] == [("a", 350), ("b", 350)]
    for one in visit.VISITS.values():
        assert sum(step.seconds for step in one.steps) <= one.seconds
        assert len({step.name for step in one.steps}) == len(one.steps)
    assert "test_gpu_unseen.py" in visit.A[0].command and "--workers 2" in visit.B[1].command


def step(visit, name, command, seconds=30, **fields):
    texts = {"only": "its speed", "claim": f"{name} works"}
    return visit.Step(name=name, seconds=seconds, command=command, dry=command, grace=1, **{**texts, **fields})


def test_a_step_that_fails_or_hangs_stops_nothing(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(visit, "LEAST_SECONDS", 3)
    code = {
        "works": "-c \"print('fine')\"",
        "fails": '-c "raise SystemExit(3)"',
        "hangs": "-c \"import signal, time; signal.signal(15, signal.SIG_IGN); print('begun'); time.sleep(60)\"",
        "last": "-c \"print('end')\"",
    }
    steps = [step(visit, name, command, seconds=3 if name == "hangs" else 30) for name, command in code.items()]
    rows = visit.run_visit("a", visit.Visit(300, steps), tmp_path, dry=False)
    assert [row["end"] for row in rows] == ["ok", "exit 3", "ended after 3 s", "ok"]
    assert [json.loads(line) for line in (tmp_path / "a.steps.jsonl").read_text().splitlines()] == rows
    assert (tmp_path / "a.log").read_text().split() == ["fine", "begun", "end"]
    first, *claims = (tmp_path / "a.claims.txt").read_text().splitlines()
    assert claims == ["works works", "last works"] and first == f"at {visit.commit()}"
    assert {row["commit"] for row in rows} == {visit.commit()}


def test_steps_without_time_are_left_out(visit, tmp_path, monkeypatch):
    monkeypatch.setattr(visit, "LEAST_SECONDS", 2)
    hangs, late = step(visit, "b", '-c "import time; time.sleep(60)"', seconds=4), step(visit, "a", "-c pass")
    rows = visit.run_visit("b", visit.Visit(5, [hangs, late]), tmp_path, dry=False)
    assert [row["end"] for row in rows] == ["ended after 4 s", "left out, no time"]


def test_a_rehearsal_says_what_it_saw_and_what_only_a_card_shows(visit, tmp_path, monkeypatch):
    printed = "-c \"print('SKIPPED [3] test_x.py: only on a card: its memory'); print('5 passed, 3 skipped')\""
    steps = [step(visit, "tests", printed, output="a.out.txt"), step(visit, "rates", "-c pass", only="milliseconds")]
    monkeypatch.setitem(visit.VISITS, "a", visit.Visit(300, steps))
    rows = visit.run_visit("a", visit.VISITS["a"], tmp_path, dry=True)
    assert [*visit.rehearsal_table({"a": rows}, tmp_path)][2:] == [
        "| a, tests | 5 tests | its speed; 3 x its memory |",
        "| a, rates | ok | milliseconds |",
    ]
    assert "in a rehearsal on a CPU: nothing" in (tmp_path / "a.claims.txt").read_text()


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
    with tarfile.open(tmp_path / "b.study.tgz") as archive:
        assert "./runs/a/complete" in archive.getnames()


@pytest.mark.slow
def test_all_of_it_runs_dry(tmp_path):
    command = [sys.executable, str(SCRIPT), "a", "b", "--dry", "--out", str(tmp_path)]
    said = subprocess.run(command, check=True, timeout=3600, capture_output=True, text=True).stdout
    rows = [json.loads(line) for name in "ab" for line in (tmp_path / f"{name}.steps.jsonl").open()]
    assert {row["end"] for row in rows} == {"ok"}
    assert said.count("| a, ") + said.count("| b, ") == len(rows) and "only on a card" in said
    trained = [json.loads(line) for name in "ab" for line in (tmp_path / f"{name}.train.jsonl").open()]
    assert len(trained) == 4 and all(len(row["losses"]) == 8 for row in trained)
    assert len(json.loads((tmp_path / "a.facts.json").read_text())) == 7
    outputs = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert {"a.sweep.tgz", "a.many.jsonl", "b.study.tgz", "b.table.txt"} <= outputs
