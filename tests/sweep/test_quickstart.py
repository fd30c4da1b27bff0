"""README's promise on the quickstart itself: killed half-way and started again, it ends with the committed numbers."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.tiny_sweep import sparsedepth, start, table

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_killed_half_way_it_ends_as_if_undisturbed(tmp_path):
    """Twice on one machine: another may round differently, and so short a training amplifies that."""
    arguments = ("sweep", ROOT / "sweeps" / "quickstart.yaml", "--out", tmp_path / "killed", "--workers", 2)
    driver = start(*arguments)
    while len(table(tmp_path / "killed")) < 8:
        assert driver.poll() is None
        time.sleep(1)
    half = table(tmp_path / "killed")
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    sparsedepth(*arguments)
    sparsedepth(*arguments[:2], "--out", tmp_path / "undisturbed", "--workers", 2)
    assert table(tmp_path / "killed") == table(tmp_path / "undisturbed")
    assert half.items() <= table(tmp_path / "killed").items()
