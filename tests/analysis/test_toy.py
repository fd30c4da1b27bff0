"""Teacher-student networks: worked out by hand, against ordinary modules, and exponents that were planted."""

import importlib.util
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support import forked_commands

from sparsedepth.store.checksums import DamagedRun

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "analysis" / "toy.py"
spec = importlib.util.spec_from_file_location("toy", SCRIPT)
assert spec and spec.loader
toy = importlib.util.module_from_spec(spec)
sys.modules["toy"] = toy
spec.loader.exec_module(toy)

SMALL = {"n_layers": 2, "d_model": 4, "vocab_size": 6, "teacher_layers": 5, "batch_size": 16, "n_steps": 6, "lr": 3e-3}
KINDS = [
    {"target": "kl", "temperature": (0.2, 1.0)},
    {"target": "kl_given_head", "temperature": (0.2, 1.0), "lr_depth_factor": 4.0, "decay_from": 0.5},
    {"target": "mse"},
    {"target": "mse", "integrator": "midpoint", "lr_depth_factor": 2.0},
]
DEPTHS = np.array([6.0, 12, 16, 24, 32, 48])


def group_of(**values):
    return toy.Group(
        **{**SMALL, "test_batches": 2, "log_every": 3, "teacher_seed": (0, 1), "rho": (0.0, 1.0), **values}
    )


def test_euler_and_midpoint_by_hand():
    """Width 2, W = I, b = 0, V = I: f(x) = relu(N(x))^2, and N(x) = x at x = (1, -1)."""
    eye = torch.eye(2)[None, None]
    weights = toy.Weights(eye, torch.zeros(1, 1, 1, 2), eye, torch.zeros(1, 2, 3))
    x = torch.tensor([[1.0, -1.0]])  # f(x) = (1, 0), x + f(x) = (2, -1), mean square 2.5
    assert torch.allclose(toy.final_state(weights, x), torch.tensor([[[2.0, -1.0]]]) / math.sqrt(2.5))
    twice = toy.Weights(*(torch.cat((weight, weight)) for weight in weights[:3]), weights.head)
    # x + f(x) / 2 = (1.5, -1); N = that / sqrt(1.625); g = (2.25 / 1.625, 0); x + g = (1 + 2.25 / 1.625, -1)
    end = torch.tensor([1 + 2.25 / 1.625, -1.0])
    assert torch.allclose(toy.final_state(twice, x, "midpoint")[0, 0], end / end.square().mean().sqrt())


def test_layers_correlate_by_rho_and_keep_their_variance():
    group = group_of(d_model=32, teacher_layers=8)
    for rho in (0.0, 0.6, 1.0):
        entries_LN = toy.teacher(group, rho, 3)[0].flatten(1)
        correlation = torch.corrcoef(entries_LN)[~torch.eye(8, dtype=torch.bool)]
        assert torch.allclose(correlation, torch.full_like(correlation, rho), atol=0.08)
        assert entries_LN.var().item() == pytest.approx(1 / (3 * 32), rel=0.1)  # uniform in +-1/sqrt(32): a^2 / 3
    proj = toy.teacher(group_of(teacher_layers=16, d_ff=100), 0.0, 0)[2]
    assert proj.abs().max().item() == pytest.approx(1 / math.sqrt(100) / math.sqrt(16), rel=0.01)


def alone(training, number, n_steps):
    """The training losses of one student, with ordinary functions for it and its teacher."""
    group, axes = training.group, training.group.students[number]
    at = group.rho.index(axes["rho"]) * len(group.teacher_seed) + group.teacher_seed.index(axes["teacher_seed"])

    def state(weights, model, x_BM, midpoint):
        def branch(x_BM, block):
            hidden_BF = F.linear(F.rms_norm(x_BM, x_BM.shape[-1:]), weights.fc[block, model].T)
            return F.linear(F.relu(hidden_BF + weights.bias[block, model]) ** 2, weights.proj[block, model].T)

        x_BM = F.rms_norm(x_BM, x_BM.shape[-1:])
        for block in range(0, len(weights.fc), 2 if midpoint else 1):
            update_BM = branch(x_BM, block)
            x_BM = x_BM + (branch(x_BM + update_BM / 2, block + 1) if midpoint else update_BM)
        return F.rms_norm(x_BM, x_BM.shape[-1:])

    found = []
    for step in range(n_steps):
        training.optimizer.param_groups[0]["lr"] = group.learning_rate(step)
        x_BM = training.inputs(step)
        with torch.no_grad():
            wanted_BM = state(training.teachers, at, x_BM, midpoint=False)
            wanted_BV = F.log_softmax(wanted_BM @ training.teachers.head[at] / axes["temperature"], -1)
        state_BM = state(training.students, number, x_BM, group.integrator == "midpoint")
        own = axes["temperature"] if group.target == "kl_given_head" else 1.0
        found_BV = F.log_softmax(state_BM @ training.students.head[number] / own, -1)
        kl = F.kl_div(found_BV, wanted_BV, reduction="batchmean", log_target=True)
        loss = F.mse_loss(state_BM, wanted_BM) if group.target == "mse" else kl
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, list(kind.values())[:2])))
def test_batched_is_one_by_one(kind):
    group = group_of(seed=(0, 1), **kind)
    together = toy.Training(group)
    losses_TK = torch.stack([together.take_step() for _ in range(group.n_steps)]).numpy()
    assert len(set(losses_TK[-1])) == len(group.students)  # nobody is compared with a copy
    for number in range(len(group.students)):
        assert np.allclose(
            losses_TK[:, number], alone(toy.Training(group), number, group.n_steps), rtol=1e-4, atol=1e-7
        )


def test_the_schedule_by_hand():
    group = group_of(n_layers=4, lr=0.1, lr_depth_factor=2.0, n_steps=10, decay_from=0.8, decay_to=0.1)
    assert [group.learning_rate(step) for step in (0, 7, 8)] == [pytest.approx(0.1)] * 3  # 0.1 x 2 / sqrt(4)
    assert group.learning_rate(9) == pytest.approx(0.1 * (0.1 + 0.9 * 0.5))
    assert group_of(lr=0.1).learning_rate(5) == 0.1


def test_the_groups_are_those_of_the_paper_and_of_the_committed_results():
    paper, micro = toy.groups("paper"), toy.groups("micro")
    assert (len(paper), sum(len(group.students) for group in paper)) == (24, 936)
    assert {group.run_id for group in micro} == {*toy.read_students(ROOT / "results" / "toy")["run_id"]}


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0, 4.0])
@pytest.mark.parametrize("rest", [0.0, 1e-4])
def test_a_planted_law_is_recovered(alpha, rest):
    fit = toy.fit_power_law(DEPTHS, 0.7 * DEPTHS**-alpha + rest)
    assert (fit.alpha, fit.c) == (pytest.approx(alpha, rel=1e-3), pytest.approx(0.7, rel=1e-2))
    assert fit.rest == pytest.approx(rest, rel=1e-2, abs=1e-9)
    assert rest or fit.slope == pytest.approx(alpha)


@pytest.mark.parametrize("loss", [DEPTHS**0.3, np.exp(-1.0 * DEPTHS)])
def test_a_loss_that_is_no_power_law_has_no_exponent(loss):
    fit = toy.fit_power_law(DEPTHS, loss)
    assert fit.alpha is None and np.isfinite(fit.slope)


def rows(alphas: dict[float, float]) -> pd.DataFrame:
    """Students with an exponent for each rho, noise by teacher."""
    generator, made = np.random.default_rng(0), []
    fixed = {name: getattr(toy.Group(), name) for name in ("integrator", "target", "n_steps", "d_ff")}
    fixed |= {name: 0 for name in toy.Group.__dataclass_fields__ if name not in fixed}
    for rho, alpha in alphas.items():
        for teacher in range(4):
            own = alpha + 0.02 * generator.standard_normal()
            for depth in DEPTHS:
                row = {"rho": rho, "temperature": 1.0, "teacher_seed": teacher, "n_layers": int(depth)}
                made.append({**fixed, **row, "test_loss": depth**-own})
    return pd.DataFrame(made)


def test_exponents_of_each_setting_with_intervals_and_regimes():
    fitted = toy.exponents(rows({0.0: 1.0, 1.0: 3.0}))
    for (mean, lo, hi), truth in zip(fitted["alpha"], (1.0, 3.0), strict=True):
        assert lo < truth < hi and mean == pytest.approx(truth, abs=0.05)
    averaging, smooth = toy.sentences(fitted)
    assert averaging.startswith("rho=0: alpha ") and averaging.endswith("average their errors: 1 is inside")
    assert "4 teachers, depths 6 to 48" in smooth and smooth.endswith("by Euler steps: 3 is inside")
    assert toy.sentences(toy.exponents(rows({1.0: 2.0})))[0].endswith("3 is excluded")


def test_a_teacher_without_a_loss_does_not_count_and_few_depths_have_no_exponent():
    some = rows({0.0: 1.0})
    some.loc[(some["teacher_seed"] == 2) & (some["n_layers"] == 12), "test_loss"] = None
    assert toy.exponents(some)["teachers"].tolist() == [3]
    assert toy.exponents(some.query("n_layers <= 16")).empty


def test_a_finished_group_is_kept_and_a_missing_one_trained_again(tmp_path):
    def command(*words):
        return forked_commands.call([*map(str, words)], os.environ, program=str(SCRIPT))

    code, out, err = command(tmp_path, "--train", "tiny", "--device", "cpu")
    assert (code, err) == (0, "") and "[4/4] mse euler, 4 layers, 6 students" in out
    before = toy.read_students(tmp_path)
    assert len(before) == 24
    folder, *others = sorted((tmp_path / "toys").iterdir())
    shutil.rmtree(folder)
    again = command(tmp_path, "--train", "tiny", "--device", "cpu")[1]
    assert "[1/1]" in again and again.splitlines()[1:] == out.splitlines()[4:]
    pd.testing.assert_frame_equal(toy.read_students(tmp_path), before)
    (others[0] / toy.STUDENTS).write_bytes(b"noise")
    with pytest.raises(DamagedRun, match=toy.STUDENTS):
        toy.read_students(tmp_path)


def test_the_committed_results_read_as_published():
    out = "\n".join(toy.sentences(toy.exponents(toy.read_students(ROOT / "results" / "toy"))))
    assert "target=mse, integrator=euler, rho=0, temperature=1: alpha 1.69 [1.62, 1.76], slope 1.16" in out
    assert "target=mse, integrator=euler, rho=1, temperature=1: alpha 2.60 [2.30, 2.89], slope 1.81" in out
