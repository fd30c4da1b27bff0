"""Atomic writes and digests."""

import errno
import hashlib
import json
import os
import threading
import time

import pytest

from sparsedepth import files


def test_write_replaces_whole_files_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"x": 1})
    files.write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, step, error):
    """A file system may fill while a file is flushed, or at the rename itself, which needs room for a name; and Ctrl-C
    may come at any time."""
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def fail(*_):
        raise error

    monkeypatch.setattr(step, fail)
    with pytest.raises(type(error)):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_takes_no_nan(tmp_path, value):
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "a.json", {"x": value})
    assert not list(tmp_path.iterdir())


def test_sha256_and_digest(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert files.sha256(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()
    assert files.digest({"b": 1, "a": [2]}) == files.digest({"a": [2], "b": 1}) != files.digest({"a": [2], "b": 2})


def test_a_lock_is_seen_while_it_is_held(tmp_path):
    path = tmp_path / "new" / "lock"
    assert not files.is_locked(path)
    with files.locked(path):
        assert files.is_locked(path)
    assert not files.is_locked(path) and path.exists()


def test_a_second_holder_waits(tmp_path):
    path, order = tmp_path / "lock", []

    def second() -> None:
        order.append("waits")
        with files.locked(path):
            order.append("holds")

    with files.locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        while "waits" not in order:
            time.sleep(0.01)
        time.sleep(0.05)
        order.append("released")
    thread.join()
    assert order == ["waits", "released", "holds"]


def test_a_full_disk_is_named_by_the_folder_that_was_filled(tmp_path):
    with pytest.raises(OSError, match="No space left") as failure, files.atomic_folder(tmp_path / "pack"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert failure.value.filename == str(tmp_path / "pack") and not list(tmp_path.iterdir())


def test_a_folder_appears_where_killed_processes_left_theirs(tmp_path):
    """Process ids recur: what one of ours left is in nobody's way. What is a day old is deleted."""
    old, young = (tmp_path / f".out.tmp-{name}" for name in ("1", os.getpid()))
    for left in (old, young):
        left.mkdir()
        (left / "half").touch()
    os.utime(old, (0, 0))
    with files.atomic_folder(tmp_path / "out") as aside:
        (aside / "whole").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"out", young.name}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


@pytest.mark.parametrize(("other", "is_equal"), [("same", True), ("another", False)])
def test_of_two_writers_of_a_folder_the_second_finds_the_same_or_is_told(tmp_path, other, is_equal):
    folder = tmp_path / "out"

    def write() -> None:
        with files.atomic_folder(folder) as aside:
            (aside / "a").write_text("same")
            folder.mkdir()
            (folder / "a").write_text(other)

    if is_equal:
        write()
    else:
        with pytest.raises(files.WrittenMeanwhile, match="another process has written it meanwhile") as caught:
            write()
        assert caught.value.filename == str(folder)
    assert (folder / "a").read_text() == other and [path.name for path in tmp_path.iterdir()] == ["out"]
