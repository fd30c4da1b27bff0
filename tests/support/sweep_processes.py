"""The processes of a sweep: find them by kind, wait for something, and look at what a sweep left behind."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from support import forked_commands

Kind = Literal["forkserver", "run", "launcher", "execute"]
"""A run is forked from the forkserver; over several processes it is torchrun's launcher, whose processes are
`execute`."""

OF = "SPARSEDEPTH_TEST_OF"
"""The variable by which the processes of a command are known: its arguments, a line for each."""


def kind_of(command: str, name: str) -> Kind | None:
    """What a process is, from its command line and the name it gave itself."""
    if name.startswith("run "):
        return "run"
    if name.strip() == forked_commands.FORKSERVER:
        return "forkserver"
    marks: dict[str, Kind] = {
        "torch.distributed.run": "launcher",
        "sparsedepth.run.execute": "execute",
        "multiprocessing.forkserver": "forkserver",
    }
    return next((kind for mark, kind in marks.items() if mark in command), None)


def processes(results: Path, *kinds: Kind) -> list[int]:
    """The living processes of a sweep, but not the command itself; every kind where none is given."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            kind = kind_of((entry / "cmdline").read_bytes().decode(), (entry / "comm").read_text())
            if kind is None or (kinds and kind not in kinds):
                continue
            given = forked_commands.started.get(os.readlink(entry / "cwd")) or _variable(entry)
        except (OSError, UnicodeDecodeError):
            continue
        if str(results) in given:
            found.append(int(entry.name))
    return found


def _variable(entry: Path) -> list[str]:
    """What the variable OF of a process says."""
    environment = (entry / "environ").read_bytes().decode().split("\0")
    return next((text for text in environment if text.startswith(f"{OF}=")), "").partition("=")[2].split("\n")


def until(condition: Callable[[], object], seconds: float = 300) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def all_ended(results: Path) -> None:
    """Nothing of a sweep is left running: its forkserver sees that the command has ended a moment later."""
    until(lambda: not processes(results), 30)


def markers(results: Path) -> dict[str, int]:
    """When each run was completed: a run that is repeated gets a new marker."""
    return {path.parent.name: path.stat().st_mtime_ns for path in results.glob("runs/*/complete")}


def phases(results: Path) -> set[str]:
    """What the runs last said of themselves."""
    found = set()
    for path in results.glob("work/*/progress.json"):
        found |= {phase for phase in ("training", "measuring", "writing") if f'"{phase}"' in path.read_text()}
    return found
