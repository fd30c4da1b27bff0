"""Hard kills at random moments: no complete run is lost, changed or repeated, and the record is the same.

The counts that a test asserts are printed: `pytest -s`.
"""

import json
import random
from collections import Counter

import optuna
import pytest
from support.interrupted_sweep import STEPS, Pace, Sweep, at_the_end, kill_at_random, kill_everything, record_of
from support.sweep_processes import all_ended, markers

from sparsedepth.sweep.storage import open_storage

chaos = pytest.mark.chaos


@pytest.mark.parametrize(
    ("runs", "workers", "kills"), [(4, 2, 2), pytest.param(40, 4, 50, marks=chaos)], ids=["short", "long"]
)
def test_kills_of_runs_and_of_the_forkserver(folder, undisturbed, tmp_path, monkeypatch, runs, workers, kills):
    expected = undisturbed(runs)
    results, pace = tmp_path / "results", Pace(tmp_path, monkeypatch)
    driver = Sweep(folder, runs).start(results, workers)
    killed = kill_at_random(results, kills, lambda: driver.poll() is not None, random.Random(kills), pace, runs)
    before = markers(results)
    out, err = at_the_end(driver, results)
    assert driver.returncode == 0, out + err
    assert before.items() <= markers(results).items()
    all_ended(results)
    assert killed.total() == kills, "the sweep ended before it had been disturbed enough"
    assert record_of(results) == expected
    print(f"\n{runs} runs, {workers} workers, killed: {dict(killed)}")
    for path in results.glob("runs/*/summary.json"):
        assert json.loads(path.read_text())["tokens_trained"] == 128 * STEPS
    storage = open_storage(None, results)
    (study,) = optuna.study.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).trials
    states = Counter(trial.state.name for trial in trials)
    assert not states["RUNNING"] and not states["WAITING"], states
    assert states["COMPLETE"] == runs == len(trials), "a task was finished twice, or queued twice"


@pytest.mark.parametrize(("runs", "kills"), [(2, 1), pytest.param(20, 20, marks=chaos)], ids=["short", "long"])
def test_kill_of_everything_and_the_same_command_again(folder, undisturbed, tmp_path, monkeypatch, runs, kills):
    expected = undisturbed(runs)
    sweep, results, pace = Sweep(folder, runs), tmp_path / "results", Pace(tmp_path, monkeypatch)
    rng = random.Random(kills)
    for number in range(kills):
        kill_everything(sweep.start(results, 2), results, rng)
        before = record_of(results)
        assert before.items() <= expected.items()
        pace.allow(runs * (number + 1) / (kills + 1))
    pace.open()
    sweep.run(results, 2)
    assert record_of(results) == expected
    print(f"\n{runs} runs; everything killed {kills} times while the sweep ran")
