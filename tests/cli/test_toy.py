"""`sparsedepth toy` as a user runs it: exponents printed, stopped anywhere and continued to the same numbers."""

import os
import signal
import time

import pytest
import yaml
from support.tiny_sweep import sparsedepth, start

from sparsedepth.cli.main import run
from sparsedepth.cli.toy import toy
from sparsedepth.store.connection import open_store


def definition(folder, n_steps=40, **base):
    content = {
        "name": "tiny",
        "question": "Does loss fall with depth?",
        "hypothesis": "Yes.",
        "n_layers": [1, 2, 3, 4],
        "base": {
            "target": "mse",
            "d_model": 4,
            "teacher_layers": 8,
            "batch_size": 16,
            "n_steps": n_steps,
            "log_every": n_steps,
            "test_batches": 1,
            "lr": 0.01,
            **base,
        },
    }
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def losses(results):
    with open_store(results) as store:
        return store.sql("select n_layers, student, test_loss from toys order by all").rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A definition, its results, and what the command said."""
    folder = tmp_path_factory.mktemp("whole")
    said, _ = sparsedepth("toy", definition(folder, n_steps=600), "--out", folder / "out", "--device", "cpu")
    return folder / "toy.yaml", folder / "out", said


def test_a_finished_toy_is_printed_again_and_left_as_it_is(whole):
    file, out, said = whole
    assert "12 students in 4 groups" in said and "all students: alpha" in said and "3 teachers, depths 1 to 4" in said
    before = {path: path.stat().st_mtime_ns for path in (out / "toys").rglob("*")}
    again, _ = sparsedepth("toy", file, "--out", out, "--device", "cpu")
    assert again == said
    assert before == {path: path.stat().st_mtime_ns for path in (out / "toys").rglob("*")}
    assert not list((out / "work").iterdir())


def test_stopped_anywhere_it_ends_with_the_same_numbers(whole, tmp_path):
    file, out, _ = whole
    for n_complete, how in ((1, signal.SIGINT), (2, signal.SIGKILL)):
        process = start("toy", file, "--out", tmp_path, "--device", "cpu")
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("toys/*/complete"))) < n_complete:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, how)
        _, said = process.communicate(timeout=300)
        if how == signal.SIGINT:
            assert process.returncode == 130 and "run the same command again to resume" in said
            assert list(tmp_path.glob("work/*/checkpoints/step-*.json"))
    sparsedepth("toy", file, "--out", tmp_path, "--device", "cpu")
    assert losses(tmp_path) == losses(out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "lrr=1"), "did you mean 'lr'"),
        (("--scale", "big"), "no scale 'big'"),
        (("--device", "tpu"), "not a device"),
        (("--set", "rho=[2]"), "less than or equal to 1"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        run(["toy", str(definition(tmp_path)), "--out", str(tmp_path / "out"), *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said
    assert len(said.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_toy_that_cannot_start_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(results, *_):
        (results / "work").mkdir(parents=True)
        raise ValueError("no room")

    monkeypatch.setattr("sparsedepth.toy.training.is_busy", refuse)
    with pytest.raises(ValueError, match="no room"):
        toy(definition(tmp_path), tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()
