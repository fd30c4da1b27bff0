"""A sweep on a real Slurm: an array that is followed, stopped and disturbed leaves the record of one process.

One controller and three nodes run on this machine (`slurm_cluster`); without Debian's packages all of it is skipped.
"""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from disturbed import Sweep, record_of
from processes import until
from slurm_cluster import Cluster, why_not
from tiny import ENVIRONMENT, definition, sparsedepth, start

from sparsedepth.run.lease import is_held

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A Slurm of three nodes, which the commands of this test see."""
    cluster = Cluster(tmp_path / "slurm", nodes=3)
    for name, value in cluster.environment.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def command(sweep: Sweep, results: Path, *more: object) -> list[object]:
    """`sweep --on slurm`, with the cores of a task shared by no other."""
    _, path, *_ = sweep.arguments(results, 1)
    return ["sweep", path, "--out", results, "--on", "slurm", "--max-attempts", 1000, *more]


def hurry(cluster: Cluster) -> None:
    """Start tasks at once that were queued again: Slurm would hold each back for a while."""
    for task, state in cluster.jobs("--states=PENDING").items():
        if state == "PENDING":
            cluster.call("scontrol", "update", f"JobId={task}", "StartTime=now", check=False)


def finish(cluster: Cluster, process: subprocess.Popen, seconds: float = 500) -> tuple[str, str]:
    """Wait for a command that follows an array; requeued tasks are not held back."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        hurry(cluster)
        time.sleep(1)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return out, err


def is_held_by_a_run(results: Path) -> bool:
    return any(is_held(path) for path in results.glob("work/*/lock"))


def test_an_array_makes_the_record_is_left_attached_to_and_stopped(folder, undisturbed, cluster, tmp_path):
    runs = 6
    expected = undisturbed(runs)
    results, sweep = tmp_path / "results", Sweep(folder, runs)
    text, _ = sparsedepth(*command(sweep, results, "--dry-run", "--array", 3))
    assert "#SBATCH --array=0-2" in text and "array: 3 tasks" in text and not results.exists()

    process = start(*command(sweep, results, "--array", 3))
    assert process.stdout is not None
    until(lambda: "submitted 3 tasks as job" in process.stdout.readline(), 120)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on without this command" in err and "Traceback" not in err

    process = start(*command(sweep, results, "--array", 3))
    until(lambda: "attached to the array" in process.stdout.readline(), 120)
    until(lambda: is_held_by_a_run(results), 120)
    status, _ = sparsedepth("status", results)
    assert re.search(r"tasks of tiny-\w{8}: .*running", status)
    assert re.search(r"running \w{12}: .*\(task \d+_\d on n\d\)", status), status
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert record_of(results) == expected
    for path in results.glob("runs/*/manifest.json"):
        given = json.loads(path.read_text())["allocation"]
        assert re.fullmatch(r"\d+_\d", given["task"]) and given["partition"] == "p" and given["cpus"] == 1
    out, _ = sparsedepth("logs", results, given["task"])
    assert "complete" in out
    out, err = sparsedepth(*command(sweep, results))
    assert "submitted" not in out

    process = start(*command(Sweep(folder, 9), results))
    until(lambda: cluster.processes("work"), 120)
    out, _ = sparsedepth("stop", results)
    assert "ended: " in out
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "runs are missing" in err
    assert not cluster.jobs() and expected.items() <= record_of(results).items()


def test_bad_input_is_one_line_and_submits_nothing(folder, cluster, tmp_path, monkeypatch):
    results, sweep = tmp_path / "results", Sweep(folder, 2)

    def refused(*more: object) -> str:
        _, err = sparsedepth(*command(sweep, results, *more), code=2)
        assert err.count("\n") == 1 and not results.exists()
        assert not cluster.jobs("--states=all"), "something was submitted"
        return err

    assert "--partition 'gpu' is not known to Slurm here; choose of: p, urgent" in refused("--partition", "gpu")
    assert "beyond the limit of partition urgent, 1 h" in refused("--partition", "urgent", "--time", "2:00:00")
    assert "no more than checkpoint_seconds=30" in refused("--time", "0:30")
    assert "--array 5000 must be between 1 and 1000" in refused("--array", 5000, "--set", "seeds=6000")
    assert "--account" in refused("--account", "a b")
    assert "sbatch" in refused("--sbatch", "no-such-option=1")
    monkeypatch.setitem(ENVIRONMENT, "PATH", str(tmp_path))
    assert "--on slurm needs Slurm's sbatch on the path" in refused()


def test_a_folder_that_a_node_does_not_see_is_found_by_the_probe(folder, cluster, tmp_path):
    for name in cluster.names:
        cluster.kill(name)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in cluster.names:
        cluster.start_node(name, hidden=hidden)
    until(lambda: set(cluster.node_states().values()) == {"idle"}, 60)
    _, err = sparsedepth(*command(Sweep(folder, 2), hidden / "results"), code=2)
    assert re.search(r"hidden/results is not shared by the nodes: n\d does not see it", err) and err.count("\n") == 1
    assert not cluster.jobs() and not (hidden / "results").exists()


def test_five_hundred_tasks_are_planned_and_submitted_in_ten_seconds(folder, cluster, tmp_path):
    """Held, so that none runs; the controller's own answer is shown."""
    results = tmp_path / "results"
    path = definition(folder, base={"measures": ["loss"]}, space={"n_layers": [2]}, seeds=list(range(500)))
    started = time.monotonic()
    process = start("sweep", path, "--out", results, "--on", "slurm", "--array", 500, "--sbatch", "hold")
    line = ""
    while "submitted" not in line:
        line = process.stdout.readline()
        assert line or process.poll() is None, process.stderr.read()
    seconds = time.monotonic() - started
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    tasks = cluster.jobs("--name=" + re.search(r"\((\S+)\)", line)[1])
    assert len(tasks) == 500 and set(tasks.values()) == {"PENDING"}
    print(f"\n{line.strip()}: {seconds:.1f} s")
    out, _ = sparsedepth("stop", results)
    assert "ended: 500 tasks" in out and not cluster.jobs()
    assert seconds < 10
