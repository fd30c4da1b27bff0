"""Kills the processes of a test's sweep at named points, or makes them slow. Python loads it by itself where PYTHONPATH
names its folder.

SPARSEDEPTH_FAULTS names a JSON file: {run_id: [point, ...]}. A run dies at its first point, once; then at its second,
once; the file `<run_id>.<n>` beside the JSON says that the n-th has happened.

SPARSEDEPTH_SLOW names a folder: until it has the file `start`, `sparsedepth work` does not get to its first line, and
until it has `steps`, a step of training takes a second.

SPARSEDEPTH_PACE names a folder whose file `allowed` holds a number: so many runs may train to their end. Each of the
others waits at a step drawn at random, so that no machine is too fast to be disturbed (`interrupted_sweep.Pace`): never
at the first, before which a run has written no progress, and so cannot be waited for.
"""

import fcntl
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

POINTS = (
    "start",
    "first step",
    "before a checkpoint",
    "between write and rename",
    "after a checkpoint",
    "while measuring",
    "before the complete marker",
    "before the record is in its place",
    "while resuming",
)


def reached(run_id: str, point: str) -> None:
    """Die here, if this is the run's next point."""
    if "SPARSEDEPTH_FAULTS" not in os.environ:
        return
    faults = Path(os.environ["SPARSEDEPTH_FAULTS"])
    points = json.loads(faults.read_text()).get(run_id, [])
    flags = [faults.with_name(f"{run_id}.{n}") for n in range(len(points))]
    following = next((n for n, flag in enumerate(flags) if not flag.exists()), None)
    if following is not None and points[following] == point:
        flags[following].touch()
        os.kill(os.getpid(), signal.SIGKILL)


def may_hurry(name: str) -> bool:
    """Whether nothing is to be slow, or no longer."""
    folder = os.environ.get("SPARSEDEPTH_SLOW")
    return folder is None or Path(folder, name).exists()


class Turn:
    """When the runs of this process, which are a stack, may go on."""

    def __init__(self, run_ids: list[str]) -> None:
        self.run_ids = run_ids
        self.parent = os.getppid()
        self.has_come = "SPARSEDEPTH_PACE" not in os.environ

    def wait(self, run_id: str, step: int, n_steps: int) -> None:
        """Before a step; an orphan goes on, to see that it is to stop."""
        if self.has_come or step < random.Random(f"{os.getpid()} {run_id}").randrange(1, n_steps):
            return
        while not self.has_come and os.getppid() == self.parent:
            self.has_come = self._enter(Path(os.environ["SPARSEDEPTH_PACE"]))
            time.sleep(0.02)

    def _enter(self, pace: Path) -> bool:
        """Count the runs among those that are allowed, if so many still are."""
        with open(pace / "lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            new = [run_id for run_id in self.run_ids if not (pace / "entered" / run_id).exists()]
            room = int((pace / "allowed").read_text()) - len(list((pace / "entered").iterdir()))
            if len(new) > room:
                return False
            for run_id in new:
                (pace / "entered" / run_id).touch()
        return True


turn: Turn | None = None
"""Of the runs of this process."""


def patch_execute(module) -> None:
    """In the run's process, before anything else."""
    original = module.main

    def main(arguments):
        global turn
        configs = [Path(argument) for argument in arguments[1:] if argument.endswith("config.yaml")]
        turn = Turn([path.parent.name for path in configs])
        reached(configs[0].parent.name, "start")
        return original(arguments)

    module.main = main


def patch_scratch(module) -> None:
    original = module.Scratch.write_progress

    def write_progress(self, phase, *rest):
        original(self, phase, *rest)
        reached(self.run_id, {"training": "first step", "measuring": "while measuring"}.get(phase, ""))

    module.Scratch.write_progress = write_progress


def patch_checkpoint(module) -> None:
    commit, read = module.commit, module.read

    def committed(folder, *rest, **options):
        reached(folder.parent.name, "before a checkpoint")
        commit(folder, *rest, **options)
        reached(folder.parent.name, "after a checkpoint")

    def resumed(folder, *rest, **options):
        position = read(folder, *rest, **options)
        if position:
            reached(folder.parent.name, "while resuming")
        return position

    module.commit, module.read = committed, resumed


def patch_text(module) -> None:
    original = module.TextSource.batch

    def batch(self, config, step):
        reached(config.run_id, f"step {step}")
        if not may_hurry("steps"):
            time.sleep(1.0)
        if turn:
            turn.wait(config.run_id, step, config.train_tokens // config.batch_tokens)
        return original(self, config, step)

    module.TextSource.batch = batch


PATCHES = {
    "sparsedepth.run.execute": patch_execute,
    "sparsedepth.run.scratch": patch_scratch,
    "sparsedepth.train.checkpoint": patch_checkpoint,
    "sparsedepth.data.text": patch_text,
}


class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = execute_and_patch
        return spec


def patch_renames() -> None:
    replace, rename = os.replace, os.rename

    def replaced(source, target, **options):
        target = Path(target)
        if target.name == "complete":
            reached(target.parent.name, "before the complete marker")
        if target.name.startswith("step-") and target.suffix == ".safetensors":
            reached(target.parent.parent.name, "between write and rename")
        replace(source, target, **options)

    def renamed(source, target, **options):
        if Path(target).parent.name == "runs":
            reached(Path(target).name, "before the record is in its place")
        rename(source, target, **options)

    os.replace, os.rename = replaced, renamed


if {"SPARSEDEPTH_FAULTS", "SPARSEDEPTH_SLOW", "SPARSEDEPTH_PACE"} & {*os.environ}:
    while b"\0work\0" in Path("/proc/self/cmdline").read_bytes() and not may_hurry("start"):
        time.sleep(0.2)
    sys.meta_path.insert(0, AfterImport())
    patch_renames()
