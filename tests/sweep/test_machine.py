"""What workers may use: GPUs in groups, threads shared out."""

import os

import pytest
import torch

from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.sweep import machine as module
from sparsedepth.sweep.machine import machine, parse_gpus
from sparsedepth.sweep.timings import device_name_of


@pytest.mark.parametrize(
    ("text", "expected"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2", [0, 2]), ("6, 0-1", [6, 0, 1])]
)
def test_gpus_are_numbers_and_ranges(text, expected):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "0,0", "0-2,1", "3-1", "0,3-1", "-1", "0;1"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="--gpus"):
        parse_gpus(text)


def test_gpus_of_a_sweep_on_the_cpu_are_refused():
    with pytest.raises(ValueError, match="--gpus names GPUs, and --device cpu uses none"):
        machine(None, RuntimeConfig(device="cpu"), gpus=[0])


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr(module, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_worker_for_each_group_of_gpus(eight_gpus):
    assert machine(None).gpus == [[str(index)] for index in range(8)]
    two = machine(None, gpus=[0, 1, 2, 5, 7], gpus_per_run=2)
    assert two.gpus == [["0", "1"], ["2", "5"]] and two.workers == 2
    assert two.runtime.parallel == "ddp" and two.runtime.device == "cuda"
    shared = machine(3, gpus=[5])
    assert (shared.workers, shared.gpus) == (3, [["5"]])  # three runs beside each other on one GPU
    assert machine(3, gpus=[0, 1, 2, 3], gpus_per_run=2).workers == 6
    assert machine(None, RuntimeConfig(device="cuda:3")).gpus == [["3"]]
    assert machine(None, RuntimeConfig(parallel="fsdp"), gpus_per_run=8).runtime.parallel == "fsdp"
    with pytest.raises(ValueError, match="--gpus-per-run 4 needs at least 4 GPUs, not 3"):
        machine(None, gpus=[0, 1, 2], gpus_per_run=4)


def test_gpus_count_among_those_that_are_visible(eight_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc")
    assert machine(None, gpus=[1]).gpus == [["GPU-abc"]]
    with pytest.raises(ValueError, match="GPU 4 does not exist: there are 2 CUDA devices"):
        machine(None, gpus=[4])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="there are 0 CUDA devices; leave out --gpus"):
        machine(None, gpus=[0])


@pytest.mark.parametrize("visible", ["MIG-1a,MIG-2b", "MIG-1a"])
def test_the_mig_instance_that_cuda_sees_is_named(eight_gpus, monkeypatch, visible):
    """CUDA sees the first of them alone; instance 0 of the GPU may be another job's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine(3).gpus == [["MIG-1a"]]


def test_threads_are_shared_out_on_a_cpu(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu = RuntimeConfig(device="cpu")
    assert machine(None, cpu).workers == 8 and machine(None, cpu).runtime.threads == 1
    assert machine(2, cpu).runtime.threads == 4 and machine(2, cpu).gpus == []
    pairs = machine(None, cpu, gpus_per_run=2)
    assert (pairs.workers, pairs.runtime.threads, pairs.processes_per_run) == (4, 1, 2)
    with pytest.raises(ValueError, match="--workers 0"):
        machine(0, cpu)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine(2, cpu).runtime.threads == 3 and machine(4, cpu).runtime.threads == 2
    assert machine(2, RuntimeConfig(device="cpu", threads=6)).runtime.threads == 6
    assert machine(None, RuntimeConfig(device="cpu", threads=2)).workers == 4
    for asked, expected in (("", (8, 1)), ("4", (2, 4)), ("16", (1, 8)), ("1,2", (8, 1))):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        found = machine(None, cpu)
        assert (found.workers, found.runtime.threads) == expected


@pytest.fixture
def no_cuda_here(monkeypatch):
    """Whatever would initialise CUDA in this process fails."""

    def refuse(*arguments):
        raise AssertionError("CUDA is initialised")

    for name in ("get_device_name", "get_device_properties", "current_device", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    module.gpu_name.cache_clear()
    yield
    module.gpu_name.cache_clear()


def test_a_gpus_name_is_known_without_using_it(no_cuda_here, eight_gpus, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H200 of %s\\n' \"$4\"\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert device_name_of(machine(None, gpus=[3])) == "NVIDIA H200 of 3"


def test_without_nvidia_smi_a_process_of_its_own_asks_torch(no_cuda_here, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    asking = tmp_path / "python"
    asking.write_text('#!/bin/sh\necho "NVIDIA A100 for $CUDA_VISIBLE_DEVICES"\n')
    asking.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(asking))
    assert module.gpu_name("MIG-1a") == "NVIDIA A100 for MIG-1a"
    asking.write_text("#!/bin/sh\nexit 1\n")
    assert module.gpu_name("0") == "cuda"


def test_a_slurm_task_has_the_cores_that_it_was_given(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine(None, RuntimeConfig(device="cpu")).workers == 8
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert machine(None, RuntimeConfig(device="cpu")).workers == 3
