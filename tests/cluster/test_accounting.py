"""What sacct says of an array, summed over every start of its tasks."""

import pytest

from sparsedepth.cluster import slurm
from sparsedepth.cluster.slurm import Accounting


def test_each_start_of_a_task_is_counted(tmp_path, monkeypatch):
    """A task of an hour on 2 nodes with 16 cores in all; one preempted after half an hour, on one; one that waits."""
    program = tmp_path / "sacct"
    program.write_text("#!/bin/bash\nprintf '3600|2|16\\n1800|1|8\\n0|0|0\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert slurm.accounting("x") == Accounting(starts=2, node_hours=2.5, core_hours=20.0)
    program.write_text("#!/bin/bash\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    assert slurm.accounting("x") is None


def test_a_refusal_is_one_line(tmp_path, monkeypatch):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/bash\necho 'sbatch: error: invalid account' >&2; echo more >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ValueError, match=r"^sbatch: invalid account; more$"):
        slurm.submit("")
