"""Held-out loss: values worked out by hand, and the plain loop."""

import math

import numpy as np
import pytest
import torch
from handmade import HandMadeModel, identity, integers, normal
from reference import FAMILIES, loss, run_config

from sparsedepth.measure import loss as module
from sparsedepth.measure.context import Scored
from sparsedepth.measure.loss import bits_per_byte, fork_losses, held_out_loss, relative_change
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import skip
from sparsedepth.probe.probed_model import ProbedDecoder


def rng():
    return np.random.default_rng(0)


def test_equal_logits_cost_ln_of_the_vocabulary():
    probed = HandMadeModel([identity], normal(7, 3), head_DV=torch.zeros(3, 7))
    found = held_out_loss(probed, Scored.text(integers(7, 4, 11)), rng())
    assert found.loss.value == pytest.approx(math.log(7), abs=1e-6)
    assert found.n_tokens == 40  # 4 sequences of 10, each with its last target
    assert found.loss.n_sequences == 4


def test_each_position_is_scored_on_the_next_token():
    head = torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0]])  # p(1 | 0) = 3/4, p(0 | 1) = 4/5
    probed = HandMadeModel([identity], torch.eye(2), head_DV=head)
    base_N, changed_NF = fork_losses(probed, Scored.text(torch.tensor([[0, 1, 0], [0, 0, 1]])), [])
    by_hand = [-math.log(3 / 4) - math.log(4 / 5), -math.log(1 / 4) - math.log(3 / 4)]
    np.testing.assert_allclose(base_N, np.array(by_hand) / 2, atol=1e-6)
    assert changed_NF.shape == (2, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_plain_loop(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 4, 17)
    probed = ProbedDecoder(model)
    assert held_out_loss(probed, Scored.text(tokens), rng()).loss.value == pytest.approx(loss(model, tokens), rel=1e-6)
    _, changed_NF = fork_losses(probed, Scored.text(tokens), [skip(2)])
    assert changed_NF.mean() == pytest.approx(loss(model, tokens, [1, None, 3, 4, 5]), rel=1e-6)


def test_no_result_depends_on_how_the_work_is_cut(monkeypatch):
    probed, tokens = ProbedDecoder(Decoder(run_config())), integers(40, 5, 17)
    forks = [skip(layer) for layer in (5, 1, 3)]
    whole = fork_losses(probed, Scored.text(tokens), forks)
    monkeypatch.setattr(module, "MAX_LOGITS", 40 * 7)  # 7 positions at a time: across sequences and forks
    for max_tokens in (1, 40, 100):
        for one, other in zip(fork_losses(probed, Scored.text(tokens), forks, max_tokens), whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_logits_in_memory_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 100)
    probed, sizes = HandMadeModel([identity], normal(7, 3)), []
    monkeypatch.setattr(probed, "logits", lambda x: sizes.append((x @ probed.head_DV).numel()) or x @ probed.head_DV)
    held_out_loss(probed, Scored.text(integers(7, 5, 20)), rng())
    assert max(sizes) <= 100 and sum(sizes) == 5 * 19 * 7


def test_bits_per_byte():
    assert bits_per_byte(math.log(2), 1.0) == pytest.approx(1.0)  # one bit per token, one byte per token
    assert bits_per_byte(8 * math.log(2), 4.0) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="bytes_per_token=0"):
        bits_per_byte(1.0, 0)


def test_change_relative_to_no_loss_is_undefined():
    found = relative_change(np.array([3.0, 1.0, 1.0]), np.array([2.0, 2.0, 0.0]))
    np.testing.assert_array_equal(found, [0.5, -0.5, math.nan])
