"""Participation ratio: hand-made spectra, the plain eigenvalues, and what it must not see."""

import numpy as np
import pytest
import torch
from reference import run_config, states
from stacks import ToyStack, identity, integers

from sparsedepth.measure.participation import participation
from sparsedepth.measure.variance import residual_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.stack import DecoderStack

CROSS_VD = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [0, -1, 0, 0]])
"""Four tokens on two axes: C = diag(1/2, 1/2, 0, 0)."""
EACH_ONCE = torch.tensor([[0, 1], [2, 3]])


def test_by_hand():
    """diag(1/2, 1/2): (1)^2 / (1/4 + 1/4) = 2. Three times the first axis: diag(9/2, 1/2), 25 / (81/4 + 1/4) = 50/41.
    One axis alone: 1. No variance: none."""
    triple, first = (lambda x: x * torch.tensor([3.0, 1, 1, 1])), (lambda x: x * torch.tensor([1.0, 0, 0, 0]))
    found = participation(ToyStack([triple, first], CROSS_VD), EACH_ONCE)
    assert found.by_layer == pytest.approx([2, 50 / 41, 1], rel=1e-12)
    assert found.mean == pytest.approx((50 / 41 + 1) / 2) and found.n_tokens == 4
    gone = participation(ToyStack([identity, lambda x: 0 * x + 0.1], CROSS_VD), EACH_ONCE)
    assert gone.by_layer == [pytest.approx(2), pytest.approx(2), None] and gone.mean is None


def test_growth_shifts_and_rotations_change_nothing_and_a_direction_that_takes_over_does():
    """Residual variance sees growth alike, whether all directions grow or one: here they differ."""
    turn_DD = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    embedding_VD, tokens = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), integers(50, 6, 20)
    same = participation(ToyStack([lambda x: 5 * x, lambda x: x @ turn_DD, lambda x: x + 100], embedding_VD), tokens)
    assert same.by_layer == pytest.approx([same.by_layer[0]] * 4, rel=1e-4)
    one = torch.tensor([5.0] + [1] * 7)
    stack = ToyStack([lambda x: x * one, lambda x: x * one], embedding_VD)
    taken = participation(stack, tokens).by_layer
    variance = residual_variance(stack, tokens, np.random.default_rng(0)).by_layer
    assert taken == sorted(taken, reverse=True) and taken[2] == pytest.approx(1, abs=0.1) and taken[0] > 5
    assert variance == sorted(variance)


def test_equal_directions_of_few_tokens():
    """n independent tokens of D equal directions: 1 / ratio is 1 / D + 1 / n."""
    n_tokens, width = 400, 32
    embedding_VD = torch.randn(n_tokens, width, generator=torch.Generator().manual_seed(0))
    found = participation(ToyStack([identity], embedding_VD), torch.arange(n_tokens)[None])
    assert 1 / found.by_layer[0] == pytest.approx(1 / width + 1 / n_tokens, rel=0.03)


def test_against_eigenvalues_under_any_budget():
    model, tokens = Decoder(run_config(depth_scale="lns")), integers(40, 5, 16)
    spectra = [torch.linalg.eigvalsh(x.flatten(0, 1).double().T.cov(correction=0)) for x in states(model, tokens)]
    expected = [(values.sum() ** 2 / values.square().sum()).item() for values in spectra]
    for max_tokens in (1, 40, 8192):
        found = participation(DecoderStack(model), tokens, max_tokens)
        assert found.by_layer == pytest.approx(expected, rel=1e-6)
