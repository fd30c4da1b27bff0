"""Steps that were timed on this machine (`sweep.calibrate`), by shape and number of workers, without torch.

A cache: ~/.cache/sparsedepth/timings/<machine>.json (XDG_CACHE_HOME where that is set)."""

import os
from pathlib import Path

from pydantic import TypeAdapter

from sparsedepth import files
from sparsedepth.plan.estimate import Timing
from sparsedepth.store.made_with import package_versions
from sparsedepth.sweep.machine import Machine, gpu_name


def timings_path(machine: Machine) -> Path:
    runtime = machine.runtime.model_dump(mode="json", exclude={"checkpoint_seconds"})
    device = device_name_of(machine)
    workers = machine.workers
    facts = {"device": device, "torch": package_versions()["torch"], "runtime": runtime, "workers": workers}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sparsedepth" / "timings" / f"{files.digest(facts)}.json"


def device_name_of(machine: Machine) -> str:
    """The GPU's name; or the processor's (Linux) and its number of cores."""
    if machine.gpus:
        return gpu_name(machine.gpus[0][0])
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
    return f"{model}, {os.cpu_count()} cores"


def known_timings(machine: Machine) -> dict[str, Timing]:
    """Cached timings of this machine; empty if the file is missing or damaged."""
    try:
        return TypeAdapter(dict[str, Timing]).validate_json(timings_path(machine).read_bytes())
    except (OSError, ValueError):
        return {}
