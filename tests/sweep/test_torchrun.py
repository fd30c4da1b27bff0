"""A run on two processes, as a user starts it: the record of one process, and a lost process that stops no more."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.tiny_sweep import BASE, ENVIRONMENT, corpus

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def start(folder: Path, out: str, **fields) -> subprocess.Popen:
    """`sparsedepth train` under torchrun."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**BASE, "n_layers": 2, "corpus": str(corpus(folder)), **fields}))
    command = ["sparsedepth.cli.main", "train", str(file), "--out", str(folder / out), "--device", "cpu"]
    runtime = ["--runtime", "parallel=ddp", "--runtime", "checkpoint_seconds=0.2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*LAUNCH, *command, *runtime], env=ENVIRONMENT, start_new_session=True, **pipes)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


def processes_of(launcher: int) -> list[int]:
    """The ranks, in order of their process ids."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return sorted(int(child) for child in children.read_text().split())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_run_which_then_continues(tmp_path, lost):
    fields = {"train_tokens": 128 * 600}
    process = start(tmp_path, "out", **fields)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("out/work/*/checkpoints/*.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(processes_of(process.pid)[lost], signal.SIGKILL)
    since = time.monotonic()
    code, said = finish(process)
    assert code != 0 and time.monotonic() - since < 45
    assert "SIGKILL" in said and f"process {1 - lost} of 2 lost another process of this run" in said
    before = max(path.name for path in tmp_path.glob("out/work/*/checkpoints/*.json"))
    assert before >= "step-000000001.json" and not list(tmp_path.glob("out/runs/*"))
    code, said = finish(start(tmp_path, "out", **fields))
    assert code == 0, said
    [marker] = tmp_path.glob("out/runs/*/complete")
    manifest = json.loads((marker.parent / "manifest.json").read_text())
    assert (manifest["parallel"], manifest["processes"]) == ("ddp", 2)
    assert said.count("val_loss ") == 1  # one process speaks
