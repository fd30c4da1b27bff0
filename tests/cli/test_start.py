"""A start that fails leaves nothing, a slip is said, and an answer is written in no format that there is not."""

import os
import signal
import socket
from collections import Counter
from dataclasses import replace

import pytest
import typer
import yaml
from support.tiny_sweep import BASE, definition

from sparsedepth.cli import train_sweep
from sparsedepth.cli.input_file import sweep_definition
from sparsedepth.cli.preflight import field_values, warn_of_unlikely_values, with_cleanup
from sparsedepth.data import tokenizer
from sparsedepth.run.process import Stop
from sparsedepth.sweep.driver import SweepResult


def failing(results, *names):
    """A start that writes files and then finds a mistake of the user's."""

    def start():
        for name in names:
            path = results / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        raise ValueError("too little text")

    return start


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["sweep.yaml", "work/queue.lock", "data/new/x"], ["data/new/x"]),
        (["sweep.yaml", "work/queue.lock"], None),
        (["work/0123/lock"], None),
        (["sweep.yaml", "notes.txt"], ["notes.txt"]),
        (["sweep.yaml", "runs/0123/summary.json"], ["runs/0123/summary.json", "sweep.yaml"]),
        (["sweep.yaml", "work/0123/log.txt"], ["sweep.yaml", "work/0123/log.txt"]),
        (["sweep.yaml", "study.journal"], ["study.journal", "sweep.yaml"]),
    ],
)
def test_a_failed_start_leaves_nothing_of_its_own(tmp_path, names, left):
    results = tmp_path / "out"
    with pytest.raises(ValueError, match="too little text"):
        with_cleanup(results, failing(results, *names))
    assert results.exists() == (left is not None)
    assert sorted(str(p.relative_to(results)) for p in results.rglob("*") if p.is_file()) == (left or [])


def test_a_folder_that_was_there_is_left_alone(tmp_path):
    with pytest.raises(ValueError, match="too little text"):
        with_cleanup(tmp_path, failing(tmp_path, "sweep.yaml", "work/queue.lock"))
    assert (tmp_path / "sweep.yaml").exists() and (tmp_path / "work" / "queue.lock").exists()
    assert with_cleanup(tmp_path / "new", lambda: 7) == 7


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**BASE, "n_layers": 2, "corpus": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match="gone"):
        train_sweep.train(path, tmp_path / "out", device="cpu", threads=1)
    assert [*tmp_path.iterdir()] == [path]


def test_slips_are_said(tmp_path):
    searched = {"sampler": "random", "n_trials": 2, "space": {"lr": {"low": 0.1, "high": 10.0, "log": True}}}
    for fields, slip in (({"base": {"lr": 3.0}}, "lr=3 is above 1"), (searched, "lr=10 is above 1")):
        with pytest.warns(UserWarning, match=slip):
            warn_of_unlikely_values(field_values(sweep_definition(definition(tmp_path, **fields))))
    with pytest.warns(UserWarning, match="100,000,000,000,001 is more"):
        warn_of_unlikely_values([{"train_tokens": 10**14 + 1}])


def test_what_is_meant_is_not_called_a_slip(tmp_path, recwarn):
    warn_of_unlikely_values(field_values(sweep_definition(definition(tmp_path))))
    warn_of_unlikely_values([{"lr": 1.0, "train_tokens": 10**13}, {"n_layers": 3}])
    assert not recwarn.list


def test_ctrl_c_is_acknowledged_once(capfd):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        stop = Stop(is_announced=True).catch()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop() and capfd.readouterr().err.count("press Ctrl-C again to stop at once") == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == ""
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_hub_that_does_not_answer_is_not_asked(monkeypatch):
    """The client of the hub tries again for a minute; the local cache and folders are read all the same."""
    from huggingface_hub import constants

    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)

    def refuse(address, timeout):
        asked.append(address)
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not tokenizer.hub_answers() and len(asked) == 1
    with pytest.raises(ValueError, match=r"tokenizer='no-such-one' cannot be loaded \(the hub does not"):
        tokenizer.make_tokenizer("no-such-one", [], 300)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    assert tokenizer.hub_answers()


@pytest.mark.parametrize(
    ("signals", "unfinished", "code", "line"),
    [
        ([signal.SIGTERM], 0, 143, "stopped with 0 of 4 runs complete"),
        ([signal.SIGINT], 4, 130, "stopped with 0 of 4 runs complete"),
        ([], 4, 1, "4 runs are unfinished"),
    ],
)
def test_an_exit_code_of_zero_says_that_all_is_there(tmp_path, capsys, signals, unfinished, code, line):
    sweep, stop = sweep_definition(definition(tmp_path)), Stop()
    stop.signals = signals
    ended = SweepResult(states=[], unfinished=unfinished, refused=Counter(), stop=stop)
    with pytest.raises(typer.Exit) as end:
        train_sweep._print_result(sweep, tmp_path, ended, 4)
    assert end.value.exit_code == code and line in capsys.readouterr().err
    train_sweep._print_result(sweep, tmp_path, replace(ended, unfinished=0, stop=Stop()), 4)
