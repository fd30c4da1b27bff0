"""A sweep to disturb: runs of about a second, and the record that they must leave to the last byte."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support import forked_commands, tiny_sweep
from support.sweep_processes import Kind, markers, processes, until
from support.tiny_sweep import definition, known_runs, start

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.files import sha256, write_text
from sparsedepth.plan.tasks import Plan
from sparsedepth.sweep.driver import MAX_DEATHS

BASE = {"measures": ["loss"], "train_tokens": 128 * 60, "observe_every": 20}
STEPS = 60

KILLED: tuple[Kind, ...] = ("run", "run", "run", "forkserver")
"""What is killed, as often as it stands here; a run may have to be waited for."""

SILENCE_SECONDS = 900.0
"""A sweep is at its end, or hangs, when so long no run is completed: a run takes seconds, its process's start a few
more, and a slow machine ten times as long."""

FEW = 16
"""Sweeps of up to so many runs are forked from what is imported already, which saves most of their seconds."""

Process = subprocess.Popen | forked_commands.Command
Record = dict[str, tuple[str, str]]
"""run_id -> checksums of summary and weights."""


def with_faults(**variables: object) -> dict[str, str]:
    """The environment of a command whose processes are disturbed from within: `chaos/faults/sitecustomize.py`."""
    paths = [str(Path(__file__).parents[1] / "chaos" / "faults"), os.environ.get("PYTHONPATH", "")]
    known = {**tiny_sweep.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**known, **{name: str(value) for name, value in variables.items()}}


class Pace:
    """Holds a sweep open for its disturbances: only so many of its runs come to their end as were allowed by now.

    Without it a fast machine would be through before it was disturbed, and a slow one would be disturbed in its
    imports alone.
    """

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder / "pace"
        (self.folder / "entered").mkdir(parents=True)
        self.allow(0)
        monkeypatch.setattr("support.tiny_sweep.ENVIRONMENT", with_faults(SPARSEDEPTH_PACE=self.folder))

    def allow(self, runs: float) -> None:
        """Let so many runs come to their end, in all."""
        write_text(self.folder / "allowed", str(int(runs)))

    def open(self) -> None:
        """Let every run come to its end."""
        self.allow(10**6)


def at_the_end(process: Process, results: Path) -> tuple[str, str]:
    """Wait for the end of a sweep, for as long as its runs get on. Its output and errors."""
    while True:
        before = markers(results)
        try:
            return process.communicate(timeout=SILENCE_SECONDS)
        except subprocess.TimeoutExpired:
            assert markers(results) != before, f"no run was completed in {SILENCE_SECONDS} s"


@dataclass(frozen=True)
class Sweep:
    """`runs` seeds of one decoder. Sweeps in one folder share their text, and so the ids of their runs."""

    folder: Path
    runs: int

    def arguments(self, results: Path, workers: int, *more: object) -> list[object]:
        """The command that runs it; a failing run is tried until it succeeds."""
        path = definition(self.folder, base=BASE, space={"n_layers": [2]}, seeds=list(range(self.runs)))
        return ["sweep", path, "--out", results, "--workers", workers, "--max-attempts", 1000, *more]

    def configs(self) -> list[RunConfig]:
        """Its runs, in the order of their seeds."""
        path = str(self.arguments(self.folder, 1)[1])
        runs = known_runs(Plan(build(SweepDefinition, read_yaml(Path(path)), path)), self.folder)
        return sorted(runs, key=lambda config: config.seed)

    def run_ids(self) -> list[str]:
        return [config.run_id for config in self.configs()]

    def start(self, results: Path, workers: int, *more: object) -> Process:
        """The command, under way."""
        arguments = self.arguments(results, workers, *more)
        if self.runs > FEW:
            return start(*arguments)
        return forked_commands.start([*map(str, arguments)], tiny_sweep.ENVIRONMENT)

    def run(self, results: Path, workers: int, *more: object, code: int = 0) -> tuple[str, str]:
        """Run the command to its end; its output and errors."""
        process = self.start(results, workers, *more)
        out, err = at_the_end(process, results)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return out, err


def record_of(results: Path) -> Record:
    """What every complete run recorded."""
    folders = sorted(path.parent for path in results.glob("runs/*/complete"))
    return {folder.name: (sha256(folder / "summary.json"), sha256(folder / "model.safetensors")) for folder in folders}


def kill_everything(driver: Process, results: Path, rng: random.Random) -> None:
    """Kill a command with all its processes at a moment before its end."""
    kind = rng.choice(KILLED)
    until(lambda: processes(results, kind) or driver.poll() is not None)
    time.sleep(rng.uniform(0.0, 2.0))
    assert driver.poll() is None, "the sweep ended before it had been disturbed enough"
    for process in [driver.pid, *processes(results)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    driver.communicate(timeout=60)
    until(lambda: not processes(results), 60)


def kill_at_random(
    results: Path, kills: int, ended: Callable[[], bool], rng: random.Random, pace: Pace, runs: int, entered: int = 0
) -> Counter:
    """Kill a run or the forkserver, `kills` times, while `entered` to all of the `runs` come to their end; no complete
    run may change meanwhile. Between two completed runs the forkserver dies less often than a sweep puts up with,
    however slowly it starts. What was killed."""
    killed: Counter[str] = Counter()
    seen: dict[str, int] = {}
    kind, deaths = rng.choice(KILLED), 0
    deadline = time.monotonic() + SILENCE_SECONDS
    while killed.total() < kills and not ended():
        assert time.monotonic() < deadline, f"nothing to kill in {SILENCE_SECONDS} s: no {kind}"
        time.sleep(rng.uniform(0.0, 0.1))
        now = markers(results)
        assert seen.items() <= now.items(), "a complete run was lost or repeated"
        deaths = deaths if len(now) == len(seen) else 0
        seen = now
        if found := processes(results, kind):
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself since
                os.kill(rng.choice(found), signal.SIGKILL)
                killed[kind] += 1
                deadline = time.monotonic() + SILENCE_SECONDS
                deaths += kind == "forkserver"
                kind = rng.choice(KILLED) if deaths < MAX_DEATHS // 2 else "run"
                pace.allow(entered + (runs - entered) * killed.total() / kills)
                time.sleep(rng.uniform(0.0, 0.5))
    pace.open()
    return killed
