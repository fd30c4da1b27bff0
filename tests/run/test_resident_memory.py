"""The memory that a process had at its peak."""

import sys

import pytest
import torch

from sparsedepth.run.resident_memory import added_bytes, resident_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_added_memory_is_seen():
    before = resident_bytes()
    block = torch.ones(2**24)
    assert before and added_bytes(before) >= 4 * 2**24 * 0.9
    del block
    assert added_bytes(None) is None
