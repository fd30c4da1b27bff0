"""Runs of one shape in one process, as one stacked model: each with its own record, and none lost."""

import json

import pytest
from support.tiny_sweep import BASE, CPU, definition, run_config, sparsedepth

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.run.execute import execution
from sparsedepth.run.train_and_measure import Options
from sparsedepth.store.run_record import read_run
from sparsedepth.sweep.machine import STACKED_VALUES, machine
from sparsedepth.train.stack import Clock, train_together

ONE = ("--workers", 1, "--runtime", "threads=1")
"""One worker, whose runs have one thread: more only hinder a model of this size."""


def manifests(results) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in results.glob("runs/*/manifest.json")}


def test_each_run_of_a_stack_has_the_record_that_it_has_alone(tmp_path):
    configs = [run_config(tmp_path, seed=seed, lr=lr) for seed, lr in ((0, 1e-3), (1, 3e-3))]
    clocks = [Clock(), Clock()]
    ids = [config.run_id for config in configs]
    for place in ("stacked", "alone"):
        (tmp_path / place / "work").mkdir(parents=True)
    works = [
        execution(config, tmp_path / "stacked", Options(runtime=CPU, clock=clock, stacked_with=(other,)))
        for config, clock, other in zip(configs, clocks, reversed(ids), strict=True)
    ]
    folders = train_together(works, clocks)
    for config, folder, clock, other in zip(configs, folders, clocks, reversed(ids), strict=True):
        (alone,) = train_together([execution(config, tmp_path / "alone", Options(runtime=CPU))], [Clock()])
        own, expected = read_run(folder), read_run(alone)
        assert own.summary == pytest.approx(expected.summary, abs=1e-6)
        assert own.manifest["stacked_with"] == [other] and "stacked_with" not in expected.manifest
        assert own.manifest["peak_memory_bytes"] is None and own.manifest["seconds"] <= clock()
        assert {path.name for path in folder.iterdir()} == {path.name for path in alone.iterdir()}


def test_where_a_stack_is_formed():
    def size(stack="auto", compile="auto", **fields) -> int:
        config = build(RunConfig, {**BASE, "n_layers": 2, **fields}, "x")
        return machine(2, RuntimeConfig(device="cpu", stack=stack, compile=compile)).stack_size(config)

    wide = {"d_model": 64, "batch_tokens": STACKED_VALUES // 32, "train_tokens": STACKED_VALUES}
    assert (size(), size(**wide), size(n_experts=2, top_k=2)) == (4, 1, 4)
    assert (size(compile=True), size(compile=True, stack=2), size(compile=False)) == (1, 2, 4), "compiled, it is slower"
    assert (size(stack=1), size(stack=7, **wide), size(stack=7, n_experts=2, top_k=2)) == (1, 7, 7)


@pytest.mark.slow
def test_runs_that_fit_the_first_and_not_each_other_are_in_two_stacks(tmp_path):
    """Of `depth_scale` a stack holds one place besides none: the baseline trains with LNS, the other two apart."""
    variants = [{}, {"depth_scale": "lns"}, {"depth_scale": "after_ffn"}, {"depth_scale": "after_branch"}]
    path = definition(tmp_path, space={"n_layers": [2]}, variants=variants, seeds=[0])
    sparsedepth("sweep", path, "--out", tmp_path / "results", *ONE, "--stack", 4)
    records = manifests(tmp_path / "results").values()
    assert sorted(len(manifest.get("stacked_with", [])) for manifest in records) == [0, 0, 1, 1]


@pytest.mark.slow
def test_the_seeds_of_a_proposal_are_a_stack(tmp_path):
    search = {"sampler": "tpe", "n_trials": 2, "space": {"lr": {"low": 1e-3, "high": 1e-2}}}
    path = definition(tmp_path, **search, seeds=[0, 1, 2], base={"n_layers": 2})
    sparsedepth("sweep", path, "--out", tmp_path / "results", *ONE)
    assert [len(manifest["stacked_with"]) for manifest in manifests(tmp_path / "results").values()] == [2] * 6
