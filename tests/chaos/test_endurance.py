"""Many runs under one driver: its memory and the forkserver's stay flat, and so do their open files."""

import os
import time
from pathlib import Path

import pytest
from support.interrupted_sweep import Pace, Sweep, at_the_end
from support.sweep_processes import markers, processes
from support.tiny_sweep import start

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(process: int) -> int:
    """Bytes of memory in use."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE


def open_files(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@pytest.mark.chaos
@pytest.mark.parametrize(("runs", "tolerance"), [(30, 0.1), (300, 0.05)], ids=["short", "long"])
def test_memory_and_open_files_stay_flat(folder, tmp_path, monkeypatch, runs, tolerance):
    """Compared: the most between a quarter and a half of the runs, and the most in the last quarter.

    Over thirty runs the allocators are still settling, so that the short form allows twice as much. The forkserver
    holds pipes for each run that lives, and how many live when it is looked at is chance: its fewest open files are
    compared, to within those of one run, where a leak of one file a run would add at least seven. The driver's most
    are, as its memory is. In either window the runs wait until it has been looked at ten times.
    """
    results, pace = tmp_path / "results", Pace(tmp_path, monkeypatch)
    pace.allow(0.45 * runs)
    driver = start(*Sweep(folder, runs).arguments(results, 2, "--runtime", "stack=4"))
    early: dict[int, list[tuple[int, int]]] = {}
    late: dict[int, list[tuple[int, int]]] = {}
    """per process: (bytes resident, open files) at each look"""
    started = time.monotonic()
    while driver.poll() is None:
        time.sleep(0.1)
        share = len(markers(results)) / runs
        window = early if 0.25 <= share < 0.5 else late if 0.75 <= share < 0.98 else None
        if window is None:
            continue
        for process in [driver.pid, *processes(results, "forkserver")]:
            try:
                window.setdefault(process, []).append((resident(process), open_files(process)))
            except OSError:
                continue
        if len(window.get(driver.pid, ())) >= 10:
            pace.allow(0.9 * runs) if window is early else pace.open()
    out, err = at_the_end(driver, results)
    assert driver.returncode == 0, out + err
    both = early.keys() & late.keys()
    assert len(both) == 2, "the driver and the forkserver"
    growth = {process: max(late[process])[0] / max(early[process])[0] - 1 for process in both}
    assert max(growth.values()) < tolerance, growth
    files = {}
    for process in both:
        pick, slack = (max, 1) if process == driver.pid else (min, 3)
        files[process] = pick(n for _, n in early[process]), pick(n for _, n in late[process])
        assert files[process][1] <= files[process][0] + slack, files
    print(
        f"\n{runs} runs in {time.monotonic() - started:.0f} s; memory grew by {max(growth.values()):+.1%} at most "
        f"({', '.join(f'{max(late[process])[0] / 2**20:.0f} MiB' for process in sorted(both))}), open files "
        f"early and late: {[*files.values()]}"
    )
