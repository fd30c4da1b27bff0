"""Locks that fall with their process, beat while it lives, and can be taken from the silent."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.sweep_processes import until

from sparsedepth.run import lease
from sparsedepth.run.lease import Stopped, hold, is_held

HOLDER = """
import sys, time, pathlib
from sparsedepth.run.lease import hold
with hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "GRACE_SECONDS", 0.3)


class OnlookersClock:
    """Goes on in sleep alone, and there with the holder's beats, so that no pause of the machine looks like silence."""

    def __init__(self, beat: Callable[[], object]):
        self.now, self.beat = 0.0, beat
        self.time = lambda: time.time()  # as it is patched

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.beat()
        self.now += seconds


@pytest.fixture
def clock(tmp_path, monkeypatch, impatient):
    """The clock of whoever looks at tmp_path / lock, which is held by this process."""
    path = tmp_path / "lock"

    def beat() -> None:
        before = lease.last_heartbeat(path)
        until(lambda: lease.last_heartbeat(path) != before or not is_held(path))

    clock = OnlookersClock(beat)
    monkeypatch.setattr(lease, "time", clock)
    return clock


@pytest.fixture
def holder(tmp_path):
    """A process that holds tmp_path / lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "lock"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_owned_while_it_is_held(tmp_path):
    path = tmp_path / "new" / "lock"
    assert not is_held(path)
    with hold(path) as held:
        assert is_held(path) and held.is_valid() and not held.lost
        path.chmod(0o400)
        assert is_held(path), "looking needs no permission to write"
    assert not is_held(path) and path.read_text() == ""


def test_the_second_waits_for_the_first_however_long_that_beats(tmp_path, clock):
    path, order = tmp_path / "lock", []

    def second() -> None:
        with hold(path):
            order.append("second")

    with hold(path):
        thread = threading.Thread(target=second)
        thread.start()
        until(lambda: order or clock.now > 3 * lease.GRACE_SECONDS)
        order.append("first ends")
    thread.join()
    assert order == ["first ends", "second"]


def test_it_falls_at_once_with_a_killed_process(tmp_path, holder, monkeypatch):
    assert is_held(tmp_path / "lock")
    holder.kill()
    holder.wait()
    assert not is_held(tmp_path / "lock")
    monkeypatch.setattr(lease, "time", OnlookersClock(lambda: pytest.fail("it was waited for")))
    with hold(tmp_path / "lock"):
        pass


def test_it_is_taken_from_a_stopped_process_which_then_knows(tmp_path, holder, impatient):
    path = tmp_path / "lock"
    handle = os.open(path, os.O_RDONLY)
    os.kill(holder.pid, signal.SIGSTOP)
    with hold(path) as held:
        assert held.is_valid() and is_held(path)
        assert not os.path.samestat(os.fstat(handle), path.stat()), "the old holder's file is still in place"
        os.kill(holder.pid, signal.SIGCONT)
        time.sleep(0.1)
        assert held.is_valid()
    os.close(handle)


def test_a_taken_lock_is_held_by_optimised_python_too(tmp_path):
    """`python -O` leaves out assertions, and whatever they would do."""
    code = "import pathlib, sys; from sparsedepth.run import lease; path = pathlib.Path(sys.argv[1])"
    code += "; handle = lease._take_over(path); print(lease.is_held(path))"
    run = [sys.executable, "-O", "-c", code, tmp_path / "lock"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "True\n"


def test_whoever_lost_it_is_told(tmp_path, impatient):
    path = tmp_path / "lock"
    with hold(path) as held:
        os.close(lease._take_over(path))
        assert not held.is_valid()
        until(lambda: held.lost)


def test_the_heartbeat_that_finds_the_lease_taken_says_so_and_touches_no_more(tmp_path):
    """Two beats by hand: the first of a lease that is its own, the second after another process took it over."""
    path = tmp_path / "lock"
    path.touch()
    handle, lost_at = os.open(path, os.O_RDWR), []

    class ByHand(lease.Lease):
        def __init__(self):
            self.path, self._handle, self.lost, beats = path, handle, False, iter(range(3))

            def wait(seconds: float) -> bool:
                if (beat := next(beats)) == 1:
                    os.close(lease._take_over(path))
                    os.utime(path, (5, 5))
                lost_at.append(self.lost)
                return beat == 2

            self._released = SimpleNamespace(wait=wait)

    held = ByHand()
    os.utime(path, (1, 1))
    held._beat()
    assert held.lost and lost_at == [False, False]
    assert os.fstat(handle).st_mtime > 5 == path.stat().st_mtime
    os.close(handle)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_beats_on_after_an_error_of_the_disk(tmp_path, impatient, monkeypatch):
    beats, utime = [], os.utime

    def stale_at_first(handle):
        beats.append(handle)
        if len(beats) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        utime(handle)

    monkeypatch.setattr(lease.os, "utime", stale_at_first)
    with hold(tmp_path / "lock") as held:
        until(lambda: len(beats) >= 3, 5)
        assert not held.lost


def test_another_kernels_holder_is_judged_by_its_beat(tmp_path, monkeypatch):
    """Its flock may not be seen here."""
    path = tmp_path / "lock"
    path.write_text("another-kernel")
    assert is_held(path)
    clock = OnlookersClock(lambda: os.utime(path, (clock.now, clock.now)))
    monkeypatch.setattr(lease, "time", clock)
    with pytest.raises(Stopped), hold(path, lambda: clock.now > 3 * lease.GRACE_SECONDS):
        pytest.fail("taken from a living holder")
    clock.beat = lambda: None
    with hold(path):
        assert path.read_text() == lease.boot_id()


def test_the_dead_holders_of_a_stack_are_waited_for_at_once(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_text("another-kernel")
    clock = OnlookersClock(lambda: None)
    monkeypatch.setattr(lease, "time", clock)
    for path, beat in [(path, lease.HeartbeatMonitor(path)) for path in paths]:
        with hold(path, heartbeat=beat):
            assert lease.GRACE_SECONDS < clock.now < 1.1 * lease.GRACE_SECONDS


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_jumps_takes_no_lease_and_frees_none(tmp_path, monkeypatch, clock, jump):
    """The wall clock of the holder's beats and of whoever looks: flock decides, and whether the beat moves."""
    path = tmp_path / "lock"
    now, touch = time.time, os.utime
    with hold(path) as held:
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        monkeypatch.setattr(os, "utime", lambda handle: touch(handle, (now() + jump, now() + jump)))
        with pytest.raises(Stopped), hold(path, lambda: clock.now > 3 * lease.GRACE_SECONDS):
            pass
        assert held.is_valid() and not held.lost and is_held(path)
    assert not is_held(path)
