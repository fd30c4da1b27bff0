"""The child that parses foreign formats: what it yields comes back, and over each limit it ends soon, with one line."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sparsedepth import outside


def test_what_is_read_comes_back_and_the_folder_goes():
    def work():
        Path(os.environ["TMPDIR"], "copy").write_bytes(b"x")
        yield from (os.environ["TMPDIR"].encode(), tempfile.gettempdir().encode(), b"", bytes(10**6))

    place, temporary, *rest = outside.in_child(work, "t.csv")
    assert place == temporary and rest == [b"", bytes(10**6)] and not Path(place.decode()).exists()
    assert "TMPDIR" not in os.environ or os.environ["TMPDIR"] != place.decode()


def endless_memory():
    kept = []
    while True:
        kept.append(b"x" * 10**6 + bytes(len(kept)))
    yield


def endless_file():
    with open(Path(os.environ["TMPDIR"], "view"), "wb") as file:
        while True:
            file.write(bytes(10**6))
    yield


def endless_folder():
    for number in range(10**6):
        Path(os.environ["TMPDIR"], f"{number}").write_bytes(bytes(10**6))
    yield


def endless_answer():
    while True:
        yield bytes(10**6)


def a_pipe_that_nobody_writes():
    os.mkfifo(Path(os.environ["TMPDIR"], "pipe"))
    yield Path(os.environ["TMPDIR"], "pipe").read_bytes()


def deep():
    def call():
        return call()

    yield call()


def ends():
    sys.exit(0)
    yield


def killed():
    os.kill(os.getpid(), signal.SIGKILL)
    yield


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (endless_memory, "it needs more than 40 MB of memory"),
        (endless_file, "File too large|fills the disk"),
        (endless_folder, "it fills the disk with more than 40 MB"),
        (endless_answer, "it has more than 40 MB"),
        (a_pipe_that_nobody_writes, "nothing of it came for 0.3 s; --deadline gives it more"),
        (deep, "RecursionError"),
        (ends, "SystemExit: 0"),
        (killed, "its reader was ended by the system"),
        (lambda: [bytes(10**12)], "MemoryError"),
    ],
)
def test_every_denial_ends_soon_in_one_line(work, told, monkeypatch):
    for name in ("MEMORY", "DISK", "ANSWER"):
        monkeypatch.setattr(outside, name, 40_000_000)
    before, start = set(os.listdir(tempfile.gettempdir())), time.monotonic()
    with pytest.raises(ValueError, match=f"^t.csv cannot be read: .*({told})") as error:
        outside.in_child(work, "t.csv", 0.3 if work is a_pipe_that_nobody_writes else 60)
    assert "\n" not in str(error.value) and time.monotonic() - start < 30
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("sparsedepth-")]


def test_progress_is_waited_for_and_errors_of_users_pass_as_they_are():
    def slow():
        for _ in range(4):
            time.sleep(0.25)
            yield b"x"
        raise ValueError("row 3 holds no number")

    with pytest.raises(ValueError, match=r"^row 3 holds no number$"):
        outside.in_child(slow, "t.csv", 0.9)


@pytest.mark.skipif(sys.platform != "linux", reason="a child that ends with its parent")
def test_the_child_ends_with_its_parent(tmp_path):
    code = f"""
import os, time
from sparsedepth.outside import in_child
def work():
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(60)
    yield
in_child(work, "x")
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    file, deadline = tmp_path / "pid", time.monotonic() + 30
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    stat = Path(f"/proc/{file.read_text()}/stat")
    while stat.exists() and not re.search(r"\) Z", stat.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() < deadline
