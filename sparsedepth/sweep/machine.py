"""Divide the GPUs and CPU threads of one machine among workers. Without torch where there is no GPU's driver."""

import contextlib
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import DEFAULT, RuntimeConfig
from sparsedepth.run.process import has_gpu_driver
from sparsedepth.run.scratch import allocation

STACK_ON_CPU, STACKED_VALUES = 4, 2**15
"""Runs per stack on a CPU, and the largest step (tokens x width) at which stacking pays: 12 layers of width 32 and 64
took .53 to .81 of the time, with twice as many values .85 to .96, where arithmetic dominates the calls that a stack
saves (`benchmarks/stack.py`). A compiler saves most calls itself; a compiled stack was slower than its runs."""

STACK_ON_GPU = 8
"""Up to width 128, where kernel launches limit a step; their process times whether they train together
(`run.step_choice`). An estimate: not measured on any GPU yet."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Resources of the workers. A worker runs one process at a time."""

    workers: int
    runtime: RuntimeConfig
    """of each run; its threads are cores // processes, since contending thread pools cost a factor of ten"""
    gpus: list[list[str]]
    """CUDA_VISIBLE_DEVICES of worker i is gpus[i % len(gpus)]; empty on a CPU"""
    processes_per_run: int = 1
    """on each node"""
    nodes: int = 1
    max_attempts: int = 2

    def stack_size(self, config: RunConfig) -> int:
        """How many runs of this shape a process trains as one model."""
        if self.processes_per_run > 1 or not self.runtime.can_stack:
            return 1
        if self.runtime.stack != "auto":
            return self.runtime.stack
        if self.gpus:
            return STACK_ON_GPU if config.d_model <= 128 else 1
        is_small = config.batch_tokens * config.d_model <= STACKED_VALUES
        return STACK_ON_CPU if is_small and not self.runtime.compiles(config.n_steps, False) else 1


def machine(
    workers: int | None,
    runtime: RuntimeConfig = DEFAULT,
    max_attempts: int = 2,
    gpus: list[int] | None = None,
    gpus_per_run: int = 1,
    nodes: int = 1,
) -> Machine:
    """The workers, GPUs and threads. `workers`: on each group of GPUs, or of the CPU; default one per group, or per
    OMP_NUM_THREADS cores (with which a user asks for fewer workers of more threads); one for Apple's GPU and for
    several nodes. Raises ValueError for GPUs that do not exist, or more nodes than the Slurm task has."""
    groups = _gpu_groups(runtime.device, gpus, gpus_per_run)
    device = "cuda" if groups else "cpu"
    if not groups and runtime.device not in ("auto", "cpu"):
        from sparsedepth.train.runtime import find_device

        device = str(find_device(runtime.device))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if task := allocation():
        cores = min(cores, task.cpus)  # not every Slurm binds a task to its cores
    if nodes > 1 and (workers or 1) > 1:
        raise ValueError(f"--workers {workers} with --nodes {nodes}: a run on several nodes needs --workers 1")
    if nodes > (task.nodes if task else 1):
        raise ValueError(f"--nodes {nodes} needs a Slurm task with {nodes} nodes; use `sparsedepth sweep --on slurm`")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    if nodes > 1:
        n_workers = 1
    elif groups:
        n_workers = (workers or 1) * len(groups)
    else:
        n_workers = workers or (1 if device == "mps" else max(1, cores // (gpus_per_run * _threads_asked(runtime, 1))))
    share = max(1, cores // (n_workers * gpus_per_run))
    changes = {"threads": runtime.threads or min(_threads_asked(runtime, cores), share), "device": device}
    if gpus_per_run * nodes > 1 and runtime.parallel == "none":
        changes["parallel"] = "ddp"
    runtime = runtime.model_copy(update=changes)
    return Machine(
        workers=n_workers,
        runtime=runtime,
        gpus=groups,
        processes_per_run=gpus_per_run,
        nodes=nodes,
        max_attempts=max_attempts,
    )


def _threads_asked(runtime: RuntimeConfig, default: int) -> int:
    """Threads of a run on a CPU, by default as many as OMP_NUM_THREADS says."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return runtime.threads or (max(1, int(asked)) if asked.isdecimal() else default)


def cuda_devices() -> int:
    """How many GPUs torch can use, which takes seconds to import: without a driver it is not asked."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu_groups(device: str, gpus: list[int] | None, gpus_per_run: int) -> list[list[str]]:
    """The GPUs to use, as entries of CUDA_VISIBLE_DEVICES, in groups of `gpus_per_run`."""
    if device == "cpu" and gpus is not None:
        raise ValueError("--gpus names GPUs, and --device cpu uses none; leave one of them out")
    count = cuda_devices() if device[:4] in ("auto", "cuda") else 0
    if gpus is None and not count:
        return []
    if gpus is None:
        from sparsedepth.train.runtime import find_device

        index = find_device(device).index
        gpus = [index] if index is not None else list(range(count))
    if missing := [index for index in gpus if index >= count]:
        fix = "choose others with --gpus" if count else "leave out --gpus"
        raise ValueError(f"GPU {missing[0]} does not exist: there are {count} CUDA devices; {fix}")
    if 0 < len(gpus) < gpus_per_run:
        raise ValueError(f"--gpus-per-run {gpus_per_run} needs at least {gpus_per_run} GPUs, not {len(gpus)}")
    # There may be more names than devices: CUDA sees one MIG instance per process, and stops at an unknown name.
    names = dict(enumerate(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))
    visible = [names.get(index, str(index)).strip() for index in gpus]
    starts = range(0, len(visible) - gpus_per_run + 1, gpus_per_run)
    return [visible[start : start + gpus_per_run] for start in starts]


@functools.cache
def gpu_name(gpu: str) -> str:
    """The name of a GPU by its entry in CUDA_VISIBLE_DEVICES, without initialising CUDA here: that takes seconds and
    half a gigabyte of the GPU. By nvidia-smi, or by a process of its own where that is missing or does not know it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", gpu]
    ask_torch = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.get_device_name())"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    for command in (query, ask_torch):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
            return done.stdout.strip().splitlines()[-1]
    return "cuda"


def parse_gpus(text: str) -> list[int]:
    """'0-3,6' -> [0, 1, 2, 3, 6]. Raises ValueError."""
    numbers = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f"--gpus {text!r} must be numbers and ranges, such as 0-3,6")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--gpus {text!r} must name each GPU once, such as 0-3,6")
    return numbers
