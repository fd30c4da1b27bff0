"""What the workers of one machine may use: GPUs in groups, threads shared out."""

import os
import re
from dataclasses import dataclass

import torch

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import DEFAULT, RuntimeConfig
from sparsedepth.run.allocation import allocation
from sparsedepth.train.runtime import find_device

STACK_ON_CPU, STACKED_VALUES = 4, 2**16
"""Where a stack pays on a CPU, and of how many runs: tokens of a step times width, up to which calls cost more than the
products and sums that a stack cannot save (`benchmarks/stack.py`; docs/sweeps.md has the numbers). A compiler saves
most of the calls by itself, and a compiled stack was slower than its runs one by one."""

STACK_ON_GPU = 8
"""Up to width 128, where a step waits for launches alone. Estimated: not measured on any GPU yet."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the workers may use. A worker runs one process at a time."""

    workers: int
    runtime: RuntimeConfig
    """of each run; its threads are cores // processes, since contending thread pools cost a factor of ten"""
    gpus: list[list[str]]
    """worker i sees gpus[i % len(gpus)] alone, as CUDA_VISIBLE_DEVICES names them; empty on a CPU"""
    processes_per_run: int = 1
    """on each node"""
    nodes: int = 1
    """of a cluster's allocation, that one run computes on"""
    max_attempts: int = 2

    def stack_of(self, config: RunConfig) -> int:
        """How many runs of this shape a process trains as one model."""
        if self.processes_per_run > 1 or config.n_experts or self.runtime.parallel != "none":
            return 1
        if self.runtime.stack != "auto":
            return self.runtime.stack
        if self.gpus:
            return STACK_ON_GPU if config.d_model <= 128 else 1
        pays = config.batch_tokens * config.d_model <= STACKED_VALUES and not self.runtime.compiles(
            config.n_steps, False
        )
        return STACK_ON_CPU if pays else 1

    @property
    def described(self) -> str:
        """The devices and workers in words, for one printed line."""
        where = "cpu" if not self.gpus else f"GPU {', '.join('+'.join(group) for group in self.gpus)}"
        each = f"{self.runtime.threads} threads each"
        processes = self.processes_per_run * self.nodes
        return f"{where} with {each}" + f" and {processes} processes a run" * (processes > 1)


def machine(
    workers: int | None,
    runtime: RuntimeConfig = DEFAULT,
    max_attempts: int = 2,
    gpus: list[int] | None = None,
    gpus_per_run: int = 1,
    nodes: int = 1,
) -> Machine:
    """The workers, GPUs and threads; by default one worker for each group of GPUs, or for each core, and one for
    several nodes.

    Raises ValueError for GPUs that are not there, or nodes that the allocation has not.
    """
    groups = _groups(_visible(runtime.device, gpus), gpus_per_run)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = allocation()
    if given:
        cores = min(cores, given.cpus)  # not every Slurm binds a task to its cores
    if nodes > 1 and (workers or 1) > 1:
        raise ValueError(f"--workers {workers} and --nodes {nodes}: a run on several nodes has them for itself")
    if nodes > (given.nodes if given else 1):
        raise ValueError(f"--nodes {nodes} needs a task of Slurm with as many; give `sparsedepth sweep --on slurm`")
    if nodes > 1:
        workers = 1
    if workers is None:
        workers = len(groups) or max(1, cores // gpus_per_run)
    if workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    changes = {
        "threads": runtime.threads or max(1, cores // (workers * gpus_per_run)),
        "device": "cuda" if groups else str(find_device(runtime.device)),
    }
    if gpus_per_run * nodes > 1 and runtime.parallel == "none":
        changes["parallel"] = "ddp"
    return Machine(
        workers=workers,
        runtime=runtime.model_copy(update=changes),
        gpus=groups,
        processes_per_run=gpus_per_run,
        nodes=nodes,
        max_attempts=max_attempts,
    )


def _visible(device: str, gpus: list[int] | None) -> list[str]:
    """The GPUs to use, in the terms of CUDA_VISIBLE_DEVICES, which may have narrowed them already."""
    if device == "cpu" or (device == "auto" and gpus is None and not torch.cuda.is_available()):
        return []
    count = torch.cuda.device_count()
    if gpus is None:
        chosen = find_device(device)
        gpus = [chosen.index] if chosen.index is not None else list(range(count))
    if missing := [index for index in gpus if index >= count]:
        raise ValueError(f"GPU {missing[0]} does not exist here: {count} CUDA devices; give --gpus that exist")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [names[index].strip() if len(names) == count and names[index] else str(index) for index in gpus]


def _groups(gpus: list[str], size: int) -> list[list[str]]:
    if gpus and len(gpus) < size:
        raise ValueError(f"--gpus-per-run {size} needs {size} GPUs at least; {len(gpus)} are given")
    return [gpus[start : start + size] for start in range(0, len(gpus) - size + 1, size)]


def parse_gpus(text: str) -> list[int]:
    """GPU numbers from a list of numbers and ranges, such as 0-3,6. Raises ValueError for anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f"--gpus {text!r} must be numbers and ranges, such as 0-3,6")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--gpus {text!r} must name each GPU once, such as 0-3,6")
    return numbers
