"""Schedules by hand; runs of several lengths that share a trunk end as each would alone, bit for bit."""

import pytest
import torch
from support.counting import counting

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import Sequences
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.loop import Interrupted, train
from sparsedepth.train.optimizer import learning_rate
from sparsedepth.train.runtime import resolve

TINY = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "batch_tokens": 32}
TINY |= {"lr": 1.0, "min_lr_frac": 0.1, "log_every": 5, "observe_every": 7, "precision": "fp32"}


def config(steps: int, warmup_steps: int, **fields) -> RunConfig:
    values = {"train_tokens": 32 * steps, "warmup_tokens": 32 * warmup_steps, "schedule": "wsd"}
    return build(RunConfig, {**TINY, **values, **fields}, "test")


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (config(10, 2, decay_frac=0.4), [0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]),
        (config(6, 1, schedule="linear"), [1, 1, 0.775, 0.55, 0.325, 0.1]),
        (config(5, 0, schedule="linear", warmup_tokens=None, warmup_frac=0.0), [1, 0.775, 0.55, 0.325, 0.1]),
    ],
    ids=["wsd is constant between warm-up and decay", "linear falls from the end of warm-up", "without warm-up"],
)
def test_rates_by_hand(cfg, expected):
    assert [learning_rate(cfg, step) for step in range(cfg.n_steps)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "cosine", "decay_frac": 0.4}, "decay of schedule=wsd"),
        ({"warmup_frac": 0.2}, "warmup_tokens=64 and warmup_frac=0.2 both set the warm-up"),
        ({"warmup_tokens": 32 * 11}, "is more than train_tokens=320"),
        ({"warmup_tokens": 32 * 9, "decay_frac": 0.4}, "warms up for 9 of 10 steps and decays from step 6"),
    ],
)
def test_phases_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        config(10, 2, **fields)


def test_a_trunk_belongs_to_what_is_trained_not_to_how_long_or_what_is_measured():
    first = config(40, 4)
    same = [
        config(10, 4),
        config(40, 4, warmup_tokens=None, warmup_frac=0.1),
        config(40, 4, decay_frac=0.5),
        config(40, 4, min_lr_frac=0.0, val_tokens=65_536),
    ]
    assert {one.trunk_key for one in same} == {first.trunk_key}
    other = [config(40, 5), config(40, 4, lr=0.5), config(40, 4, depth_scale="lns"), config(40, 4, seed=1)]
    assert len({one.trunk_key for one in (first, *other)}) == 5
    assert config(40, 4, schedule="cosine").trunk_key is None


def run(cfg: RunConfig, batch=counting, **options):
    model = Decoder(cfg, cfg.seed)
    observe = lambda model, step: [{"step": step, "value": model.head.weight.sum().item()}]  # noqa: E731
    return model, train(model, cfg, resolve(cfg, RuntimeConfig(device="cpu")), batch, observe=observe, **options)


def outcome(model, trained):
    curves = [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in trained.curves]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, curves, trained.observations


def assert_equal(first, second):
    (weights, *rows), (others, *other_rows) = outcome(*first), outcome(*second)
    assert rows == other_rows
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


BUDGETS = (10, 20, 40)
FIELDS = [{}, {"n_experts": 4, "top_k": 2}, {"optimizer": "muon"}, {"residual_dropout": 0.1}]


@pytest.mark.parametrize("fields", FIELDS)
def test_branches_equal_the_runs_that_train_to_their_budget_alone(tmp_path, fields):
    taken = []

    def batch(step: int) -> Sequences:
        taken.append(step)
        return counting(step)

    for steps in BUDGETS:
        cfg = config(steps, 4, lr=3e-3, **fields)
        assert_equal(run(cfg, batch, trunk=tmp_path), run(cfg))
    # One trunk of 32 steps and decays of 2, 4 and 8: 46 steps in place of 70.
    assert len(taken) == 32 + 2 + 4 + 8
    assert [int(path.stem[5:]) for path in sorted(tmp_path.glob("*.json"))] == [8, 16, 32]


def test_a_shorter_run_after_a_longer_one_starts_before_its_own_decay(tmp_path):
    for steps in (40, 10, 20):
        cfg = config(steps, 4, lr=3e-3)
        assert_equal(run(cfg, trunk=tmp_path), run(cfg))


@pytest.mark.parametrize("kill_step", [12, 33])
def test_killed_in_trunk_or_branch_and_resumed_it_is_the_same(tmp_path, kill_step):
    run(config(10, 4, lr=3e-3), trunk=tmp_path / "trunk")
    cfg, calls = config(40, 4, lr=3e-3), []

    def stop() -> bool:
        calls.append(1)
        return len(calls) == max(1, kill_step - 8)

    options = {"trunk": tmp_path / "trunk", "checkpoints": tmp_path / "own"}
    with pytest.raises(Interrupted):
        run(cfg, stop=stop, **options)
    assert_equal(run(cfg, **options), run(cfg))


def test_a_damaged_trunk_is_passed_over(tmp_path):
    run(config(10, 4, lr=3e-3), trunk=tmp_path)
    run(config(20, 4, lr=3e-3), trunk=tmp_path)
    newest = max(tmp_path.glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-8] + b"\0" * 8)
    cfg = config(40, 4, lr=3e-3)
    assert_equal(run(cfg, trunk=tmp_path), run(cfg))
