"""A run's process: its name, thread limits, GPU, memory; and the count of processes killed for lack of memory."""

import ctypes
import os
import re
import sys
from pathlib import Path

_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Set the process name for `top` (15 characters, Linux): forked processes share their parent's command line."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def thread_environment(threads: int) -> dict[str, str]:
    """This process's environment with limited thread pools for a child: contending pools cost a factor of ten."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    limits["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)  # the default is one per core, in each run
    # Avoids fragmentation if runs share a GPU or shapes differ.
    limits["PYTORCH_ALLOC_CONF"] = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false"}


def has_used_cuda() -> bool:
    """Whether this process has initialised NVIDIA's driver, by torch or any other library: a fork of it could not use
    the GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0  # before cuInit it is an error, 3


def oom_kills(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """How many processes of this control group the kernel has killed to free memory (Linux); 0 if unknown."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return 0
    for _, controllers, group in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.oom_control" if controllers else "memory.events"
        base = root / "memory" if controllers else root
        for path in (base / group.strip("/") / name, base / name):  # a container may see its own group as the root
            try:
                count = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
            except OSError:
                continue
            if count:
                return int(count[1])
    return 0


def resident_bytes() -> dict[str, int] | None:
    """Memory of this process in bytes: 'RssAnon', 'RssFile', 'RssShmem', 'VmHWM' (their peak); None without Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: 1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")}


def added_bytes(before: dict[str, int] | None) -> int | None:
    """Peak anonymous memory of this process minus that of `before`. Pages of files (libraries, token shards) do not
    count, since the system can free them."""
    now = resident_bytes()
    if before is None or now is None:
        return None
    return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - before["RssAnon"])
