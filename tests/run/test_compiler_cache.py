"""A damaged file in the compiler's cache costs one retry; a compiler that fails costs its speed, not the run."""

import os
import subprocess
import sys

import pytest
from support.tiny_sweep import run_config

from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.run import train_and_measure
from sparsedepth.run.execute import execute
from sparsedepth.run.process import DAMAGED, DEPENDENT, VARIABLE, abandon_cache, is_compiler_error, use_cache
from sparsedepth.run.train_and_measure import Options
from sparsedepth.store import run_record
from sparsedepth.train.loop import training

COMPILED = RuntimeConfig(device="cpu", threads=1, compile=True)


@pytest.fixture(autouse=True)
def no_chosen_cache(monkeypatch):
    monkeypatch.setenv(VARIABLE, "x")  # so that it is restored
    monkeypatch.delenv(VARIABLE)


class CompilerError(RuntimeError):
    __module__ = "torch._dynamo.exc"


def failing(n_failures: int, tried: list):
    """A `training` whose compiler fails the first times; then nothing is compiled, which takes a minute."""

    def train(model, config, runtime, *arguments, **options):
        tried.append((runtime.compile, os.environ.get(VARIABLE)))
        if runtime.compile and len(tried) <= n_failures:
            raise CompilerError("file too short")
        object.__setattr__(runtime, "compile", False)
        return training(model, config, runtime, *arguments, **options)

    return train


def test_one_compiler_error_costs_a_retry_with_an_empty_cache(tmp_path, monkeypatch):
    tried: list = []
    monkeypatch.setattr(train_and_measure, "training", failing(1, tried))
    results = tmp_path / "results"
    execute(run_config(tmp_path), results, Options(runtime=COMPILED))
    (first, before), (second, after) = tried
    assert first and second and before != after
    assert before.endswith("-0") and after.endswith("-1") and before.startswith(str(results / "work/compiler-cache"))
    assert os.path.exists(f"{before}/{DAMAGED}") and not os.listdir(after)
    tried.clear()
    execute(run_config(tmp_path, seed=1), results, Options(runtime=COMPILED))
    again = [folder for _, folder in tried]  # what is damaged is not tried again
    assert again == [after, after.removesuffix("-1") + "-2"]


def test_a_compiler_that_fails_twice_is_done_without_and_the_record_says_so(tmp_path, monkeypatch):
    tried: list = []
    monkeypatch.setattr(train_and_measure, "training", failing(2, tried))
    made = run_record.read_run(execute(run_config(tmp_path), tmp_path / "results", Options(runtime=COMPILED)))
    assert [compiled for compiled, _ in tried] == [True, True, False]
    assert made.manifest["compiled"] is False
    reason = made.manifest["kernels"]["reasons"]["compile"]
    assert reason == "not compiled, since the compiler failed twice: file too short"


def test_a_cache_of_the_users_is_used_until_it_fails(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own"))
    monkeypatch.setenv(DEPENDENT, str(tmp_path / "own" / "triton"))
    assert use_cache(tmp_path) == tmp_path / "own"
    abandon_cache(tmp_path)
    assert DEPENDENT not in os.environ
    assert use_cache(tmp_path).parent == tmp_path / "work" / "compiler-cache"
    assert not (tmp_path / "own").exists()


def test_errors_of_the_compiler_are_known_by_their_class_or_place():
    inner = CompilerError("inner")
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    assert is_compiler_error(inner) and is_compiler_error(outer) and not is_compiler_error(ValueError("a loss"))
    try:
        exec(compile("raise OSError('file too short')", "/x/torch/_inductor/codecache.py", "exec"))
    except OSError as error:
        assert is_compiler_error(error)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from run.test_compiler_cache import COMPILED, run_config
from sparsedepth.run.execute import execute
from sparsedepth.run.train_and_measure import Options
execute(run_config(Path({folder!r}), seed=int(sys.argv[1])), Path({results!r}), Options(runtime=COMPILED))
"""


@pytest.mark.slow
def test_a_truncated_file_costs_one_retry(tmp_path):
    results = tmp_path / "results"
    tests = os.path.dirname(os.path.dirname(__file__))
    script = SCRIPT.format(tests=tests, folder=str(tmp_path), results=str(results))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(seed: int) -> str:
        command = [sys.executable, "-c", script, str(seed)]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stderr

    assert "compiler failed" not in run(0)
    libraries = list((results / "work" / "compiler-cache").rglob("*.so"))
    assert libraries
    for library in libraries:
        os.truncate(library, 100)
    assert run(1).count("the compiler failed; compiling again with an empty cache") == 1
    assert "compiler failed" not in run(2)
    assert len([*results.glob("runs/*")]) == 3
    assert all(run_record.read_run(folder).manifest["compiled"] for folder in results.glob("runs/*"))
