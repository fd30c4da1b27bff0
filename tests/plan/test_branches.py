"""Branches of a sweep: their cells by hand, their order, and what cannot be a branch."""

import pytest

from sparsedepth.config.load import build
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.budgets import shared_steps, trunk_line, trunk_names
from sparsedepth.plan.price import PricingSetup, price_of
from sparsedepth.plan.tasks import Plan

BASE = {"n_layers": 2, "d_model": 16, "n_heads": 2, "seq_len": 8, "batch_tokens": 32, "train_tokens": 32 * 80}
BASE |= {"schedule": "wsd", "warmup_tokens": 128, "measures": ["loss"], "val_tokens": 64}


def plan(**fields) -> Plan:
    values = {"name": "s", "question": "q", "hypothesis": "h", "branch_at": [0.125, 0.25, 0.5], **fields}
    return Plan(build(SweepDefinition, {**values, "base": {**BASE, **fields.pop("base", {})}}, "s.yaml"))


def test_each_share_is_the_run_that_trains_to_it_alone():
    runs = [planned.config for planned in plan(seeds=2).runs()]
    assert [(config.n_steps, config.warmup_steps, config.stable_steps, config.seed) for config in runs] == [
        (steps, 4, steps - steps // 5, seed) for seed in (0, 1) for steps in (10, 20, 40, 80)
    ]
    alone = plan(branch_at=[], base={"train_tokens": 32 * 20}).runs()
    assert alone[0].run_id == runs[1].run_id
    assert len({(config.trunk_key, config.seed) for config in runs}) == 2


def test_a_trunk_is_counted_once():
    runs = [planned.config for planned in plan().runs()]
    assert shared_steps(runs) == [0, 8, 16, 32]
    assert sum(config.n_steps for config in runs) - sum(shared_steps(runs)) == 64 + 2 + 4 + 8 + 16
    cosine = [config.model_copy(update={"schedule": "cosine"}) for config in runs]
    assert shared_steps(cosine) == [0, 0, 0, 0]


def test_status_names_trunk_and_branches():
    runs = [planned.config for planned in plan(seeds=2).runs()]
    names = trunk_names(runs)
    key = runs[0].trunk_key[:6]
    assert [names[config.run_id] for config in runs[:4]] == [
        *(f"branch {number} of 3 of trunk {key}" for number in (1, 2, 3)),
        f"trunk {key}",
    ]
    done = {config.run_id for config in runs[:6]}  # the first trunk, and two branches of the second
    assert trunk_line(names, done) == "2 trunks (1 complete) with 6 branches (5 complete)"
    alone = trunk_names([planned.config for planned in plan(branch_at=[]).runs()])
    assert alone == {} and trunk_line(alone, done) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"branch_at": [0.5, 0.25]}, "must be ascending"),
        ({"branch_at": [0.5, 1.0]}, "less than 1"),
        ({"branch_at": [0.0]}, "greater than 0"),
        ({"branch_at": [0.05]}, "ends after 4 steps, of which 4 are warm-up and 1 decay"),
        ({"branch_at": [0.001]}, "is no step between them"),
        ({"base": {"warmup_tokens": None, "warmup_frac": 0.05}}, "set warmup_tokens: 128 in the base"),
        ({"base": {"schedule": "cosine"}}, "needs schedule=wsd.*schedule: wsd in the base"),
        ({"sampler": "random", "n_trials": 4, "space": {"lr": {"low": 1e-3, "high": 1e-2}}}, "needs sampler 'grid'"),
    ],
)
def test_what_cannot_be_a_branch_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        plan(**fields)


def test_a_trunk_is_priced_once():
    """80 steps with branches at 10, 20 and 40 take 94 steps in place of 150."""
    setup = PricingSetup(workers=1)
    runs = [planned.config for planned in plan(seeds=3).runs()]
    whole, alone = price_of(runs, setup), [price_of([config], setup) for config in runs]
    assert whole.tokens == 3 * 94 * 32 and sum(one.tokens for one in alone) == 3 * 150 * 32
    assert whole.train_flops == pytest.approx(94 / 150 * sum(one.train_flops for one in alone))
    assert whole.seconds.value < sum(one.seconds.value for one in alone)
