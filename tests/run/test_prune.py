"""Pruning from our own curves: the rule by hand, its window, and a real sweep with several objectives that prunes."""

import math

import pytest
from support.made_up_runs import make_run
from support.tiny_sweep import definition, sparsedepth, table

from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Prune
from sparsedepth.run.prune import PrunedRun, Pruner, level_reached
from sparsedepth.run.scratch import Scratch

RULE = Prune(by="train_loss", at=[0.5], keep=0.5, min_runs=3)
FIELDS = {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 128 * 40, "log_every": 1}


@pytest.mark.parametrize(
    ("loss", "others", "pruned"),
    [
        (2.0, [1.0, 2.0, 3.0, 4.0], False),  # the best half is 1.0 and 2.0: the bar is 2.0, and it is reached
        (2.1, [1.0, 2.0, 3.0, 4.0], True),
        (2.1, [1.0, 2.0, 3.0], True),  # the best half of three is two of them
        (9.0, [1.0, 2.0], False),  # too few to compare with
        (9.0, [1.0, math.inf, math.inf, math.inf], False),  # most of them diverged
    ],
)
def test_a_run_is_pruned_where_enough_finished_ones_were_better_at_that_step(loss, others, pruned):
    assert (loss > level_reached(RULE, others)) == pruned


def curve(loss):
    """Losses far from `loss` but in steps 19 and 20 of 40: the last tenth of the first half."""
    return [{"step": step, "train_loss": loss if step in (19, 20) else 99.0 - step} for step in range(1, 41)]


@pytest.fixture
def results(tmp_path):
    """Four finished runs of two layers with losses 1, 2, 3 and a diverged one; better ones of three layers."""
    for seed, loss in enumerate((1.0, 2.0, 3.0)):
        make_run(tmp_path, RunConfig(**FIELDS, n_layers=2, seed=seed), {"val_loss": loss}, curves=curve(loss))
        make_run(tmp_path, RunConfig(**FIELDS, n_layers=3, seed=seed), {"val_loss": 0.1}, curves=curve(0.1))
    make_run(tmp_path, RunConfig(**FIELDS, n_layers=2, seed=3), {"outcome": "diverged"}, curves=curve(0.1)[:18])
    return tmp_path


def prune(results, rows, from_step=1, rule=RULE):
    """A process that takes the steps from `from_step` on; the rows before it are those of its checkpoint."""
    pruner = Pruner(rule, RunConfig(**FIELDS, n_layers=2, seed=9), results)
    for step in range(from_step, 41):
        pruner(step, rows[:step])


def test_a_run_is_judged_at_its_share_against_finished_runs_of_its_depth(results):
    prune(results, curve(2.0))
    with pytest.raises(PrunedRun) as caught:
        prune(results, curve(2.5))
    assert caught.value.step == 20
    assert caught.value.reason == (
        "pruned at 50%: train_loss 2.5 is above 2, the level reached by the best 50% of 4 finished runs with n_layers=2"
    )
    with pytest.raises(PrunedRun) as caught:
        prune(results, curve(2.5), rule=Prune(by="train_loss", at=[0.49], keep=0.5, min_runs=3))
    assert caught.value.step == 20, "a share between two steps, 19.6, is judged at the later one"


def test_a_run_that_resumes_within_the_window_is_judged_by_all_of_it_and_beyond_it_no_more(results):
    """Steps 19 and 20 have the losses 2.6 and 1.9, whose mean is above the bar; another process took step 19."""
    rows = curve(1.9)
    rows[18]["train_loss"] = 2.6
    with pytest.raises(PrunedRun, match=r"train_loss 2\.25 is above 2"):
        prune(results, rows, from_step=20)
    prune(results, curve(9.0), from_step=21)


@pytest.mark.slow  # a whole sweep with a sampler
def test_a_sweep_with_several_objectives_prunes_and_says_so(tmp_path):
    """Learning rates far too small are ended half-way: no record, a reason in `status`, and the front goes on."""
    search = {"sampler": "random", "n_trials": 5, "seeds": [0], "objectives": ["val_loss", "usefulness", "train_flops"]}
    search["space"] = {"lr": {"low": 1e-6, "high": 1e-2, "log": True}, "n_layers": [1]}
    search["prune"] = {"by": "train_loss", "at": [0.5], "min_runs": 1, "keep": 0.4}
    path = definition(tmp_path, base={"train_tokens": 128 * 20, "log_every": 1}, **search)
    out, _ = sparsedepth("sweep", path, "--out", tmp_path / "results", "--workers", 1)
    scratches = [
        Scratch(tmp_path / "results", path.parent.name) for path in tmp_path.glob("results/work/*/config.yaml")
    ]
    pruned = [scratch for scratch in scratches if scratch.recorded().pruned]
    complete = table(tmp_path / "results")
    assert pruned and len(pruned) + len(complete) == 5
    for scratch in pruned:
        assert scratch.run_id not in complete and f"run {scratch.run_id} pruned at 50%: train_loss" in out
    assert all(summary["outcome"] == "ok" and summary["steps"] == 20 for summary in complete.values())
    status, _ = sparsedepth("status", tmp_path / "results")
    assert f"{len(complete)} complete" in status and f"{len(pruned)} pruned" in status
