"""How a run was made: code, packages, device, kernels, data. No environment variable and no host name is recorded."""

import functools
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import sparsedepth
from sparsedepth.run.allocation import node_hours
from sparsedepth.run.resident_memory import added_bytes
from sparsedepth.run.scratch import Scratch
from sparsedepth.train.runtime import Runtime

PACKAGES = ("torch", "numpy", "transformers", "datasets", "tokenizers", "safetensors", "optuna", "pyarrow")


@functools.cache
def code_version() -> dict[str, Any]:
    """The release, and the commit where the code runs from a checkout; `changed` is true with uncommitted changes."""
    facts: dict[str, Any] = {"version": sparsedepth.__version__, "commit": None, "changed": None}
    root = Path(sparsedepth.__file__).parent.parent
    if (root / ".git").exists():
        facts["commit"] = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", "sparsedepth")
        facts["changed"] = None if changes is None else bool(changes)
    return facts


def _git(root: Path, *words: str) -> str | None:
    try:
        git = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return git.stdout.strip()


def manifest_allocations(scratch: Scratch) -> dict[str, Any]:
    """The tasks of a cluster that have computed the run, one for each start, and their node hours; empty where there
    was none. No node is named."""
    starts = scratch.allocations()
    if not starts:
        return {}
    named = [{key: value for key, value in asdict(start).items() if key != "node"} for start in starts]
    return {"node_hours": node_hours(starts), "allocations": named}


@functools.cache
def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a number; None where one is absent."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


class Stopwatch:
    """When something started, and how long it has taken by a clock, what earlier processes took included."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.began, self.earlier_seconds = clock, clock(), 0.0
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def seconds(self) -> float:
        return round(self.earlier_seconds + self.clock() - self.began, 3)

    def facts(self) -> dict[str, Any]:
        return {"started": self.started, "seconds": self.seconds()}


def provenance(run_id: str, data_hash: str) -> dict[str, Any]:
    """What a record is of, and what made it."""
    return {
        "run_id": run_id,
        "code": code_version(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "data_hash": data_hash,
        "packages": package_versions(),
    }


def device_facts(runtime: Runtime, before: dict[str, int] | None = None) -> dict[str, Any]:
    """The device's name, what was chosen on it, and the peak of memory: on a GPU the most that PyTorch allocated; on a
    CPU, where `resident_bytes` said `before` (Linux), the anonymous memory that the process added since."""
    on_gpu = runtime.device.type == "cuda"
    name = torch.cuda.get_device_name(runtime.device) if on_gpu else platform.processor() or platform.machine()
    return {
        "device": f"{runtime.device.type} ({name})",
        "precision": runtime.precision,
        "threads": runtime.threads,
        "compiled": runtime.compile,
        "cuda_graph": runtime.cuda_graph,
        "parallel": runtime.parallel,
        "micro_batch": runtime.micro_batch,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(runtime.device) if on_gpu else added_bytes(before),
    }
