"""Tuning, pruning and adaptive searches under hard kills: what is made is what an undisturbed sweep makes.

The counts that a test asserts are printed: `pytest -s`.
"""

import random
from collections import Counter
from pathlib import Path

import pytest
from support.interrupted_sweep import BASE, Pace, at_the_end, kill_at_random, kill_everything, record_of
from support.sweep_processes import all_ended, markers
from support.tiny_sweep import definition, sparsedepth, start

from sparsedepth.run.scratch import Scratch
from sparsedepth.store.run_record import verify

pytestmark = pytest.mark.chaos

LR = {"lr": {"low": 1e-3, "high": 1e-1, "log": True}}
SHAPE = {**BASE, "n_layers": 2, "log_every": 2}


def command(folder: Path, results: Path, workers: int, **fields) -> list[object]:
    """A sweep of few small runs; a failing run is tried until it succeeds."""
    path = definition(folder, base=SHAPE, **{"space": {}, "seeds": [0], **fields})
    return ["sweep", path, "--out", results, "--workers", workers, "--max-attempts", 1000]


def killed_to_the_end(
    arguments: list[object], results: Path, everything: int, kills: int, seed: int, pace: Pace, runs: int
) -> Counter:
    """Kill the whole sweep `everything` times and give the command again, the last time under `kills` of its parts;
    with each kill more of the `runs` may come to their end."""
    rng = random.Random(seed)
    share = runs / (everything + kills)
    for number in range(everything):
        kill_everything(start(*arguments), results, rng)
        pace.allow(share * (number + 1))
    before = markers(results)
    driver = start(*arguments)
    killed = kill_at_random(results, kills, lambda: driver.poll() is not None, rng, pace, runs, int(share * everything))
    out, err = at_the_end(driver, results)
    assert driver.returncode == 0, out + err
    assert killed.total() == kills, "the sweep ended before it had been disturbed enough"
    assert before.items() <= markers(results).items(), "a complete run was lost or repeated"
    all_ended(results)
    return Counter(driver=everything) + killed


def test_tuning_chooses_the_same_under_kills(tmp_path, monkeypatch):
    """Which runs there are depends on what others came to: one that was lost or changed would lead elsewhere."""
    tuned = {"tune": {"lr": [1e-3, 4e-3, 1.6e-2]}, "tuning_seeds": [101], "seeds": [0, 1]}
    fields = {**tuned, "space": {"n_layers": [2, 3]}}
    sparsedepth(*command(tmp_path, tmp_path / "undisturbed", 2, **fields))
    expected = record_of(tmp_path / "undisturbed")
    results = tmp_path / "results"
    pace, arguments = Pace(tmp_path, monkeypatch), command(tmp_path, results, 2, **fields)
    killed = killed_to_the_end(arguments, results, 3, 5, 1, pace, len(expected))
    assert record_of(results) == expected and len(expected) >= 10
    print(f"\ntune: {len(expected)} runs, killed {dict(killed)}: the same runs, to the last byte")


def test_pruning_under_kills_loses_nothing_and_changes_no_result(tmp_path, monkeypatch):
    """Whether a run is pruned depends on what has finished by then; that it ends, and its record, do not."""
    drawn = {"sampler": "random", "n_trials": 12, "space": LR}
    sparsedepth(*command(tmp_path, tmp_path / "unpruned", 2, **drawn))
    expected = record_of(tmp_path / "unpruned")
    results = tmp_path / "results"
    rule = {"by": "train_loss", "at": [0.3, 0.6], "keep": 0.4, "min_runs": 3}
    pace, arguments = Pace(tmp_path, monkeypatch), command(tmp_path, results, 2, **drawn, prune=rule)
    killed = killed_to_the_end(arguments, results, 3, 5, 2, pace, len(expected))
    made = record_of(results)
    pruned = {path.parent.name for path in results.glob("work/*/pruned.json")}
    assert made.items() <= expected.items() and set(made) | pruned == set(expected) and not set(made) & pruned
    assert pruned and all(Scratch(results, run_id).recorded().pruned for run_id in pruned)
    print(f"\nprune: {len(made)} runs complete, {len(pruned)} pruned of {len(expected)}, killed {dict(killed)}")


@pytest.mark.parametrize(("sampler", "workers"), [("tpe", 1), ("tpe", 2), ("nsga2", 2)])
def test_an_adaptive_search_makes_as_many_distinct_runs_as_asked(tmp_path, monkeypatch, sampler, workers):
    """With one worker they are the undisturbed search's."""
    objectives = {"objectives": ["val_loss", "train_flops"]} if sampler == "nsga2" else {}
    fields = {"sampler": sampler, "n_trials": 10, "space": LR, **objectives}
    results = tmp_path / "results"
    pace, arguments = Pace(tmp_path, monkeypatch), command(tmp_path, results, workers, **fields)
    killed = killed_to_the_end(arguments, results, 3, 4, workers, pace, 10)
    made = record_of(results)
    assert len(made) == 10
    for run_id in made:
        verify(results / "runs" / run_id)
    if workers == 1:
        sparsedepth(*command(tmp_path, tmp_path / "undisturbed", 1, **fields))
        assert made == record_of(tmp_path / "undisturbed")
    print(f"\n{sampler}, {workers} workers: {len(made)} distinct runs of 10, killed {dict(killed)}")
