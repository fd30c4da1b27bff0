"""Sweeps with real processes: they end, they continue after any death, and they never repeat or lose a run."""

import os
import signal
import time
from pathlib import Path

import pytest
from tiny import definition, sparsedepth, start, table

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.store.folder import read_run
from sparsedepth.sweep.status import planned_runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The tiny sweep's results, made without disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sparsedepth("sweep", definition(folder), "--out", folder / "results", "--workers", 2)
    return folder / "results"


def markers(results: Path) -> dict[str, int]:
    """When each run was completed: a run that is repeated gets a new marker."""
    return {path.parent.name: path.stat().st_mtime_ns for path in results.glob("runs/*/complete")}


def processes(results: Path, module: str = "sparsedepth.sweep") -> list[int]:
    """The living processes of a sweep, by their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if entry.name.isdigit() and str(results) in command and any(word.startswith(module) for word in command):
            found.append(int(entry.name))
    return found


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


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
    out, _ = sparsedepth("sweep", definition(undisturbed.parent), "--out", undisturbed)
    assert markers(undisturbed) == before and "sparsedepth recipe" in out


def test_a_definition_that_grows_reuses_what_is_done(undisturbed, tmp_path):
    results = tmp_path / "results"
    shallow = definition(tmp_path, space={"n_layers": [2]}, seeds=[0])
    sparsedepth("sweep", shallow, "--out", results)
    before = markers(results)
    sparsedepth("sweep", definition(tmp_path, seeds=[0]), "--out", results)
    assert len(markers(results)) == 2 and before.items() <= markers(results).items()


@pytest.mark.parametrize("moment", ["training", "between runs"])
def test_kill_9_of_the_driver_loses_nothing(undisturbed, moment):
    """Same text, same definition: the disturbed sweep's table equals the undisturbed one's to the last digit."""
    results = undisturbed.parent / f"killed-{moment.split()[0]}"
    arguments = ("sweep", definition(undisturbed.parent), "--out", results, "--workers", 2)
    driver = start(*arguments)
    if moment == "training":
        until(lambda: any("training" in path.read_text() for path in results.glob("work/*/progress.json")))
    else:
        until(lambda: len(markers(results)) >= 1)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    until(lambda: not processes(results), 30)  # its workers and their runs end with it
    before = markers(results)
    sparsedepth(*arguments)
    assert table(results) == table(undisturbed)
    assert before.items() <= markers(results).items(), "a complete run was repeated"


def test_kill_9_of_a_worker_and_of_a_run(undisturbed):
    """The sweep finishes by itself, with the same table; a killed run is tried again."""
    results = undisturbed.parent / "killed-worker"
    driver = start("sweep", definition(undisturbed.parent), "--out", results, "--workers", 2)
    for module in ("sparsedepth.sweep.worker", "sparsedepth.sweep.execute"):
        until(lambda module=module: bool(processes(results, module)))
        os.kill(processes(results, module)[0], signal.SIGKILL)
        time.sleep(1)
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 0, out + err
    assert table(results) == table(undisturbed)


def test_ctrl_c_stops_at_a_checkpoint_and_the_same_command_continues(tmp_path):
    """One longer run, so that the signal finds it training."""
    results = tmp_path / "results"
    path = definition(tmp_path, base={"train_tokens": 128 * 500}, space={"n_layers": [2]}, seeds=[0])
    driver = start("sweep", path, "--out", results, "--workers", 1)
    until(lambda: any('"training"' in path.read_text() for path in results.glob("work/*/progress.json")))
    os.kill(driver.pid, signal.SIGINT)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 130 and "the same command continues" in err
    assert list(results.glob("work/*/checkpoints/step-*.json")), "no checkpoint was written"
    assert not list(results.glob("work/*/failures.json")), "a stop is no failure"
    out, _ = sparsedepth("status", results)
    assert "1 interrupted" in out
    sparsedepth("sweep", path, "--out", results, "--workers", 1)
    (summary,) = table(results).values()
    assert summary["steps"] == 500


def test_a_damaged_run_is_made_again(undisturbed, tmp_path):
    results = tmp_path / "results"
    path = definition(tmp_path, space={"n_layers": [2]}, seeds=[0])
    sparsedepth("sweep", path, "--out", results)
    whole = table(results)
    (folder,) = (results / "runs").iterdir()
    content = bytearray((folder / "layers.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "layers.parquet").write_bytes(content)
    _, err = sparsedepth("query", results, "select count(*) from runs", code=2)
    assert "layers.parquet" in err and folder.name in err
    sparsedepth("sweep", path, "--out", results)
    assert table(results) == whole


def test_a_run_that_keeps_dying_is_kept_with_its_reason(tmp_path):
    results = tmp_path / "results"
    path = definition(tmp_path, space={"n_layers": [2]}, seeds=[0])
    driver = start("sweep", path, "--out", results, "--workers", 1, "--max-attempts", 2)
    for attempt in range(2):
        until(lambda: bool(processes(results, "sparsedepth.sweep.execute")))
        os.kill(processes(results, "sparsedepth.sweep.execute")[0], signal.SIGKILL)
        until(lambda n=attempt: len(list(results.glob("work/*/failures.json"))) > 0 or n == 0)
        time.sleep(0.5)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 1 and "killed by signal 9" in err
    out, _ = sparsedepth("status", results)
    assert "1 failed" in out and "killed by signal 9" in out
    sparsedepth("sweep", path, "--out", results, code=1)  # not tried again unasked
    sparsedepth("sweep", path, "--out", results, "--retry-failed")
    assert len(table(results)) == 1


def test_tpe_proposes_learns_and_is_rebuilt_from_the_folders(tmp_path):
    results = tmp_path / "results"
    space = {"lr": {"low": 1e-3, "high": 1e-2, "log": True}, "n_layers": [1, 2]}
    path = definition(tmp_path, sampler="tpe", n_trials=3, seeds=[0], space=space)
    sparsedepth("sweep", path, "--out", results, "--workers", 1)
    before = markers(results)
    assert len(before) == 3
    for file in results.glob("study.db*"):
        file.unlink()
    sparsedepth("sweep", path, "--out", results, "--workers", 1)
    assert markers(results) == before


def test_a_space_smaller_than_the_budget_is_done_when_it_is_exhausted(tmp_path):
    """Four proposals from two possible cells: equal proposals share a run."""
    results = tmp_path / "results"
    path = definition(tmp_path, sampler="tpe", n_trials=4, seeds=[0], space={"n_layers": [1, 2]})
    sparsedepth("sweep", path, "--out", results, "--workers", 2)
    before = markers(results)
    assert 1 <= len(before) <= 2
    sparsedepth("sweep", path, "--out", results, "--workers", 2)
    assert markers(results) == before


def test_a_stop_before_a_run_can_handle_signals_is_no_failure(tmp_path):
    """The process of a run needs seconds to import; a signal that finds it there kills it outright."""
    results = tmp_path / "results"
    path = definition(tmp_path, space={"n_layers": [2]}, seeds=[0])
    driver = start("sweep", path, "--out", results, "--workers", 1, "--max-attempts", 1)
    until(lambda: bool(processes(results, "sparsedepth.sweep.execute")))
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    until(lambda: not processes(results), 30)
    assert not list(results.glob("work/*/failures.json"))
    sparsedepth("sweep", path, "--out", results, "--workers", 1, "--max-attempts", 1)
    assert len(table(results)) == 1


def test_the_folder_of_another_sweep_is_refused_untouched(undisturbed, tmp_path):
    before = markers(undisturbed)
    _, err = sparsedepth("sweep", definition(tmp_path, name="other"), "--out", undisturbed, code=2)
    assert "holds another sweep ('tiny')" in err and err.count("\n") == 1
    changed = definition(tmp_path, base={"lr": 1e-4})
    _, err = sparsedepth("sweep", changed, "--out", undisturbed, code=2)
    assert "base differs in corpus, lr" in err
    assert markers(undisturbed) == before


def test_a_sweep_in_which_everything_fails_stops_with_one_cause(tmp_path):
    """Checkpoints cannot be written (a file stands in their place): each run fails at its end."""
    results = tmp_path / "results"
    path = definition(tmp_path, space={"n_layers": [1, 2]}, seeds=[0, 1, 2])
    for config in planned_runs(build(SweepDefinition, read_yaml(path), "x")):
        (results / "work" / config.run_id).mkdir(parents=True)
        (results / "work" / config.run_id / "checkpoints").touch()
    _, err = sparsedepth("sweep", path, "--out", results, "--workers", 2, "--max-attempts", 1, code=2)
    assert "runs failed one after the other" in err and "checkpoints" in err
    assert 3 <= len(list(results.glob("work/*/failures.json"))) < 6
