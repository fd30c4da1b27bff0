"""One batched model trains as its students would alone; a resumed group ends bit-equal; losses are what they say."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsedepth.toy import training
from sparsedepth.toy.config import ToyConfig
from sparsedepth.toy.training import Group, train
from sparsedepth.train.loop import Interrupted

SMALL = {"n_layers": 2, "d_model": 4, "vocab_size": 6, "teacher_layers": 5, "batch_size": 16, "n_steps": 12}
KINDS = [
    {"target": "kl", "temperature": (0.2, 1.0)},
    {"target": "kl_given_head", "temperature": (0.2, 1.0), "lr_depth_factor": 4.0, "decay_from": 0.5},
    {"target": "mse"},
    {"target": "mse", "integrator": "midpoint", "lr_depth_factor": 2.0},
]


def config_of(**fields) -> ToyConfig:
    small = {**SMALL, "test_batches": 2, "log_every": 4, "teacher_seed": (0, 1), "rho": (0.0, 1.0), "lr": 3e-3}
    return ToyConfig.model_validate({**small, **fields})


def benchmark():
    """The benchmark, whose other side is the plain loop over ordinary modules."""
    path = Path(__file__).parents[2] / "benchmarks" / "toy.py"
    spec = importlib.util.spec_from_file_location("toy_benchmark", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, list(kind.values())[:2])))
def test_batched_is_one_by_one(kind):
    config = config_of(seed=(0, 1), **kind)
    together = Group(config)
    losses_TK = torch.stack([together.take_step() for _ in range(config.n_steps)]).numpy()
    assert len(set(losses_TK[-1])) == config.n_students  # nobody is compared with a copy
    train_alone = benchmark().train_alone
    for number in range(config.n_students):
        alone = train_alone(Group(config), number, config.n_steps)
        assert np.allclose(losses_TK[:, number], alone, rtol=1e-4, atol=1e-7)


def test_a_group_of_one_student_is_that_student():
    whole = train(config_of(temperature=(0.3, 1.0), seed=(0, 5)))
    one = train(config_of(temperature=(1.0,), seed=(5,), rho=(1.0,), teacher_seed=(1,)))
    number = 15  # the last of rho x teacher_seed x temperature x seed
    for row in one.curves:
        other = next(r for r in whole.curves if (r["step"], r["student"]) == (row["step"], number))
        assert other["test_loss"] == pytest.approx(row["test_loss"], rel=1e-4)


def test_the_first_kl_is_that_to_the_uniform_distribution():
    """A student's head starts at 0: KL(p || uniform) = ln V - H(p)."""
    config = config_of(temperature=(0.2,), rho=(0.0,), teacher_seed=(0,))
    group = Group(config)
    log_p = group.targets(group.teacher_states(group.inputs(0)))[0].double()
    expected = math.log(6) + (log_p.exp() * log_p).sum(-1).mean()
    assert group.take_step().item() == pytest.approx(expected.item(), rel=1e-5)


def test_training_lowers_every_loss():
    group = train(config_of(target="mse", n_steps=150, log_every=150, lr=1e-2))
    first = Group(group.config).take_step()
    assert all(row["test_loss"] < 0.5 * start for row, start in zip(group.curves, first.tolist(), strict=True))


def test_the_schedule_by_hand():
    config = config_of(n_layers=4, lr=0.1, lr_depth_factor=2.0, n_steps=10, decay_from=0.8, decay_to=0.1)
    assert [config.learning_rate(step) for step in (0, 7)] == [pytest.approx(0.1)] * 2  # 0.1 x 2 / sqrt(4)
    assert config.learning_rate(8) == pytest.approx(0.1)
    assert config.learning_rate(9) == pytest.approx(0.1 * (0.1 + 0.9 * 0.5))
    assert config_of(lr=0.1).learning_rate(11) == 0.1


def test_inputs_and_tests_are_functions_of_seed_and_step():
    group, same, other = Group(config_of()), Group(config_of(n_layers=3)), Group(config_of(data_seed=1))
    assert torch.equal(group.inputs(3), same.inputs(3))
    assert not torch.equal(group.inputs(3), group.inputs(4))
    assert not torch.equal(group.inputs(3), other.inputs(3))
    assert not torch.equal(group.inputs(0), group.inputs("test", 0))


def weights(group: Group) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in group.students.parameters()]


@pytest.mark.parametrize("kind", KINDS[::3], ids=["kl", "midpoint"])
def test_a_resumed_group_ends_bit_equal(kind, tmp_path):
    config = config_of(**kind)
    undisturbed = train(config)
    for after in (3, 5):
        left = iter(range(after - 1))
        with pytest.raises(Interrupted):
            train(config, checkpoints=tmp_path, stop=lambda left=left: next(left, None) is None)
    resumed = train(config, checkpoints=tmp_path)
    assert resumed.curves == undisturbed.curves
    assert all(map(torch.equal, weights(resumed), weights(undisturbed)))


def test_checkpoints_are_written_while_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    train(config_of(), checkpoints=tmp_path)
    assert len(list(tmp_path.glob("step-*.safetensors"))) == 2  # the newest two


def test_a_student_that_diverges_leaves_the_others_alone():
    config = config_of(target="mse", rho=(0.0,))
    ill, healthy = Group(config), Group(config)
    with torch.no_grad():
        ill.students.proj_LKFM[:, 0] = math.inf
    for group in (ill, healthy):
        for _ in range(3):
            losses_K = group.take_step()
        group.log(losses_K)
    assert ill.curves[0]["test_loss"] is ill.curves[0]["train_loss"] is None
    assert ill.curves[1] == healthy.curves[1]
