"""Signals that ask for a stop, and processes that end with their parent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sparsedepth.run.signals import INTERRUPTED, Stop

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def stop():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = Stop()
    caught.catch()
    yield caught
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_asks_once_and_gives_the_exit_code(stop, number):
    assert not stop()
    os.kill(os.getpid(), number)
    assert stop() and stop.exit_code == 128 + number
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 128 + number, "the first signal counts"


def test_a_second_ctrl_c_does_not_wait(stop):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


CHILD = """
import os, sys, time
from sparsedepth.run.signals import end_with_parent
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
    code = "from sparsedepth.run.signals import end_with_parent; end_with_parent(1 << 22)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == INTERRUPTED
