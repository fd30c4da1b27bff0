"""Expert use: loads worked out by hand, a plain loop over tokens, budgets, dense models."""

import math

import numpy as np
import pytest
import torch
from reference import expert_loads, run_config
from support.handmade_models import HandMadeModel, brackets, identity, integers, normal, rng, tokens_per_pass

from sparsedepth.measure.experts import effective_experts, expert_use, variation
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def model_of(*routings):
    probed = HandMadeModel([identity] * len(routings), normal(5, 4))
    probed.routing_of = routings
    return probed


def always(probabilities, *choices):
    """A router that gives every token the same probabilities and choices."""

    def routing(x_BTD):
        shape = x_BTD.shape[:2]
        return torch.tensor(probabilities).expand(*shape, -1), torch.tensor(choices).expand(*shape, -1)

    return routing


def in_turn(x_BTD):
    """Token t goes to expert t mod 4, for certain."""
    choice_BT = (torch.arange(x_BTD.shape[1]) % 4).expand(x_BTD.shape[0], -1)
    return torch.nn.functional.one_hot(choice_BT, 4).float(), choice_BT[..., None]


def test_collapsed_balanced_and_sure_and_unsure_by_hand():
    collapsed = always([0.25, 0.25, 0.25, 0.25], 2)  # unsure, but always the same choice
    halves = always([0.5, 0.5, 0.0, 0.0], 0, 1)
    found = expert_use(model_of(collapsed, in_turn, halves, lambda x: None), integers(5, 3, 8), rng())
    assert found["effective_experts"].by_layer == [pytest.approx(1), pytest.approx(4), pytest.approx(2), None]
    assert found["expert_load_variation"].by_layer == [pytest.approx(3**0.5), pytest.approx(0), pytest.approx(1), None]
    assert found["router_entropy"].by_layer == [pytest.approx(math.log(4)), 0.0, pytest.approx(math.log(2)), None]
    assert found["effective_experts"].score.value == pytest.approx(7 / 3)
    assert found["expert_load_variation"].score.value == pytest.approx((3**0.5 + 1) / 3)
    assert found["router_entropy"].score.value == pytest.approx(math.log(8) / 3)


def test_the_load_of_resamples_is_pooled_before_its_entropy():
    assert effective_experts(np.array([[0.5, 0.5], [1.0, 0.0]])) == pytest.approx([2, 1])
    assert variation(np.array([[0.5, 0.5], [1.0, 0.0]])) == pytest.approx([0, 1])


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_k": 1, "depth_scale": "lns", "renormalise_gates": False}])
def test_against_a_plain_loop_under_any_budget(fields):
    model = Decoder(run_config(n_experts=4, d_expert=24, **fields))
    tokens = integers(40, 3, 16)
    for max_tokens in (1, 8192):
        with tokens_per_pass(max_tokens):
            found = expert_use(ProbedDecoder(model), tokens, rng())
        for layer in range(1, 6):
            load, entropy = expert_loads(model, tokens, layer)
            assert found["effective_experts"].by_layer[layer - 1] == pytest.approx(effective_experts(np.array(load)))
            assert found["expert_load_variation"].by_layer[layer - 1] == pytest.approx(variation(np.array(load)))
            assert found["router_entropy"].by_layer[layer - 1] == pytest.approx(entropy, rel=1e-5)
    assert brackets(found["effective_experts"].score) and brackets(found["router_entropy"].score)
