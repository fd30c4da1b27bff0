"""Provenance of a run: code, packages, device, kernels, data. No environment variable or host name is recorded."""

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
from sparsedepth.quantities.measured import PLUGINS
from sparsedepth.run.allocation import node_hours
from sparsedepth.run.process import added_bytes
from sparsedepth.run.scratch import Scratch
from sparsedepth.train.runtime import Runtime

PACKAGES = ("torch", "numpy", "transformers", "datasets", "tokenizers", "safetensors", "optuna", "pyarrow")


@functools.cache
def code_version() -> dict[str, Any]:
    """The release and, in a checkout, the commit; `changed` is true with uncommitted changes."""
    facts: dict[str, Any] = {"version": sparsedepth.__version__, "commit": None, "changed": None}
    root = Path(sparsedepth.__file__).parent.parent
    if (root / ".git").exists():
        facts["commit"] = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", "sparsedepth")
        facts["changed"] = None if changes is None else bool(changes)
    return facts


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def manifest_allocations(scratch: Scratch) -> dict[str, Any]:
    """The Slurm tasks that computed the run, one per start, without node names, and their node hours; empty if none."""
    starts = scratch.allocations()
    if not starts:
        return {}
    tasks = [{key: value for key, value in asdict(start).items() if key != "node"} for start in starts]
    return {"node_hours": node_hours(starts), "allocations": tasks}


@functools.cache
def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a result; None if not installed."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


class Stopwatch:
    """Start time and duration, including the time of earlier processes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.began, self.earlier_seconds = clock, clock(), 0.0
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def seconds(self) -> float:
        return round(self.earlier_seconds + self.clock() - self.began, 3)

    def facts(self) -> dict[str, Any]:
        return {"started": self.started, "seconds": self.seconds()}


def provenance(run_id: str, data_hash: str) -> dict[str, Any]:
    """The run of a record, and the code, command, data and packages that produced it."""
    return {
        "run_id": run_id,
        "code": code_version(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "data_hash": data_hash,
        "packages": package_versions(),
        **({"plugins": {plugin.name: plugin.code for plugin in PLUGINS}} if PLUGINS else {}),
    }


def device_facts(runtime: Runtime, before: dict[str, int] | None = None) -> dict[str, Any]:
    """The device, its settings and peak memory: on a GPU as allocated by PyTorch; on a CPU (Linux) the anonymous memory
    added since `before`, an earlier `resident_bytes`."""
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
