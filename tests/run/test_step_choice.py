"""How the runs of a process take their steps: the fastest way is found once for a shape, and only where it is open."""

import dataclasses
import math

import pytest
from support.cpu_graph import stand_in
from support.tiny_sweep import run_config

from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.run import execute, step_choice
from sparsedepth.run.step_choice import choose_steps, seconds
from sparsedepth.store import run_record
from sparsedepth.train.stack import StackedStep

OPEN = RuntimeConfig(device="cpu", cuda_graph="auto")


def runs(tmp_path, n: int, steps: int = 600, **fields) -> list[RunConfig]:
    return [run_config(tmp_path, seed=seed, train_tokens=128 * steps, **fields) for seed in range(n)]


def planned(monkeypatch, took) -> list[tuple]:
    """Times by (stack, cuda_graph, compile) in place of measured ones; what was asked for."""
    asked: list[tuple] = []

    def timed(configs, runtime):
        asked.append((runtime.stack, runtime.cuda_graph, runtime.compile))
        return took(*asked[-1])

    monkeypatch.setattr(step_choice, "seconds", timed)
    return asked


def test_the_fastest_way_is_chosen_and_stored_with_the_folder(monkeypatch, tmp_path):
    """One model of eight takes less time than each alone; captured less, compiled more."""
    asked = planned(monkeypatch, lambda stack, graph, compile: 20 / stack - (graph == "auto") + compile)
    chosen = choose_steps(runs(tmp_path, 8), OPEN, tmp_path)
    assert (chosen.stack, chosen.cuda_graph, chosen.compile) == (8, "auto", False)
    assert asked == [(8, False, False), (1, False, False), (8, "auto", False), (8, "auto", True)]
    assert choose_steps(runs(tmp_path, 8), OPEN, tmp_path) == chosen and len(asked) == 4
    assert len([*tmp_path.glob("work/steps/*.json")]) == 1
    choose_steps(runs(tmp_path, 2), OPEN, tmp_path)
    assert len(asked) == 8, "of other numbers of runs nothing is known"


def test_what_was_asked_for_by_name_is_not_open(monkeypatch, tmp_path):
    asked = planned(monkeypatch, lambda *way: 1.0)
    named = OPEN.model_copy(update={"stack": 3, "cuda_graph": True})
    assert choose_steps(runs(tmp_path, 3), named, tmp_path).stack == 3
    assert asked == [(3, True, False), (3, True, True)]
    asked.clear()
    assert choose_steps(runs(tmp_path, 2, steps=100), RuntimeConfig(device="cpu"), tmp_path).cuda_graph is False
    assert asked == [(2, False, False), (1, False, False)], "too few steps for a compiler"


def test_what_cannot_be_timed_is_not_chosen(monkeypatch, tmp_path):
    planned(monkeypatch, lambda stack, graph, compile: 5.0 if stack == 1 and not graph else math.inf)
    chosen = choose_steps(runs(tmp_path, 4), OPEN, tmp_path)
    assert (chosen.stack, chosen.cuda_graph) == (1, False)


@pytest.mark.parametrize(("stack", "graph"), [(1, False), (2, False), (2, True)])
def test_real_steps_are_timed_and_leave_no_trace(monkeypatch, tmp_path, stack, graph):
    recorders, resolve = stand_in(monkeypatch), step_choice.resolve
    monkeypatch.setattr(
        step_choice,
        "resolve",
        lambda run, runtime: dataclasses.replace(resolve(run, runtime), cuda_graph=graph),
    )
    configs = runs(tmp_path, 2, n_layers=1, d_model=8)
    assert 0.1 < seconds(configs, OPEN.model_copy(update={"stack": stack})) < 600
    assert len(recorders) == graph and not (tmp_path / "work").exists()
    assert seconds(configs, OPEN.model_copy(update={"stack": stack, "device": "mps"})) == math.inf
    monkeypatch.setattr(StackedStep, "take", lambda step: 1 / 0)
    assert (seconds(configs, OPEN.model_copy(update={"stack": stack})) == math.inf) == (stack == 2)


@pytest.mark.parametrize(("device", "size"), [("cuda", 1), ("cpu", "auto")])
def test_runs_of_a_process_on_a_gpu_take_their_steps_as_was_chosen(monkeypatch, tmp_path, device, size):
    sizes = []
    monkeypatch.setattr(
        execute,
        "choose_steps",
        lambda configs, runtime, results: runtime.model_copy(update={"stack": len(configs) - 1}),
    )
    monkeypatch.setattr(execute, "find_device", lambda name: type("Device", (), {"type": device}))
    monkeypatch.setattr(execute, "train_together", lambda works, clocks, size: sizes.append(size) or [tmp_path] * 2)
    monkeypatch.setattr(execute, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(execute.Stop, "catch", lambda stop: stop)
    paths = []
    for config in runs(tmp_path, 2):
        folder = tmp_path / config.run_id
        folder.mkdir()
        run_record.write_config(folder, config)
        paths.append(str(folder / "config.yaml"))
    assert execute.main([str(tmp_path), *paths]) == 0 and sizes == [size]
