"""What a run's process is given, and what is known of those that the kernel killed."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from sparsedepth.run import process
from sparsedepth.run.process import added_bytes, has_used_cuda, oom_kills, resident_bytes, thread_environment


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


@pytest.mark.parametrize(("code", "used"), [(0, True), (3, False), (34, False)])
def test_the_driver_itself_says_whether_it_is_in_use(monkeypatch, code, used):
    """cuDeviceGetCount is 3 before cuInit, and 34 in a library without a driver, whatever torch says."""
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: code)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: driver)
    assert has_used_cuda() is used


def test_without_a_driver_nothing_is_in_use(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(process.ctypes, "CDLL", missing)
    assert has_used_cuda() is False


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_added_memory_is_seen():
    before = resident_bytes()
    block = torch.ones(2**24)
    assert before and added_bytes(before) >= 4 * 2**24 * 0.9
    del block
    assert added_bytes(None) is None
