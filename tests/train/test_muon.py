"""Muon in batches: the weights and momenta of PyTorch's own step, for every shape, with far fewer operations."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedepth.train.optimizer import MOMENTUM, BatchedMuon, orthogonalised

SHAPES = [(16, 16), (8, 16), (24, 16), (16, 24), (16, 16)]


def made(kind, n_layers: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    draws = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=draws)) for _ in range(n_layers) for shape in SHAPES]
    optimizer = kind(weights, lr=0.02, momentum=MOMENTUM, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    return weights, optimizer


def give_gradients(weights: list[nn.Parameter], step: int) -> None:
    draws = torch.Generator().manual_seed(1 + step)
    for number, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape, generator=draws) if number != 3 else None  # one without a gradient


@pytest.mark.parametrize("limit", [1, 2 * 16 * 16 * 2, 2**28])
def test_a_batched_step_is_pytorchs_own(monkeypatch, limit):
    monkeypatch.setattr("sparsedepth.train.optimizer.BATCH_BYTES", limit)
    weights, batched = made(BatchedMuon, 3)
    expected, plain = made(torch.optim.Muon, 3)
    for step in range(4):
        give_gradients(weights, step)
        give_gradients(expected, step)
        batched.step_group(batched.param_groups[0])
        plain.step()
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, atol=2e-3, rtol=0)  # O in bf16 differs in its last digit
        if weight.grad is not None:
            momenta = batched.state[weight]["momentum_buffer"], plain.state[other]["momentum_buffer"]
            torch.testing.assert_close(*momenta)
    assert torch.equal(weights[3], made(BatchedMuon, 3)[0][3])


def test_each_matrix_of_a_batch_is_orthogonalised_by_itself():
    x_nRC = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
    together = orthogonalised(x_nRC * torch.tensor([1e-3, 1, 1e3])[:, None, None], (3.4445, -4.775, 2.0315), 5, 1e-7)
    for x_RC, o_RC in zip(x_nRC, together.float(), strict=True):
        values = torch.linalg.svdvals(o_RC)
        assert values.min() > 0.6 and values.max() < 1.3  # five steps bring all singular values near 1
        assert (x_RC * o_RC).sum() > 0.7 * torch.linalg.svdvals(x_RC).sum()  # U V' has the largest such product


def test_on_a_cpu_the_step_is_pytorchs_to_the_last_bit():
    weights, batched = made(BatchedMuon, 1)
    expected, plain = made(torch.optim.Muon, 1)
    for each in (weights, expected):
        give_gradients(each, 0)
    batched.step()
    plain.step()
    assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))


class Counted(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **kwargs or {})


def test_operations_do_not_grow_with_layers():
    """Four shapes: 5 steps of three products each, and what stacks and adds them."""

    def operations(n_layers: int) -> int:
        weights, batched = made(BatchedMuon, n_layers)
        give_gradients(weights, 0)
        batched.step_group(batched.param_groups[0])
        with Counted() as counted:
            batched.step_group(batched.param_groups[0])
        return counted.n

    few, many = operations(4), operations(24)
    assert few == many < 200, (few, many)
