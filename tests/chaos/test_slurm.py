"""A sweep on a real Slurm: an array that is followed, stopped and disturbed leaves the record of one process.

One controller and three nodes run on this machine (`slurm_cluster`); without Debian's packages all of it is skipped.
"""

import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from support.interrupted_sweep import Sweep, record_of
from support.slurm_cluster import FAKETIME, Cluster, why_not
from support.sweep_processes import markers, until
from support.tiny_sweep import ENVIRONMENT, definition, sparsedepth, start

from sparsedepth.cluster.slurm import parse_time
from sparsedepth.run.lease import is_held

FAULTS = Path(__file__).parent / "faults"

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


@pytest.fixture
def cluster(request, tmp_path, monkeypatch):
    """A Slurm of three nodes, or of those that a test asks for, which the commands of this test see."""
    cluster = Cluster(tmp_path / "slurm", **getattr(request, "param", {"nodes": 3}))
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
    """Start tasks 8 s after they were queued again; Slurm would hold each back for two minutes."""
    lines = cluster.call("squeue", "-h", "-r", "--states=PENDING", "-o", "%i %r", check=False).splitlines()
    held = {line.split()[0] for line in lines if line.endswith(" BeginTime")}
    for task in held:
        if task not in cluster.held:
            cluster.call("scontrol", "update", f"JobId={task}", "StartTime=now+8", check=False)
    cluster.held = held


def finish(cluster: Cluster, process: subprocess.Popen, seconds: float = 500) -> tuple[str, str]:
    """Wait for a command that follows an array; requeued tasks are not held back."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        hurry(cluster)
        time.sleep(1)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
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
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "keeps running; run the same command again" in err and "Traceback" not in err

    process = start(*command(sweep, results, "--array", 3))
    until(lambda: "following the array" in process.stdout.readline(), 120)
    until(lambda: is_held_by_a_run(results), 120)
    status, _ = sparsedepth("status", results)
    assert re.search(r"tasks of tiny-\w{8}: .*running", status)
    assert re.search(r"running \w{12}: .*\(task \d+_\d on n\d\)", status), status
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert record_of(results) == expected
    for path in results.glob("runs/*/manifest.json"):
        manifest = json.loads(path.read_text())
        given = manifest["allocations"][-1]
        assert manifest["node_hours"] > 0
        assert re.fullmatch(r"\d+_\d", given["task"]) and given["partition"] == "p" and given["cpus"] == 1
    out, _ = sparsedepth("logs", results, given["task"])
    assert "complete" in out
    assert out in sparsedepth("logs", results, path.parent.name, "--task")[0]
    out, err = sparsedepth(*command(sweep, results))
    assert "submitted" not in out

    process = start(*command(Sweep(folder, 30), results))
    until(lambda: is_held_by_a_run(results), 120)
    out, _ = sparsedepth("stop", results)
    assert re.search(r"stopped \d+ tasks of tiny", out)
    status, _ = sparsedepth("status", results)
    assert re.search(r"(planned|interrupted) \w{12} \(task \d+_\d on n\d\): stopped", status), status
    assert re.search(r"used: \S+ node hours by the runs' own clocks, \S+ per complete run", status), status
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "runs are missing" in err
    assert not cluster.jobs() and expected.items() <= record_of(results).items()


def test_bad_input_is_one_line_and_submits_nothing(folder, cluster, tmp_path, monkeypatch):
    results, sweep = tmp_path / "results", Sweep(folder, 2)

    def refused(*more: object) -> str:
        _, err = sparsedepth(*command(sweep, results, *more), code=2)
        assert err.count("\n") == 1 and not results.exists()
        assert not cluster.jobs("--states=all"), "something was submitted"
        return err

    assert "--partition 'gpu' does not exist; choose one of: p, urgent" in refused("--partition", "gpu")
    assert "exceeds the limit of partition urgent, 1 h" in refused("--partition", "urgent", "--time", "2:00:00")
    too_short = refused("--time", "1")
    assert "leaves a task 45 s before Slurm warns it, too short to start (about 20 s)" in too_short
    assert "checkpoint_seconds=30); give --time at least 2" in too_short
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
    assert re.search(r"hidden/results is not visible on n\d; give an --out", err) and err.count("\n") == 1
    assert not cluster.jobs() and not (hidden / "results").exists()


def test_five_hundred_tasks_are_planned_and_submitted_in_ten_seconds(folder, cluster, tmp_path):
    """Held, so that none runs; the controller's own answer is shown. The bound is on the command's processor time,
    which is two seconds: how long it waits for its turn is the machine's affair."""
    results = tmp_path / "results"
    path = definition(folder, base={"measures": ["loss"]}, space={"n_layers": [2]}, seeds=list(range(500)))
    started = time.monotonic()
    process = start("sweep", path, "--out", results, "--on", "slurm", "--array", 500, "--sbatch", "hold")
    line = ""
    while "submitted" not in line:
        line = process.stdout.readline()
        assert line or process.poll() is None, process.stderr.read()
    seconds = time.monotonic() - started
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    used = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    tasks = cluster.jobs("--name=" + re.search(r"\((\S+)\)", line)[1])
    assert len(tasks) == 500 and set(tasks.values()) == {"PENDING"}
    print(f"\n{line.strip()}: {seconds:.1f} s, {used:.1f} s of a processor")
    out, _ = sparsedepth("stop", results)
    assert "stopped 500 tasks" in out and not cluster.jobs()
    assert used < 10


class Chaos:
    """Disturbances of a running array, one at a time."""

    def __init__(self, cluster: Cluster, seed: int):
        self.cluster, self.rng = cluster, random.Random(seed)
        self.counts: Counter[str] = Counter()

    def running(self) -> list[str]:
        tasks = self.cluster.jobs("--states=RUNNING", "--partition=p")
        return [task for task, state in tasks.items() if state == "RUNNING" and "_" in task]

    def disturb(self, kind: str) -> bool:
        """Returns whether there was something to disturb."""
        done = getattr(self, kind)()
        self.counts[kind] += bool(done)
        return bool(done)

    def kill_task(self) -> bool:
        works = self.cluster.work_of()
        if works:
            os.kill(self.rng.choice(works), signal.SIGKILL)
        return bool(works)

    def requeue(self) -> bool:
        tasks = self.running()
        return bool(tasks) and not self.cluster.call("scontrol", "requeue", self.rng.choice(tasks), check=False)

    def preempt(self) -> bool:
        """An urgent job takes a node from a task, which has 20 s to leave."""
        if not self.running():
            return False
        self.cluster.call("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
        return True

    def restart_controller(self) -> bool:
        self.cluster.kill("controller")
        time.sleep(3)
        self.cluster.start_controller()
        return True

    def restart_slurmd(self) -> bool:
        """The node's tasks go on meanwhile, and are found again."""
        name = self.rng.choice(self.cluster.names[:2])
        self.cluster.kill(name)
        time.sleep(2)
        self.cluster.start_node(name)
        return True

    def node_dies(self) -> bool:
        """Slurm notices after 15 s, and queues the node's task again; another may have its run after a minute."""
        if not self.cluster.work_of("n1"):
            return False
        self.cluster.kill_node("n1")
        until(lambda: self.cluster.node_states()["n1"].startswith("down"), 90)
        self.cluster.start_node("n1")
        return True

    def node_is_cut_off(self) -> bool:
        """Slurm takes the node for dead and queues its task again elsewhere, while the task lives and goes on."""
        if not self.cluster.work_of("n2"):
            return False
        self.cluster.kill("n2")
        until(lambda: self.cluster.node_states()["n2"].startswith("down"), 90)
        time.sleep(10)
        self.cluster.start_node("n2")
        return True


KINDS = ("kill_task", "requeue", "preempt", "restart_controller", "restart_slurmd", "node_dies", "node_is_cut_off")


@pytest.mark.skipif(not FAKETIME.exists(), reason="no libfaketime (Debian's package of that name)")
def test_thirty_runs_over_three_nodes_under_every_disturbance(folder, undisturbed, cluster, tmp_path):
    """One node's clock is an hour ahead all the time. Each kind of disturbance comes at least once: where the machine
    is through with the runs before, as many seeds again are asked for."""
    runs = 30
    cluster.kill("n3")
    cluster.start_node("n3", clock=3600.0)
    results = tmp_path / "results"
    chaos = Chaos(cluster, 1)
    planned = [*KINDS[:-2], *KINDS[:3]]
    chaos.rng.shuffle(planned)
    planned += KINDS[-2:]  # first, since they need a task on their node
    seen: dict[str, int] = {}
    started = time.monotonic()
    commands = 0
    process = start(*command(Sweep(folder, runs), results, "--array", 6))
    while len(seen) < runs or planned:
        if process.poll() is not None:
            out, err = process.communicate()
            assert process.returncode in (0, 1) and "Traceback" not in err, out + err
            if process.returncode == 0:
                if not planned:
                    break
                runs += 30
            else:  # all tasks ended while runs were missing: the same command resumes
                commands += 1
            process = start(*command(Sweep(folder, runs), results, "--array", 6))
        assert time.monotonic() - started < 1500, "it never ended"
        now = markers(results)
        assert seen.items() <= now.items(), "a complete run was lost or repeated"
        seen = now
        hurry(cluster)
        if planned and cluster.work_of() and chaos.disturb(planned[-1]):
            planned.pop()
        time.sleep(chaos.rng.uniform(0.5, 4.0))
    out, err = finish(cluster, process, 300)
    print(f"\n{runs} runs in {time.monotonic() - started:.0f} s; disturbed: {dict(chaos.counts)}, "
          f"commands given again: {commands}")  # fmt: skip
    assert all(chaos.counts[kind] for kind in KINDS)
    assert record_of(results) == undisturbed(runs)
    assert seen.items() <= markers(results).items()
    assert not list(results.glob("work/*/failures.json")), "an attempt was counted"
    assert process.returncode == 0, out + err


def test_a_time_limit_too_short_to_start_and_one_too_short_for_a_run(tmp_path, cluster, monkeypatch):
    """The limit is several times what this machine takes to start. A task that does not get to its first line is tried
    three times, and says so; then a run that is slow until its task was stopped once goes on where it stopped."""
    path = definition(
        tmp_path, base={"measures": ["loss"], "train_tokens": 128 * 400}, space={"n_layers": [2]}, seeds=[0]
    )
    started = time.monotonic()
    sparsedepth("sweep", path, "--out", tmp_path / "local", "--workers", 1, "--runtime", "threads=1")
    minutes = math.ceil(3 * (time.monotonic() - started) / 60)
    results, slow = tmp_path / "results", tmp_path / "slow"
    slow.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "SPARSEDEPTH_SLOW", str(slow))
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{FAULTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    sweep = ("sweep", path, "--out", results, "--on", "slurm", "--time", minutes, "--runtime", "checkpoint_seconds=1")

    out, err = finish(cluster, process := start(*sweep, "--runtime", "threads=1"), 300 * minutes)
    assert process.returncode == 1 and "Traceback" not in err, out + err
    said = r"1 tasks of job \d+ reached their time limit 3 times in a row without progress, and 1 of them gave up: "
    advice = r"give --time at least (\S+)"
    assert re.search(said, err) and (told := re.search(advice, err))
    assert parse_time(told[1]) > 60 * minutes
    assert re.search(said, sparsedepth("status", results)[0])
    (log,) = results.glob("slurm/*.log")
    assert re.search(f"3 times in a row without progress; {advice}", log.read_text())[1] == told[1]

    (slow / "start").touch()
    process = start(*sweep, "--runtime", "threads=1")
    until(
        lambda: hurry(cluster) or any('"progress": true' in end.read_text() for end in results.glob("slurm/*.jsonl")),
        300,
    )
    (slow / "steps").touch()
    out, err = finish(cluster, process, 300)
    assert process.returncode == 0 and re.search(f"note: {said}", out), out + err
    (manifest,) = results.glob("runs/*/manifest.json")
    restarts = json.loads(manifest.read_text())["allocations"][-1]["restarts"]
    assert restarts >= 1
    print(
        f"\na limit of {minutes} min: given up after 3 starts without progress; a run was queued again {restarts} times"
    )
    assert not list(results.glob("work/*/failures.json"))
    assert record_of(results) == record_of(tmp_path / "local")


def test_a_full_folder_ends_the_tasks_and_the_same_command_continues(folder, undisturbed, tmp_path, monkeypatch):
    runs = 5
    expected = undisturbed(runs)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    cluster = Cluster(tmp_path / "slurm", nodes=2)
    for name, value in cluster.environment.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    try:
        cluster.start()
        results = disk / "results"
        Sweep(folder, 1).run(results, 1, "--runtime", "threads=1")
        facts = os.statvfs(disk)
        used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize // 1024
        subprocess.run(["mount", "-o", f"remount,size={used + 400}k", disk], check=True)
        process = start(*command(Sweep(folder, runs), results, "--array", 2, "--max-attempts", 2))
        out, err = finish(cluster, process, 200)
        assert process.returncode in (1, 2), out + err
        before = record_of(results)
        assert before.items() <= expected.items() and len(before) < runs
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        process = start(*command(Sweep(folder, runs), results, "--array", 2, "--retry-failed"))
        out, err = finish(cluster, process, 300)
        assert process.returncode == 0, out + err
        assert record_of(results) == expected
    finally:
        cluster.stop()
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("cluster", [{"nodes": 2, "cpus": 2}], indirect=True)
@pytest.mark.parametrize(
    "options", [("--gpus-per-run", 2, "--sbatch", "cpus-per-task=2"), ("--nodes", 2)], ids=["one node", "two nodes"]
)
def test_one_run_in_two_processes(folder, undisturbed, cluster, tmp_path, options):
    """Under torchrun on the task's node, and under srun and torchrun on two: the losses of one process, with gloo."""
    (run_id,) = undisturbed(1)
    results = tmp_path / "results"
    process = start(*command(Sweep(folder, 1), results, "--device", "cpu", "--max-attempts", 1, *options))
    out, err = finish(cluster, process, 200)
    assert process.returncode == 0, out + err + "".join(path.read_text() for path in results.glob("work/*/log.txt"))
    manifest = json.loads((results / "runs" / run_id / "manifest.json").read_text())
    assert (manifest["parallel"], manifest["processes"]) == ("ddp", 2)
    assert manifest["allocations"][-1]["nodes"] == (2 if "--nodes" in options else 1)
    (reference,) = (folder / "undisturbed" / "runs").glob(f"{run_id}/summary.json")
    alone, spread = (json.loads(path.read_text()) for path in (reference, results / "runs" / run_id / "summary.json"))
    assert spread["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-4)


def test_the_queue_on_postgresql_that_is_restarted_and_its_password_stays_unseen(
    folder, undisturbed, database, cluster, tmp_path
):
    runs = 8
    expected = undisturbed(runs)
    results = tmp_path / "results"
    process = start(*command(Sweep(folder, runs), results, "--array", 3, "--storage", database.url))
    until(lambda: is_held_by_a_run(results), 200)
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "cli.main work" in lines and "secret" not in lines
    database.stop()
    time.sleep(5)
    database.start()
    out, err = finish(cluster, process, 400)
    assert process.returncode == 0, out + err
    assert record_of(results) == expected
    assert not (results / "study.journal").exists()
    written = [*results.rglob("*"), *(tmp_path / "slurm").glob("*.log")]
    assert not [path for path in written if path.is_file() and b"secret" in path.read_bytes()]
