"""Accuracies of `evaluate` steer: `best`, `effects` and `recipe --by acc:TASK` as a user meets them."""

import json

import pytest
from support.made_up_runs import make_run
from support.tiny_sweep import sparsedepth

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.store.evals import Evaluation, save_evaluation


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """LNS answers 10% more of the questions, whatever its loss."""
    folder = tmp_path_factory.mktemp("scores")
    for scale in ("none", "lns"):
        for seed in range(5):
            config = RunConfig(n_layers=12, depth_scale=scale, seed=seed)
            costs = {"tokens_trained": config.train_tokens, "train_flops": 1e12, "params_total": 9, "params_active": 9}
            run = make_run(folder, config, {"val_loss": 2.0 + 0.01 * seed * (-1) ** seed, **costs})
            share = 0.5 + 0.1 * (scale == "lns") + 0.004 * seed + 0.001 * ((3 * seed) % 4) * (scale == "lns")
            result = {"metric": "acc", "filter": "none", "value": share, "stderr": 0.01, "higher_is_better": True}
            facts = {"weights_hash": "0" * 12, "task": "count", "task_version": "1", "task_hash": "1" * 12}
            facts |= {"n_fewshot": 0, "max_len": 64, "harness": "lm-eval 0.4", "model": run.name, "n": 100}
            facts |= {"n_documents": 100, "n_truncated": 0, "started": "2026-01-02T03:04:05+00:00", "seconds": 1.0}
            save_evaluation(folder, build(Evaluation, {"run_id": run.name, **facts, "results": [result]}, "test"))
    return folder


def test_best_effects_and_recipe(results, tmp_path):
    out, _ = sparsedepth("best", results, "--by", "acc:count")
    assert "acc:count [share], higher is better" in out
    first = next(line for line in out.splitlines() if line.lstrip().startswith("1"))
    assert "depth_scale=lns" in first
    (row,) = json.loads(sparsedepth("effects", results, "--by", "acc:count", "--format", "json")[0])
    assert row["estimate"] == pytest.approx(0.1012, abs=0.001) and row["verdict"] == "higher"
    out, _ = sparsedepth("recipe", results, "--by", "acc:count", "-o", tmp_path / "recipe.yaml")
    assert "depth_scale" in (tmp_path / "recipe.yaml").read_text() and "acc:count" in out


def test_a_task_that_was_not_scored_is_one_line(results):
    for command in ("best", "effects", "recipe"):
        error = sparsedepth(command, results, "--by", "acc:other", code=2)[1]
        assert "no run here has acc:other; score runs first: sparsedepth evaluate" in " ".join(error.split()), command
