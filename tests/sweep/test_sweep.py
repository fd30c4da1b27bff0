"""Sweeps with real processes: they end, they continue after any death, and they never repeat or lose a run."""

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import yaml
from support import forked_commands
from support.sweep_processes import all_ended, markers, phases, processes, until
from support.tiny_sweep import ENVIRONMENT, definition, sparsedepth, start, table

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.tasks import Plan
from sparsedepth.store.made_with import package_versions
from sparsedepth.store.run_record import read_run
from sparsedepth.sweep import driver
from sparsedepth.sweep.machine import Machine

ONE = ("--runtime", "threads=1")
"""More threads than one only hinder a model of this size."""
QUICK = {"measures": ["loss"], "val_tokens": 64}
"""Fields of a base whose runs are hardly measured."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The tiny sweep's results, made without disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sparsedepth("sweep", definition(folder), "--out", folder / "results", "--workers", 2)
    return folder / "results"


def test_every_run_is_recorded_whole(undisturbed):
    assert len(table(undisturbed)) == 4
    for name in table(undisturbed):
        run = read_run(undisturbed / "runs" / name)
        assert run.summary["outcome"] == "ok" and run.summary["tokens_trained"] == 128 * 30
        assert run.manifest["kernels"]["attention"] == "sdpa" and run.manifest["data_hash"]
        assert run.tables["curves"].num_rows and run.tables["layers"].num_rows
        steps = set(run.tables["layers"].column("step").to_pylist())
        assert steps == {0, 10, 20, 30}
    assert not list(undisturbed.glob("work/*/checkpoints")), "checkpoints of finished runs are dropped"


def test_the_same_command_again_repeats_nothing(undisturbed):
    before = markers(undisturbed)
    out, err = sparsedepth("sweep", definition(undisturbed.parent), "--out", undisturbed)
    assert markers(undisturbed) == before and "sparsedepth recipe" in out
    assert err.startswith("a bigram table of the training text reaches ")


LOADED = """
import sys
from multiprocessing.forkserver import _forkserver
from sparsedepth.cli.main import run
try:
    run(sys.argv[1:])
finally:
    heavy = {"torch", "scipy", "sqlalchemy"} & set(sys.modules)
    print(sorted(heavy), _forkserver._forkserver_pid, file=sys.stderr)
"""


def test_a_finished_sweep_loads_no_torch_and_starts_no_process(undisturbed):
    """Nor where the study was lost, whose trials are added."""
    (undisturbed / "study.journal").unlink()
    arguments = ("sweep", definition(undisturbed.parent), "--out", undisturbed, "--device", "cpu")
    again = [sys.executable, "-c", LOADED, *map(str, arguments)]
    done = subprocess.run(again, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[] None" and "sparsedepth recipe" in done.stdout
    assert (undisturbed / "study.journal").read_text().count('{"op_code":4,') == 4


def test_runs_on_two_texts_are_not_mixed(tmp_path):
    """A text that is another now is refused, also where its tokens were deleted and by `train`; restored it is
    tokenised anew."""
    path = definition(tmp_path, space={"n_layers": [2]}, seeds=[0], base=QUICK)
    results = tmp_path / "results"
    sparsedepth("sweep", path, "--out", results)
    document = tmp_path / "text" / "00.txt"
    before, again = document.read_text(), ("sweep", path, "--out", results, "--set", "seeds=2")
    document.write_text(before.replace("times", "and"))
    assert "has changed since" in sparsedepth(*again, code=2)[1]
    shutil.rmtree(results / "data")
    (run_id,) = table(results)
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({**read_yaml(path)["base"], "n_layers": 2, "seed": 2}))
    train = ("train", run, "--out", results)
    for command in (train, again):
        (line,) = [line for line in sparsedepth(*command, code=2)[1].splitlines() if "has changed" in line]
        assert f"has changed since run {run_id} of {results}" in line
    assert len(markers(results)) == 1
    assert not [*results.glob("data/*/manifest.json")], "tokens of the changed text would refuse the restored one"
    document.write_text(before)
    sparsedepth(*again)
    sparsedepth(*train)
    assert len(markers(results)) == 3


def test_other_packages_than_the_runs_have_are_said_and_refused_on_demand(undisturbed, tmp_path, monkeypatch):
    """The driver in this process: what it finds installed is made up."""
    runs = tmp_path / "results" / "runs"
    shutil.copytree(undisturbed / "runs", runs)
    monkeypatch.setattr(driver, "package_versions", lambda: {**package_versions(), "torch": "1.0"})

    def run(**fields):
        path = definition(undisturbed.parent, **fields)
        sweep = build(SweepDefinition, read_yaml(path), str(path))
        machine = Machine(workers=1, runtime=RuntimeConfig(device="cpu"), gpus=[])
        return driver.Driver(Plan(sweep), runs.parent, machine)

    differ = r"packages differ .*torch 1.0 \(here\), 2.* \(4 runs\); install the runs' versions"
    with pytest.raises(ValueError, match=differ):
        run(same_packages=True).run()
    with pytest.warns(UserWarning, match=r"torch 1.0 \(here\).*; same_packages: true in the definition refuses that"):
        run()._compare_packages()
    monkeypatch.undo()
    with warnings.catch_warnings(action="error"):
        run(same_packages=True)._compare_packages()


def test_ctrl_c_stops_at_a_checkpoint_and_the_same_command_continues(tmp_path):
    """One longer run, so that the signal finds it training."""
    results = tmp_path / "results"
    base = {**QUICK, "train_tokens": 128 * 500, "observe_every": 250}
    path = definition(tmp_path, base=base, space={"n_layers": [2]}, seeds=[0])
    arguments = ("sweep", path, "--out", results, "--workers", 1, *ONE)
    driver = forked_commands.start([*map(str, arguments)], ENVIRONMENT)
    until(lambda: "training" in phases(results))
    os.kill(driver.pid, signal.SIGINT)
    _, err = driver.communicate(timeout=300)
    assert driver.returncode == 130 and "run the same command again to resume" in err
    assert list(results.glob("work/*/checkpoints/step-*.json")), "no checkpoint was written"
    assert not list(results.glob("work/*/failures.json")), "a stop is no failure"
    out, _ = sparsedepth("status", results)
    assert "1 interrupted" in out
    sparsedepth("sweep", path, "--out", results, "--workers", 1, *ONE)
    (summary,) = table(results).values()
    assert summary["steps"] == 500


@pytest.mark.slow  # trains for a while, to be killed twice
def test_a_run_that_keeps_dying_is_kept_with_its_reason(tmp_path):
    results = tmp_path / "results"
    path = definition(tmp_path, base={"train_tokens": 128 * 1000}, space={"n_layers": [2]}, seeds=[0])
    driver = start("sweep", path, "--out", results, "--workers", 1, *ONE, "--max-attempts", 2)
    for attempt in range(2):
        until(lambda: processes(results, "run"))
        os.kill(processes(results, "run")[0], signal.SIGKILL)
        until(lambda n=attempt: len(list(results.glob("work/*/failures.json"))) > 0 or n == 0)
        time.sleep(0.5)
    _, err = driver.communicate(timeout=300)
    assert driver.returncode == 1 and "killed by signal 9" in err
    out, _ = sparsedepth("status", results)
    assert "1 failed" in out and "killed by signal 9" in out
    sparsedepth("sweep", path, "--out", results, code=1)  # not tried again unasked
    sparsedepth("sweep", path, "--out", results, "--retry-failed")
    assert len(table(results)) == 1


@pytest.mark.slow  # a command and its forkserver that start from nothing
def test_a_stop_before_a_run_can_handle_signals_is_no_failure(tmp_path):
    """The forkserver needs seconds to import; a signal that finds it there kills it outright."""
    results = tmp_path / "results"
    path = definition(tmp_path, space={"n_layers": [2]}, seeds=[0])
    driver = start("sweep", path, "--out", results, "--workers", 1, *ONE, "--max-attempts", 1)
    until(lambda: processes(results, "forkserver"))
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    until(lambda: not processes(results))  # the forkserver sees the death once its imports are through
    assert not list(results.glob("work/*/failures.json"))
    sparsedepth("sweep", path, "--out", results, "--workers", 1, *ONE, "--max-attempts", 1)
    assert len(table(results)) == 1


@pytest.mark.slow
def test_a_run_over_two_processes_gives_the_same_losses_and_survives_kills(undisturbed, tmp_path):
    """On a CPU --gpus-per-run counts processes: torchrun inside, gloo between them. The kill is of one of the two."""
    results = tmp_path / "results"
    path = definition(undisturbed.parent, seeds=[0], space={"n_layers": [2]})
    arguments = ("sweep", path, "--out", results, "--workers", 1, "--gpus-per-run", 2, "--runtime", "threads=1")
    driver = start(*arguments, "--runtime", "checkpoint_seconds=0.01")
    until(lambda: "training" in phases(results))
    os.kill(processes(results, "execute")[0], signal.SIGKILL)
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, out + err
    ((run_id, summary),) = table(results).items()
    assert summary["val_loss"] == pytest.approx(table(undisturbed)[run_id]["val_loss"], rel=1e-5)
    assert read_run(results / "runs" / run_id).manifest["processes"] == 2
    all_ended(results)


def test_a_sweep_in_which_everything_fails_stops_with_one_cause(tmp_path):
    """Checkpoints cannot be written (a file stands in their place): each run fails at its end."""
    results = tmp_path / "results"
    path = definition(tmp_path, space={"n_layers": [1, 2]}, seeds=list(range(20)), base=QUICK)
    for config in Plan(build(SweepDefinition, read_yaml(path), "x")).configs().values():
        (results / "work" / config.run_id).mkdir(parents=True)
        (results / "work" / config.run_id / "checkpoints").touch()
    _, err = sparsedepth("sweep", path, "--out", results, "--workers", 2, "--max-attempts", 1, code=2)
    assert "runs failed in a row" in err and "checkpoints" in err
    assert 3 <= len(list(results.glob("work/*/failures.json"))) < 40


def test_a_worker_whose_run_fails_says_so_as_a_sweep_does(tmp_path):
    results = tmp_path / "results"
    path = definition(tmp_path, space={"n_layers": [1]}, seeds=[0], base=QUICK)
    (config,) = Plan(build(SweepDefinition, read_yaml(path), "x")).configs().values()
    (results / "work" / config.run_id).mkdir(parents=True)
    (results / "work" / config.run_id / "checkpoints").touch()
    sparsedepth("sweep", path, "--out", results, "--max-attempts", 1, code=1)
    sparsedepth("work", results, "--leave-when-idle")  # as many as the sweep's, by default: nothing to do
    _, err = sparsedepth("work", results, "--leave-when-idle", "--max-attempts", 2, code=1)
    assert f"failed: run {config.run_id}" in err


def test_branches_of_a_trunk_are_the_runs_to_their_budgets(tmp_path):
    """Three budgets from one trunk, then the longest alone: the same run, to the bit; the trunk goes in the end."""
    wsd = {**QUICK, "schedule": "wsd", "warmup_tokens": 384, "train_tokens": 128 * 40}
    shape = {"space": {"n_layers": [2]}, "seeds": [0], "base": wsd}
    together, alone = tmp_path / "together", tmp_path / "alone"
    sparsedepth("sweep", definition(tmp_path, branch_at=[0.25, 0.5], **shape), "--out", together)
    sparsedepth("sweep", definition(tmp_path, name="alone", **shape), "--out", alone)
    (run_id,) = table(alone)
    ours, theirs = (folder / "runs" / run_id for folder in (together, alone))
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert read_run(ours).summary["val_loss"] == read_run(theirs).summary["val_loss"]
    assert len(table(together)) == 3 and not list(together.glob("work/trunk-*"))
    assert "1 trunk (1 complete) with 2 branches (2 complete)" in sparsedepth("status", together)[0]
    sparsedepth("train", ours / "config.yaml", "--out", tmp_path / "single")
    assert len(table(tmp_path / "single")) == 1
    assert not list((tmp_path / "single").glob("work/trunk-*")), "no sweep would delete it"
