"""A sweep to disturb: runs of about a second, and the record that they must leave to the last byte."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from processes import Kind, markers, processes
from tiny import definition, start

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.files import sha256
from sparsedepth.plan.definition_file import planned_runs

BASE = {"measures": ["loss"], "train_tokens": 128 * 60, "observe_every": 20}
STEPS = 60

KILLED: tuple[Kind, ...] = ("run", "run", "run", "forkserver")
"""What is killed, as often as it stands here; a run may have to be waited for."""

Record = dict[str, tuple[str, str]]
"""run_id -> checksums of summary and weights."""


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
        runs = planned_runs(build(SweepDefinition, read_yaml(Path(path)), path), self.folder)
        return sorted(runs, key=lambda config: config.seed)

    def run_ids(self) -> list[str]:
        return [config.run_id for config in self.configs()]

    def run(self, results: Path, workers: int, *more: object, code: int = 0) -> tuple[str, str]:
        """Run the command to its end; its output and errors."""
        process = start(*self.arguments(results, workers, *more))
        out, err = process.communicate(timeout=600)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return out, err


def record_of(results: Path) -> Record:
    """What every complete run recorded."""
    folders = sorted(path.parent for path in results.glob("runs/*/complete"))
    return {folder.name: (sha256(folder / "summary.json"), sha256(folder / "model.safetensors")) for folder in folders}


def kill_at_random(results: Path, kills: int, ended: Callable[[], bool], rng: random.Random) -> Counter:
    """Kill a run or the forkserver, `kills` times; no complete run may change meanwhile. What was killed."""
    killed: Counter[str] = Counter()
    seen: dict[str, int] = {}
    kind = rng.choice(KILLED)
    while killed.total() < kills and not ended():
        time.sleep(rng.uniform(0.0, 0.1))
        now = markers(results)
        assert seen.items() <= now.items(), "a complete run was lost or repeated"
        seen = now
        if found := processes(results, kind):
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself since
                os.kill(rng.choice(found), signal.SIGKILL)
                killed[kind] += 1
                kind = rng.choice(KILLED)
                time.sleep(rng.uniform(0.0, 0.5))
    return killed
