"""A full disk, a folder that cannot be written: one clear message, and what was recorded before is intact."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support.interrupted_sweep import Sweep, record_of
from support.tiny_sweep import sparsedepth, start

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.run.execute import execute
from sparsedepth.run.scratch import Scratch
from sparsedepth.run.train_and_measure import Options
from sparsedepth.store import run_record
from sparsedepth.sweep.results_folder import claim

CPU = Options(runtime=RuntimeConfig(device="cpu", threads=1))


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of a few megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", place], check=True)


def used_kilobytes(place: Path) -> int:
    facts = os.statvfs(place)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize // 1024


def test_a_run_that_finds_the_disk_full_and_the_same_call_later(small_disk, tmp_path):
    first, second = Sweep(tmp_path, 2).configs()
    results = small_disk / "results"
    execute(first, results, CPU)
    remount(small_disk, f"size={used_kilobytes(small_disk) + 8}k")
    with pytest.raises(OSError, match="No space left on device"):
        execute(second, results, CPU)
    (run_id,) = record_of(results)
    run_record.verify(results / "runs" / run_id)
    remount(small_disk, "size=64m")
    execute(second, results, CPU)
    execute(second, tmp_path / "elsewhere", CPU)
    assert len(record_of(results)) == 2 and record_of(tmp_path / "elsewhere").items() <= record_of(results).items()


def test_a_read_only_mount_is_read_and_never_written(small_disk, tmp_path):
    """Every reader answers; what would write says so in one line, and leaves the folder alone."""
    sweep, results = Sweep(tmp_path, 2), small_disk / "results"
    first, _ = sweep.configs()
    path = Path(str(sweep.arguments(results, 1)[1]))
    claim(results, build(SweepDefinition, read_yaml(path), str(path)))
    execute(first, results, CPU)
    run_id = first.run_id
    Scratch(results, run_id).log.write_text("it went well\n")
    shutil.rmtree(results / "data", ignore_errors=True)  # as of a folder that was copied without its tokens
    remount(small_disk, "ro")
    assert "weight_sparsity" in sparsedepth("measure", results / "runs" / run_id, "--measures", "weights")[0]
    assert "1 complete, 0 running, 0 interrupted, 0 failed, 1 planned" in sparsedepth("status", results)[0]
    assert run_id in sparsedepth("logs", results)[0]
    assert sparsedepth("query", results, "select run_id from runs", "--format", "csv")[0].split() == ["run_id", run_id]
    assert "1 configuration, 1 run" in sparsedepth("best", results)[0]
    for command in (
        ("sweep", path, "--out", results),
        ("query", results, "select 1", "-o", results / "answer.csv"),
        ("report", results, "-o", results / "report.html"),
        ("pack", results),
    ):
        _, err = sparsedepth(*command, code=2)
        assert "Read-only file system" in err and err.count("\n") == 1, err


@pytest.mark.chaos
def test_a_disk_that_fills_up_and_a_folder_that_is_read_only(folder, undisturbed, small_disk):
    runs = 5
    expected = undisturbed(runs)
    results = small_disk / "results"
    Sweep(folder, 1).run(results, 1, "--runtime", "threads=1")
    remount(small_disk, f"size={used_kilobytes(small_disk) + 400}k")  # room for one or two more runs

    _, err = Sweep(folder, runs).run(results, 1, "--runtime", "threads=1", "--max-attempts", 2, code=2)
    last = err.strip().splitlines()[-1]
    assert last.startswith("sparsedepth: error:") and "No space left on device" in last, err
    assert "Traceback" not in err
    before = record_of(results)
    assert 1 <= len(before) < runs and before.items() <= expected.items()
    for run_id in before:
        run_record.verify(results / "runs" / run_id)

    remount(small_disk, "ro")
    _, err = Sweep(folder, runs).run(results, 1, code=2)
    assert "Read-only file system" in err and err.count("\n") == 1
    assert "Read-only file system" in sparsedepth("work", results, code=2)[1]
    out, _ = sparsedepth("status", results)
    assert f"{len(before)} complete" in out
    out, _ = sparsedepth("query", results, "select count(*) as n from runs", "--format", "csv")
    assert out.split() == ["n", str(len(before))]
    out, _ = sparsedepth("logs", results)
    assert next(iter(before)) in out

    remount(small_disk, "rw,size=64m")
    Sweep(folder, runs).run(results, 1, "--runtime", "threads=1", "--retry-failed")
    assert record_of(results) == expected


@pytest.mark.chaos
def test_a_folder_that_is_moved_under_a_sweep_is_said_and_not_made_again(folder, undisturbed):
    """The sweep ends with one line; at the new place the same command completes it."""
    runs, results, moved = 4, folder / "results", folder / "moved"
    expected = undisturbed(runs)
    sweep = Sweep(folder, runs)
    process = start(*sweep.arguments(results, 1))
    while not [*results.glob("runs/*/complete")]:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    results.rename(moved)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "it was moved or removed" in err.strip().splitlines()[-1], err
    assert not [*results.glob("runs/*")] and not (results / "sweep.yaml").exists()
    sweep.run(moved, 1)
    assert record_of(moved) == expected
