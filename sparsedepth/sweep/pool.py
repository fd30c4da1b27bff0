"""The workers of one machine: what each may use, and starting, watching, replacing and stopping them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sparsedepth.config.runtime import DEFAULT, RuntimeConfig
from sparsedepth.run import lease
from sparsedepth.run.process import INTERRUPTED, thread_environment
from sparsedepth.sweep import study as queue
from sparsedepth.train.runtime import find_device

MAX_DEATHS = 5
"""How often each worker may die (not: be stopped) with no run completed in between, on average; it is replaced."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the workers may use."""

    workers: int
    runtime: RuntimeConfig
    """of each run; its threads are cores // processes, since contending thread pools cost a factor of ten"""
    gpus: list[list[str]]
    """worker i sees gpus[i % len(gpus)] alone, as CUDA_VISIBLE_DEVICES names them; empty on a CPU"""
    processes_per_run: int = 1
    max_attempts: int = 2

    @property
    def described(self) -> str:
        """Where the runs are computed, for a line of print."""
        where = "cpu" if not self.gpus else f"GPU {', '.join('+'.join(group) for group in self.gpus)}"
        each = f"{self.runtime.threads} threads each"
        return f"{where} with {each}" + f" and {self.processes_per_run} processes a run" * (self.processes_per_run > 1)


def machine(
    workers: int | None,
    runtime: RuntimeConfig = DEFAULT,
    max_attempts: int = 2,
    gpus: list[int] | None = None,
    gpus_per_run: int = 1,
) -> Machine:
    """The workers, GPUs and threads; by default one worker for each group of GPUs, or for each core.

    Raises ValueError for GPUs that are not there.
    """
    groups = _groups(_visible(runtime.device, gpus), gpus_per_run)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        workers = len(groups) or max(1, cores // gpus_per_run)
    if workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    changes = {
        "threads": runtime.threads or max(1, cores // (workers * gpus_per_run)),
        "device": "cuda" if groups else str(find_device(runtime.device)),
    }
    if gpus_per_run > 1 and runtime.parallel == "none":
        changes["parallel"] = "ddp"
    return Machine(
        workers=workers,
        runtime=runtime.model_copy(update=changes),
        gpus=groups,
        processes_per_run=gpus_per_run,
        max_attempts=max_attempts,
    )


def _visible(device: str, gpus: list[int] | None) -> list[str]:
    """The GPUs to use, in the terms of CUDA_VISIBLE_DEVICES, which may have narrowed them already."""
    if device == "cpu" or (device == "auto" and gpus is None and not torch.cuda.is_available()):
        return []
    count = torch.cuda.device_count()
    if gpus is None:
        found = find_device(device)
        gpus = [found.index] if found.index is not None else list(range(count))
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
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None:
            raise ValueError(f"--gpus {text!r} must be numbers and ranges, such as 0-3,6")
        first, last = int(match[1]), int(match[2] or match[1])
        found += range(first, last + 1)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"--gpus {text!r} must name each GPU once, such as 0-3,6")
    return found


@dataclass
class _Member:
    process: subprocess.Popen
    lease: Path
    beat: int | None = None
    seen: float = field(default_factory=time.monotonic)

    def is_silent(self) -> bool:
        """Whether it has held its lease without a beat for the grace period: it is stopped, or hangs."""
        try:
            beat = self.lease.stat().st_mtime_ns
        except OSError:  # it is starting, or ending
            beat = None
        if beat is None or beat != self.beat:
            self.beat, self.seen = beat, time.monotonic()
        return time.monotonic() - self.seen > lease.GRACE_SECONDS


@dataclass
class Pool:
    """The running workers of this machine."""

    results: Path
    storage: str
    machine: Machine
    next_number: int = 0
    """of the next worker: no two workers of a study should share one, since it seeds their samplers"""
    deaths: int = 0
    """since the last run that was completed"""
    asked: bool = False
    members: list[_Member] = field(default_factory=list)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()  # whoever is left, when something went wrong

    def fill(self, waiting: int) -> None:
        """Start a worker for each waiting item, up to what the machine has."""
        if not self.asked and not self.has_failed:
            for _ in range(min(waiting, self.machine.workers - len(self.members))):
                self._start()

    @property
    def has_failed(self) -> bool:
        """Whether too many workers have died."""
        return self.deaths >= MAX_DEATHS * self.machine.workers

    def _start(self) -> None:
        machine, number = self.machine, self.next_number
        self.next_number += 1
        lease = uuid.uuid4().hex
        command = [sys.executable, "-m", "sparsedepth.sweep.worker", str(self.results), str(number)]
        command += ["--runtime", machine.runtime.model_dump_json(), "--max-attempts", str(machine.max_attempts)]
        command += ["--processes-per-run", str(machine.processes_per_run)]
        command += ["--lease", lease, "--parent", str(os.getpid())]
        environment = thread_environment(machine.runtime.threads or 1)
        if machine.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(machine.gpus[number % len(machine.gpus)])
        log = self.results / "work" / f"worker-{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            # A session of its own: Ctrl-C reaches the driver alone, which then asks the workers in order.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=environment
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its log says why it died
            pipe.write(f"{self.storage}\n".encode())
        self.members.append(_Member(process, queue.lease_path(self.results, lease)))

    def stop(self) -> None:
        """Ask every worker to stop at a checkpoint."""
        self.asked = True
        for member in self.members:
            member.process.send_signal(signal.SIGTERM)

    def reap(self) -> int:
        """Forget the workers that have ended, kill those that are silent. Returns how many died unasked."""
        died = 0
        for member in list(self.members):
            if member.is_silent() and not self.asked:
                os.killpg(member.process.pid, signal.SIGKILL)  # with its run; what it would write is made again
                member.process.wait()
            code = member.process.poll()
            if code is None:
                continue
            self.members.remove(member)
            member.lease.unlink(missing_ok=True)
            if code not in (0, INTERRUPTED) and not self.asked:
                died += 1
        self.deaths += died
        return died
