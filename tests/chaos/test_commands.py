"""Hard kills of the commands that write one result, and of trunks with branches: the result is whole or missing, and
the same command makes what an undisturbed one makes.

The counts that a test asserts are printed: `pytest -s`. The variable KILLS says how often, 20 times if it is not set.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.interrupted_sweep import BASE, Sweep, kill_everything, record_of
from support.runs_frame import runs_frame
from support.sweep_processes import markers, processes, until
from support.tiny_sweep import corpus, definition, sparsedepth, start

from sparsedepth.config.run import RunConfig
from sparsedepth.files import sha256
from sparsedepth.recipe.build_card import derive_card
from sparsedepth.recipe.card import read_card
from sparsedepth.recipe.files import write_page
from sparsedepth.store.run_record import problem

pytestmark = pytest.mark.chaos

KILLS = int(os.environ.get("KILLS", "20"))
RESULTS = Path(__file__).parents[2] / "results"


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A command that writes one result."""

    arguments: list[object]
    out: Path
    is_whole: Callable[[], bool] = lambda: True
    """Whether the result that there is, is whole."""


def contents(path: Path) -> dict[str, str]:
    """Checksums of a file, or of the files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path.parent)): sha256(file) for file in files}


def killed_while_writing(writer: Writer, rng: random.Random) -> bool:
    """Start the command and kill it with all its processes, about when its first file appears; whether it lived."""
    place = writer.out.parent
    before = {*place.iterdir()}
    process = start(*writer.arguments)
    until(lambda: {*place.iterdir()} != before or process.poll() is not None)
    time.sleep(rng.choice((0.0, rng.uniform(0.0, 0.05))))
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    return process.returncode == -signal.SIGKILL


def holds(writer: Writer) -> int:
    """Kill it KILLS times, and then run it to its end: what is there is whole. How often it was alive when killed."""
    rng, alive = random.Random(KILLS), 0
    for _ in range(KILLS):
        alive += killed_while_writing(writer, rng)
        if writer.out.exists():
            assert writer.is_whole(), f"a part of {writer.out.name} is in its place"
            remove(writer.out)
    sparsedepth(*writer.arguments)
    assert writer.is_whole()
    return alive


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_killed_import_leaves_all_or_nothing(tmp_path):
    (tmp_path / "runs.csv").write_text("depth,lr,loss\n" + "".join(f"{2 + i % 3},{i}e-3,{i}\n" for i in range(1, 400)))
    (tmp_path / "map.yaml").write_text("source: x\nfields: {n_layers: depth, lr: lr, val_loss: loss}\n")
    command = ["import", tmp_path / "runs.csv", "--map", tmp_path / "map.yaml", "-o"]
    sparsedepth(*command, tmp_path / "undisturbed" / "out")
    expected = contents(tmp_path / "undisturbed" / "out")
    (tmp_path / "place").mkdir()
    out = tmp_path / "place" / "out"
    alive = holds(Writer(arguments=[*command, out], out=out, is_whole=lambda: contents(out) == expected))
    print(f"\nimport: killed {KILLS} times, {alive} of them before its end")
    assert alive


def test_a_killed_plot_leaves_a_whole_figure_or_none(tmp_path):
    command = ["plot", RESULTS / "quickstart", "-o"]
    sparsedepth(*command, tmp_path / "undisturbed.png")
    expected = (tmp_path / "undisturbed.png").read_bytes()
    (tmp_path / "place").mkdir()
    out = tmp_path / "place" / "undisturbed.png"
    alive = holds(Writer(arguments=[*command, out], out=out, is_whole=lambda: out.read_bytes() == expected))
    print(f"\nplot: killed {KILLS} times, {alive} of them before its end")
    assert alive


def test_a_killed_measure_leaves_a_whole_record_or_none(folder, undisturbed, tmp_path):
    (run_id,) = undisturbed(1)
    place = tmp_path / "models"
    place.mkdir()
    out = place / "again"
    command = ["measure", folder / "undisturbed" / "runs" / run_id, "-o", out]
    alive = holds(Writer(arguments=command, out=out, is_whole=lambda: not problem(out)))
    print(f"\nmeasure: killed {KILLS} times, {alive} of them before its end")
    assert alive


def test_a_killed_calibration_leaves_whole_timings_and_no_process(tmp_path, monkeypatch):
    """Its timings are whole or missing, and no process that timed is left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("support.tiny_sweep.ENVIRONMENT", {**os.environ, "OMP_NUM_THREADS": "1"})
    place = tmp_path / "cache" / "sparsedepth" / "timings"
    path = definition(tmp_path, base=BASE)
    command = ["plan", path, "--calibrate", "--workers", 1]
    rng = random.Random(KILLS)
    for _ in range(KILLS):
        process = start(*command)
        until(lambda process=process: processes(path, "forkserver") or process.poll() is not None)
        time.sleep(rng.uniform(0.0, 3.0))
        process.kill()  # it alone: what it started must end by itself
        process.communicate(timeout=300)
        until(lambda: not processes(path))
        for timings in place.glob("*.json"):
            assert json.loads(timings.read_text())
    sparsedepth(*command)
    (timings,) = place.glob("*.json")
    assert len(json.loads(timings.read_text())) == 2
    print(f"\nplan --calibrate: killed {KILLS} times, nothing is left running")


def test_a_killed_verification_makes_each_run_once_and_its_card_whole(tmp_path):
    """Fresh runs are made once; the card is written at the end, whole."""
    base = {**BASE, "n_layers": 2, "d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128}
    base |= {"corpus": str(corpus(tmp_path)), "measures": ("loss",), "train_tokens": 128 * 10, "val_tokens": 512}
    runs = runs_frame(
        (RunConfig(**{**base, "lr": lr}, seed=seed), {"val_loss": 5 - i + 0.001 * ((seed + i) % 3)})
        for i, lr in enumerate((1e-3, 1e-2))
        for seed in range(3)
    )
    card = write_page(tmp_path / "recipe.yaml", derive_card(runs))[0]
    out, rng = tmp_path / "verification", random.Random(KILLS)
    command = ["recipe", "verify", card, "--out", out, "--workers", 1, "--max-attempts", 1000]
    before: dict[str, int] = {}
    for _ in range(KILLS):
        process = start(*command)
        until(lambda process=process: processes(out) or process.poll() is not None)
        time.sleep(rng.uniform(0.0, 3.0))
        for one in [process.pid, *processes(out)]:
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate(timeout=300)
        until(lambda: not processes(out))
        assert before.items() <= markers(out).items(), "a complete run was lost or repeated"
        before = markers(out)
        if (out / "recipe.card.json").exists():
            assert read_card(out / "recipe.card.json").verification
    sparsedepth(*command)
    assert before.items() <= markers(out).items() and len(markers(out)) == 6
    assert set(read_card(out / "recipe.card.json").verification.run_ids) == set(record_of(out))
    print(f"\nrecipe verify: killed {KILLS} times, {len(before)} of 6 runs complete before the last command")


def test_a_trunk_and_its_branches(tmp_path):
    """Runs to three budgets from one trunk, killed as a whole: the same bytes."""
    wsd = {**BASE, "schedule": "wsd", "warmup_tokens": 384, "train_tokens": 128 * 400}
    shape = {"space": {"n_layers": [2]}, "seeds": [0, 1], "branch_at": [0.25, 0.5]}
    path = definition(tmp_path, base=wsd, **shape)
    results, undisturbed = tmp_path / "results", tmp_path / "undisturbed"
    runtime = ["--workers", 1, "--max-attempts", 1000, "--runtime", "checkpoint_seconds=0.05"]
    sparsedepth("sweep", path, "--out", undisturbed, *runtime)
    command, rng, killed = ["sweep", path, "--out", results, *runtime], random.Random(KILLS), 0
    before: dict[str, int] = {}
    for _ in range(KILLS):
        if len(markers(results)) == 6:
            break
        kill_everything(start(*command), results, rng)
        killed += 1
        assert before.items() <= markers(results).items(), "a complete run was lost or repeated"
        before = markers(results)
    sparsedepth(*command)
    assert record_of(results) == record_of(undisturbed) and len(record_of(results)) == 6
    assert not [*results.glob("work/trunk-*")]
    print(f"\nwsd: everything killed {killed} times, {len(before)} of 6 runs complete before the last command")


@pytest.mark.skipif(not shutil.which("faketime"), reason="faketime is not installed")
def test_a_sweep_whose_clock_is_set_back_an_hour_between_two_halves(folder, undisturbed, tmp_path):
    """Killed, so that leases with heartbeats of the future are left."""
    results, runs = tmp_path / "results", 16  # enough for more than the two seconds in which the kill comes
    sweep, expected = Sweep(folder, runs), undisturbed(runs)
    kill_everything(sweep.start(results, 2), results, random.Random(0))
    command = [sys.executable, "-m", "sparsedepth", *map(str, sweep.arguments(results, 2))]
    done = subprocess.run(["faketime", "-f", "-1h", *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert record_of(results) == expected


class ControlGroup:
    """Processes whose memory the kernel counts and limits."""

    def __init__(self) -> None:
        root = Path("/sys/fs/cgroup/memory")  # version 1; of version 2 the root itself
        files = ("limit_in_bytes", "max_usage_in_bytes", "oom_control") if root.is_dir() else ("max", "peak", "events")
        self.place = (root if root.is_dir() else root.parent) / f"sparsedepth-{os.getpid()}"
        self.limit, self.peak, self.events = (self.place / f"memory.{name}" for name in files)
        self.place.mkdir()
        self.limit.write_text(str(2**40))

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        inside = ["sh", "-c", f'echo $$ > {self.place}/cgroup.procs; exec "$@"', "sh", *words]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=600)
        until(lambda: not (self.place / "cgroup.procs").read_text())
        return done

    @property
    def killed(self) -> int:
        """By the kernel, for lack of memory."""
        facts = dict(line.split() for line in self.events.read_text().splitlines())
        return int(facts["oom_kill"])


@pytest.fixture
def group():
    try:
        made = ControlGroup()
    except OSError as error:
        pytest.skip(f"no control group with limited memory can be made here: {error}")
    yield made
    made.place.rmdir()


def test_runs_that_the_kernel_kills_for_lack_of_memory(group, folder, undisturbed, tmp_path):
    """What the sweep cannot finish in 85% of its memory, the same command finishes elsewhere."""
    sweep, expected = Sweep(folder, 4), undisturbed(4)

    def words(results: Path) -> list[str]:
        return [sys.executable, "-m", "sparsedepth", *map(str, sweep.arguments(results, 4))]

    assert group.run(words(tmp_path / "free")).returncode == 0
    peak = int(group.peak.read_text())
    group.limit.write_text(str(int(0.85 * peak)))
    results = tmp_path / "results"
    done = group.run(words(results))
    assert done.returncode in (0, 1, 2, -signal.SIGKILL) and "Traceback" not in done.stderr, done.stderr
    print(f"\n{peak >> 20} MiB; {group.killed} processes killed by the kernel, {len(record_of(results))} runs complete")
    assert group.killed, "the sweep needs less memory than was left"
    assert record_of(results).items() <= expected.items()
    sweep.run(results, 2)
    assert record_of(results) == expected
