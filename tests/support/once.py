"""What takes long to compute and serves tests of several workers, computed once in a test run."""

import fcntl
import json
from collections.abc import Callable
from typing import Any

import pytest


def once(folders: pytest.TempPathFactory, name: str, compute: Callable[[], Any]) -> Any:
    """What `compute` gives, in plain values; by the first worker that asks, the others wait."""
    shared = folders.getbasetemp().parent if "popen-gw" in folders.getbasetemp().name else folders.getbasetemp()
    path = shared / f"{name}.json"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(compute()))
    return json.loads(path.read_text())
