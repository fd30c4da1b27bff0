"""Layer removal: a case worked out by hand, the choice of ranges, the plain loop."""

import math

import pytest
import torch
from reference import FAMILIES, removal_drops, run_config
from support.handmade_models import (
    HandMadeModel,
    brackets,
    identity,
    integers,
    normal,
    residual_mlp,
    rng,
    tokens_per_pass,
)

from sparsedepth.measure.measurements import Scored
from sparsedepth.measure.removal import block_influence, rank_correlation, removal
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def test_by_hand():
    """x_0 = 1; add 1, double, add 3: 7. What is left without each range, and c(x) = ln(1 + e^x) as the loss of x."""
    blocks = [lambda x: x + 1, lambda x: 2 * x, lambda x: x + 3]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = removal(probed, Scored.text(torch.ones(3, 4, dtype=torch.int64)), rng())
    left = {(1, 1): 5, (2, 2): 5, (3, 3): 4, (1, 2): 4, (2, 3): 2, (1, 3): 1}
    base = math.log(1 + math.exp(7))
    drops = {pair: (math.log(1 + math.exp(x)) - base) / base for pair, x in left.items()}
    assert found.drops == pytest.approx(drops, abs=1e-6)
    single, longer = (found.scores[name].value for name in ("removal_score", "removal_range_score"))
    assert single == pytest.approx((drops[1, 1] + drops[2, 2] + drops[3, 3]) / 3, abs=1e-6)
    assert longer == pytest.approx((drops[1, 2] + drops[2, 3] + drops[1, 3]) / 3, abs=1e-6)


def test_accuracy_lost_and_what_the_cosine_says_of_it():
    """x_0 = -1; add 3, keep, take 1: 1, and token 0 is right where x > 0. Without block 1 it is -2.

    Cosines: -1, 1, 1, so that the ranks of 1 - cosine are 3, 1.5, 1.5 beside 3, 2, 1 of the losses: 1.5 / sqrt(3)."""
    blocks = [lambda x: x + 3, identity, lambda x: x - 1]
    probed = HandMadeModel(blocks, -torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = removal(probed, Scored.text(torch.zeros(3, 4, dtype=torch.int64)), rng())
    assert found.accuracy_lost == {(1, 1): 1, (2, 2): 0, (3, 3): 0, (1, 2): 1, (2, 3): 0, (1, 3): 1}
    assert found.scores["removal_accuracy_lost"].value == pytest.approx(1 / 3)
    assert block_influence(probed, torch.zeros(2, 5, dtype=torch.int64)) == pytest.approx([2, 0, 0], abs=1e-6)
    assert found.cosine_correlation == pytest.approx(1.5 / 3**0.5)
    assert rank_correlation([1, 2, 2, 4], [3, 1, 5, 5]) == pytest.approx(0.5)  # ranks 1 2.5 2.5 4 and 2 1 3.5 3.5
    assert rank_correlation([1, 2, 3], [5, 5, 5]) is None and rank_correlation([1, None, 2], [1, 2, 3]) is None


def test_the_cosine_of_images_is_a_mean_over_patches_not_over_their_numbers():
    blocks = [lambda x: x + 3, identity]
    probed = HandMadeModel(blocks, -torch.ones(2, 1), head_DV=torch.ones(1, 2))
    probed.embed = lambda patches_BTP: -torch.ones(*patches_BTP.shape[:2], 1)
    assert block_influence(probed, torch.zeros(2, 5, 7)) == pytest.approx([2, 0], abs=1e-6)


def test_removing_identities_costs_nothing():
    probed = HandMadeModel([identity, residual_mlp(4, 0), identity, identity], normal(5, 4))
    found = removal(probed, Scored.text(integers(5, 3, 7)), rng())
    for free in ((1, 1), (3, 3), (3, 4), (4, 4)):
        assert found.drops[free] == pytest.approx(0, abs=1e-6)
    assert found.drops[1, 2] == pytest.approx(found.drops[2, 2], abs=1e-6) != 0


def test_a_single_block_has_no_longer_range():
    found = removal(HandMadeModel([residual_mlp(4, 0)], normal(5, 4)), Scored.text(integers(5, 3, 7)), rng())
    assert list(found.drops) == [(1, 1)] and found.scores["removal_score"].value is not None
    assert found.scores["removal_range_score"].value is None


@pytest.mark.parametrize("family", FAMILIES)
def test_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    expected = removal_drops(model, tokens)
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = removal(ProbedDecoder(model), Scored.text(tokens), rng(), None)
        assert found.drops == pytest.approx(expected, abs=1e-5)
        assert brackets(found.scores["removal_score"]) and brackets(found.scores["removal_range_score"])
    some = removal(ProbedDecoder(model), Scored.text(tokens), rng(), 3)
    assert len(some.drops) == 5 + 3 and all((layer, layer) in some.drops for layer in range(1, 6))
    assert some.drops == pytest.approx({pair: expected[pair] for pair in some.drops}, abs=1e-5)
