"""The batched networks: worked out by hand, against ordinary modules, and against numeric derivatives."""

import math

import pytest
import torch

from sparsedepth.toy.config import ToyConfig
from sparsedepth.toy.network import Branch, Students, Weights, final_state, norm, student_axes, teachers


def config_of(**fields) -> ToyConfig:
    small = {"n_layers": 2, "d_model": 4, "vocab_size": 5, "teacher_layers": 6, "batch_size": 8}
    return ToyConfig.model_validate({**small, **fields})


def one_model(fc: float, bias: float, proj: float, n_blocks: int) -> Weights:
    """Width 1: N(x) is the sign of x, so everything can be worked out on paper."""
    full = [torch.full((n_blocks, 1, 1, 1), value) for value in (fc, bias, proj)]
    return Weights(*full, torch.ones(1, 1, 2))


def test_a_step_by_hand():
    x = torch.tensor([[2.0], [-2.0]])
    branch = Branch.apply(x[None], *(w[0] for w in one_model(2.0, 1.0, 0.5, 1)[:3]))
    # N(2) = 1: relu(2 + 1)^2 / 2 = 4.5; N(-2) = -1: relu(-2 + 1)^2 / 2 = 0
    assert torch.allclose(branch, torch.tensor([[[4.5], [0.0]]]))


def test_euler_and_midpoint_by_hand():
    """Width 2, W = I, b = 0, V = I: f(x) = relu(N(x))^2. From x = (1, 1), N(x) = x up to a scale: f = (1, 1)."""
    eye = torch.eye(2)[None, None]
    weights = Weights(eye, torch.zeros(1, 1, 1, 2), eye, torch.zeros(1, 2, 3))
    x = torch.tensor([[1.0, -1.0]])  # N(x) = x, f(x) = (1, 0), x + f(x) = (2, -1), mean square 2.5
    expected = torch.tensor([[[2.0, -1.0]]]) / math.sqrt(2.5)
    assert torch.allclose(final_state(weights, x), expected)
    twice = Weights(*(torch.cat((weight, weight)) for weight in weights[:3]), weights.head)
    # x + f(x) / 2 = (1.5, -1); N = that / sqrt(1.625); g = (2.25 / 1.625, 0); x + g = (1 + 2.25 / 1.625, -1)
    end = torch.tensor([1 + 2.25 / 1.625, -1.0])
    assert torch.allclose(final_state(twice, x, midpoint=True)[0, 0], end / end.square().mean().sqrt())


def test_the_derivative_by_hand_is_the_numeric_one():
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 3), (2, 3, 4), (2, 1, 4), (2, 4, 3))
    arguments = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(Branch.apply, arguments)


def test_norm_has_unit_mean_square():
    state = final_state(teachers(config_of()), torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(state.square().mean(-1), torch.ones(3, 8), atol=1e-5)
    assert torch.allclose(norm(state), state, atol=1e-5)


def test_layers_correlate_by_rho_and_keep_their_variance():
    config = config_of(rho=(0.0, 0.6, 1.0), d_model=32, teacher_layers=8, teacher_seed=(3,))
    fc_LKN = teachers(config).fc.flatten(2)
    for index, rho in enumerate(config.rho):
        entries_LN = fc_LKN[:, index]
        correlation = torch.corrcoef(entries_LN)[~torch.eye(8, dtype=torch.bool)]
        assert torch.allclose(correlation, torch.full_like(correlation, rho), atol=0.08)
        assert entries_LN.var().item() == pytest.approx(1 / (3 * 32), rel=0.1)  # uniform in +-1/sqrt(32): a^2 / 3
    assert torch.equal(fc_LKN[0, 2], fc_LKN[7, 2])


def test_the_teachers_output_scales_with_its_depth():
    proj = teachers(config_of(teacher_layers=16, d_ff=100)).proj
    assert proj.abs().max().item() == pytest.approx(1 / math.sqrt(100) / math.sqrt(16), rel=0.01)


def test_a_students_start_is_the_identity_and_a_function_of_its_seed():
    config = config_of(seed=(1, 2), temperature=(0.5, 1.0))
    students = Students(config)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(students(x), norm(x).expand(12, -1, -1), atol=1e-6)
    assert not students.logits(students(x)).any()
    axes = student_axes(config)
    for seed in config.seed:
        alike = [students.fc_LKMF[:, k] for k, one in enumerate(axes) if one["seed"] == seed]
        assert len(alike) == 6 and all(torch.equal(alike[0], other) for other in alike)
    assert not torch.equal(students.fc_LKMF[:, 0], students.fc_LKMF[:, 1])
