"""Erasing what stands at a token's place: by hand, where nobody looks back, against plain passes."""

import math

import numpy as np
import pytest
import torch
from reference import FAMILIES, run_config, states
from support.handmade_models import HandMadeModel, brackets, integers, normal, residual_mlp, tokens_per_pass

from sparsedepth.measure.erasure import erasure
from sparsedepth.model.decoder import Block, Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def rng():
    return np.random.default_rng(0)


def seen(x):
    """A block whose tokens read the one at place 1, later ones alone."""
    read = torch.zeros_like(x)
    read[:, 2:] = x[:, 1:2]
    return x + read


def test_by_hand():
    """Five tokens of states 1, 6, 1, 1, 1, mean 2; places 0, 1, 2, 3 are erased. In block 1 later tokens read place 1.

    Logits (x, 0) give p_0 = sigmoid(x); tokens 2..4 read 1 + 6, and 1 + 2 once it is erased: the distance is sqrt(2) of
    the difference. Block 2 looks at its own place alone, so that after block 1 nothing is read any more."""
    probed = HandMadeModel([seen, lambda x: x], torch.tensor([[1.0], [6.0]]), torch.tensor([[1.0, 0.0]]))
    found = erasure(probed, torch.tensor([[0, 1, 0, 0, 0]]), rng())

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    effect = math.sqrt(2) * (sigmoid(7) - sigmoid(3))
    assert found.effect == pytest.approx(np.array([[0, effect, 0, 0], [0, 0, 0, 0]]), abs=1e-6)
    assert found.score.value == pytest.approx(effect / 6, abs=1e-6)  # 2 layers, 3 places
    assert found.late_share.value == 0


def test_what_is_read_late_is_late():
    probed = HandMadeModel([lambda x: x, seen], torch.tensor([[1.0], [6.0]]), torch.tensor([[1.0, 0.0]]))
    found = erasure(probed, torch.tensor([[0, 1, 0, 0, 0]]), rng())
    assert found.effect[0] == pytest.approx(found.effect[1]) and found.late_share.value == pytest.approx(1 / 2)


def test_where_nobody_looks_back_nothing_is_missed():
    found = erasure(HandMadeModel([residual_mlp(4, seed) for seed in range(3)], normal(5, 4)), integers(5, 3, 9), rng())
    assert not found.effect.any() and found.score.value == 0 and found.late_share.value is None


@pytest.mark.parametrize("family", FAMILIES)
def test_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])).eval(), integers(40, 3, 13)
    recorded = [x.float() for x in states(model, tokens)]
    expected = np.empty((5, 4))
    with torch.no_grad():
        before = model.logits(recorded[-1]).softmax(-1)
        for layer in range(5):
            for i, place in enumerate((0, 3, 6, 9)):
                x = recorded[layer].clone()
                x[:, place] = recorded[layer].mean((0, 1))
                for block in model.blocks[layer:]:
                    assert isinstance(block, Block)
                    x = block(x, model.rotary(13))
                distance = (model.logits(x).softmax(-1) - before).norm(dim=-1)
                assert not distance[:, :place].any()  # causal
                expected[layer, i] = distance[:, place + 1 :].mean()
    for max_tokens in (1, 40, 8192):
        with tokens_per_pass(max_tokens):
            found = erasure(ProbedDecoder(model), tokens, rng())
        assert found.effect == pytest.approx(expected, abs=1e-5)
        assert brackets(found.score) and brackets(found.late_share)
