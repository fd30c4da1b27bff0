"""What a run's process is given, the signals that ask it to stop, its end with its parent, and what is known of those
that the kernel killed."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sparsedepth.run import process
from sparsedepth.run.process import INTERRUPTED, Stop, anonymous_bytes, has_used_cuda, oom_kills, thread_environment


def test_thread_pools_are_limited():
    environment = thread_environment(3)
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "3"
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "3" and environment["PYTORCH_ALLOC_CONF"]
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("groups", "place"),
    [
        ("0::/user.slice/job", "user.slice/job/memory.events"),  # version 2
        ("0::/docker/0123", "memory.events"),  # in a container, which sees its own group as the root
        ("3:cpu:/\n2:memory:/job\n0::/", "memory/job/memory.oom_control"),  # version 1
    ],
)
def test_the_kernels_kills_for_memory_are_counted(tmp_path, groups, place):
    (tmp_path / "groups").write_text(groups)
    assert oom_kills(tmp_path / "fs", tmp_path / "groups") == 0
    path = tmp_path / "fs" / place
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 5\noom_kill 3\n")
    assert oom_kills(tmp_path / "fs", tmp_path / "groups") == 3


@pytest.mark.parametrize(("code", "used"), [(0, True), (3, False), (34, False), (None, False)])
def test_the_driver_itself_says_whether_it_is_in_use(monkeypatch, code, used):
    """cuDeviceGetCount is 3 before cuInit, and 34 in a library without a driver; nothing is used without one."""

    def driver(name):
        if code is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuDeviceGetCount=lambda count: code)

    monkeypatch.setattr(process.ctypes, "CDLL", driver)
    assert has_used_cuda() is used


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_added_memory_is_seen():
    before = anonymous_bytes()
    block = torch.ones(2**24)
    assert before and anonymous_bytes()[1] - before[0] >= 4 * 2**24 * 0.9
    del block


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def stop():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield Stop().catch()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_asks_once_and_gives_the_exit_code(stop, number):
    assert not stop()
    os.kill(os.getpid(), number)
    assert stop() and stop.exit_code == 128 + number
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 128 + number, "the first signal counts"


CHILD = """
import os, sys, time
from sparsedepth.run.process import end_with_parent
end_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_child_ends_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.kill()
    parent.communicate(timeout=300)  # which returns when the child, too, has let go of the pipe


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_child_whose_parent_is_gone_already_ends_at_once():
    code = "from sparsedepth.run.process import end_with_parent; end_with_parent(1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == INTERRUPTED
