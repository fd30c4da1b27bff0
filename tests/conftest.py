"""Marks that skip themselves, and what no test may depend on: the speed of the machine and who started the tests.

`gpu` skips itself without a CUDA device or GPU_TESTS_ON (`support.card`), `slow` and `chaos` unless asked for with -m.
With SENTENCES=FOLDER what the functions of `words` give is kept (`support/sentences.py`).
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if folder := os.environ.get("SENTENCES"):  # before anything imports these functions
    from support import sentences

    sentences.record(Path(folder))

from sparsedepth.cli.main import run

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def unflushed():
    """Nothing flushed to disk in the process of the tests: what a power cut leaves is not tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture
def command(capsys):
    """The command line in this process; its output and its errors. The exit code must be `code`."""

    def call(*arguments, code=0):
        with pytest.raises(SystemExit) as ended:
            run(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        return out, err

    return call


def pytest_configure(config: pytest.Config) -> None:
    """Started in the background of a shell the tests, and all processes that they start, would ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("-m") or ""
    for item in items:
        if item.get_closest_marker("gpu") and not (torch.cuda.is_available() or "GPU_TESTS_ON" in os.environ):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        for name in ("slow", "chaos"):
            if item.get_closest_marker(name) and name not in wanted:
                item.add_marker(pytest.mark.skip(reason=f"{name}: run with -m {name}"))
