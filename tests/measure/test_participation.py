"""Participation ratio and effective rank: hand-made spectra, the plain eigenvalues, and what they must not see."""

import math

import numpy as np
import pytest
import torch
from reference import run_config, states
from support.handmade_models import HandMadeModel, identity, integers, tokens_per_pass

from sparsedepth.measure.participation import participation
from sparsedepth.measure.variance import residual_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder

CROSS_VD = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [0, -1, 0, 0]])
"""Four tokens on two axes: C = diag(1/2, 1/2, 0, 0)."""
EACH_ONCE = torch.tensor([[0, 1], [2, 3]])


def ratios(found):
    return found["participation_ratio"]


def test_by_hand():
    """diag(1/2, 1/2): (1)^2 / (1/4 + 1/4) = 2. Three times the first axis: diag(9/2, 1/2), 25 / (81/4 + 1/4) = 50/41.
    One axis alone: 1. No variance: none. Effective ranks: of shares 1/2, 1/2: 2; of shares 9/10, 1/10: exp(H). Block 1
    adds 2 on the first axis, one direction; block 2 takes the second away, another: ranks of updates 1 and 1."""
    triple, first = (lambda x: x * torch.tensor([3.0, 1, 1, 1])), (lambda x: x * torch.tensor([1.0, 0, 0, 0]))
    found = participation(HandMadeModel([triple, first], CROSS_VD), EACH_ONCE)
    assert ratios(found) == pytest.approx([2, 50 / 41, 1], rel=1e-12)
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert found["effective_rank"] == pytest.approx([2, math.exp(entropy), 1], rel=1e-9)
    assert found["update_rank"] == pytest.approx([1, 1], rel=1e-9)
    gone = participation(HandMadeModel([identity, lambda x: 0 * x + 0.1], CROSS_VD), EACH_ONCE)
    assert ratios(gone) == [pytest.approx(2), pytest.approx(2), None] and gone["update_rank"][0] is None
    both = participation(HandMadeModel([lambda x: 2 * x], CROSS_VD), EACH_ONCE)
    assert both["update_rank"][0] == pytest.approx(2)


def test_growth_shifts_and_rotations_change_nothing_and_a_direction_that_takes_over_does():
    """Residual variance sees growth alike, whether all directions grow or one: here they differ."""
    turn_DD = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    embedding_VD, tokens = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), integers(50, 6, 20)
    blocks = [lambda x: 5 * x, lambda x: x @ turn_DD, lambda x: x + 100]
    same = participation(HandMadeModel(blocks, embedding_VD), tokens)
    assert ratios(same) == pytest.approx([ratios(same)[0]] * 4, rel=1e-4)
    one = torch.tensor([5.0] + [1] * 7)
    probed = HandMadeModel([lambda x: x * one, lambda x: x * one], embedding_VD)
    taken = ratios(participation(probed, tokens))
    variance = residual_variance(probed, tokens, np.random.default_rng(0))["residual_variance"].by_layer
    assert taken == sorted(taken, reverse=True) and taken[2] == pytest.approx(1, abs=0.1) and taken[0] > 5
    assert variance == sorted(variance)


def test_against_eigenvalues_under_any_budget():
    model, tokens = Decoder(run_config(depth_scale="lns")), integers(40, 5, 16)
    spectra = [torch.linalg.eigvalsh(x.flatten(0, 1).double().T.cov(correction=0)) for x in states(model, tokens)]
    expected = [(values.sum() ** 2 / values.square().sum()).item() for values in spectra]
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = participation(ProbedDecoder(model), tokens)
        assert ratios(found) == pytest.approx(expected, rel=1e-6)
        assert all(np.array(found["effective_rank"]) >= ratios(found))
