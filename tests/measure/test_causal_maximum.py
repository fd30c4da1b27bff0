"""The largest causal effect at one token: cases worked out by hand, positions, the plain loop."""

import numpy as np
import pytest
import torch
from reference import FAMILIES, largest_effects, run_config
from support.handmade_models import (
    HandMadeModel,
    brackets,
    identity,
    integers,
    known,
    normal,
    residual_mlp,
    tokens_per_pass,
)

from sparsedepth.measure.causal import causal_effect
from sparsedepth.measure.causal_maximum import causal_maximum, choose_positions
from sparsedepth.measure.context import Scored
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def rng(seed=0):
    return np.random.default_rng(seed)


def running_sum(x):
    """A block that reads every earlier token: x_t + x_1 + .. + x_t."""
    return x + x.cumsum(1)


def test_a_maximum_over_tokens_and_sequences():
    """Block 1 adds 1, block 2 multiplies by the stream: u_2 = (x_0 + 1)^2, and x_0^2 without block 1.

    x_0 = 1: 3/4 of the update; x_0 = 3: 7/16; x_0 = 7: 15/64. The first token keeps block 1."""
    blocks = [lambda x: x + 1, lambda x: x + x * x]
    probed = HandMadeModel(blocks, torch.tensor([[1.0], [3.0], [7.0]]), head_DV=torch.ones(1, 3))
    found = causal_maximum(probed, torch.tensor([[0, 1, 2], [0, 2, 0]]), rng(), tokens="current")
    assert found.effects == pytest.approx({(1, 2): 3 / 4}, abs=1e-6)
    assert found.score.value == pytest.approx((7 / 16 + 3 / 4) / 2, abs=1e-6)
    assert found.positions == []


def test_the_layer_on_which_later_blocks_build():
    """Blocks that add 1, add x^2 and add x^2: e_1 and e_2 from the pairs, and the depth score between their layers."""
    blocks = [lambda x: x + 1, lambda x: x + x * x, lambda x: x + x * x]
    probed = HandMadeModel(blocks, torch.tensor([[1.0], [3.0]]), head_DV=torch.ones(1, 2))
    found = causal_maximum(probed, torch.tensor([[0, 0], [0, 0]]), rng(), tokens="current")
    # x: 1, 2, 6, 42. Without block 1: 1, 1, 2, 6, updates 1 of 4 and 4 of 36. Without block 2: 2, then 4 of 36
    effects = {(1, 2): 3 / 4, (1, 3): 32 / 36, (2, 3): 32 / 36}
    assert found.effects == pytest.approx(effects, abs=1e-6)
    first, second = (3 / 4 + 32 / 36) / 2, 32 / 36
    assert found.depth_score.value == pytest.approx((first + 2 * second) / (first + second), abs=1e-6)
    still = causal_maximum(HandMadeModel([identity, identity], normal(5, 4)), integers(5, 3, 14), rng())
    assert still.depth_score.value is None


def test_the_future_reads_nothing_of_blocks_that_work_token_by_token():
    probed = HandMadeModel([residual_mlp(4, seed) for seed in range(3)], normal(5, 4))
    found = causal_maximum(probed, integers(5, 3, 20), rng())
    assert set(found.effects.values()) == {0.0} and found.score.value == 0.0
    assert known(causal_maximum(probed, integers(5, 3, 20), rng(), tokens="current").score.value) > 0.01


def test_what_the_future_reads_of_skipped_tokens():
    """Block 1 adds 1, block 2 sums: token t (from 0) is updated by 2 (t + 1), and each of p - 1 skipped tokens lacks 1.

    The largest share is missing at token p: (p - 1) / (2 (p + 1)); 13 tokens leave p = 8 alone: 7/18."""
    probed = HandMadeModel([lambda x: x + 1, running_sum], torch.ones(2, 1), head_DV=torch.ones(1, 2))
    found = causal_maximum(probed, integers(2, 2, 13), rng())
    assert found.positions == [8]
    assert found.effects == pytest.approx({(1, 2): 7 / 18}, abs=1e-6)
    longer = causal_maximum(probed, integers(2, 2, 29), rng(), n_positions=3)
    assert longer.positions == [8, 16, 24]
    assert longer.effects == pytest.approx({(1, 2): 23 / 50}, abs=1e-6)


def test_skipping_an_identity_has_no_effect_and_a_single_block_no_score():
    found = causal_maximum(HandMadeModel([identity, running_sum], normal(5, 4)), integers(5, 3, 14), rng())
    assert found.effects == {(1, 2): 0.0}
    alone = causal_maximum(HandMadeModel([running_sum], normal(5, 4)), integers(5, 3, 14), rng())
    assert alone.effects == {} and alone.score.value is None


def test_positions():
    assert choose_positions(13, 4, rng()) == [8]
    assert choose_positions(45, 10, rng()) == [8, 16, 24, 32, 40]
    drawn = {tuple(choose_positions(200, 4, rng(seed))) for seed in range(20)}
    assert len(drawn) > 10 and all(len(set(p)) == 4 and sorted(p) == list(p) and max(p) < 196 for p in drawn)
    with pytest.raises(ValueError, match=r"12 tokens have no position .* at least 13"):
        choose_positions(12, 4, rng())


@pytest.mark.parametrize("family", FAMILIES)
def test_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 22)
    future = [largest_effects(model, tokens, 1, p, p) for p in (8, 16)]
    future = {pair: max(effects[pair] for effects in future) for pair in future[0]}
    current = largest_effects(model, tokens, 1, 22, 0)
    probed = ProbedDecoder(model)
    for max_tokens in (1, 50, 8192):
        with tokens_per_pass(max_tokens):
            found = causal_maximum(probed, tokens, rng())
        assert found.effects == pytest.approx(future, rel=1e-4)
        assert brackets(found.score) and known(found.score.value) <= np.mean(list(future.values())) + 1e-6
        with tokens_per_pass(max_tokens):
            found = causal_maximum(probed, tokens, rng(), tokens="current")
        assert found.effects == pytest.approx(current, rel=1e-4)
    assert known(found.score.value) > known(
        causal_effect(probed, Scored.text(torch.nn.functional.pad(tokens, (0, 1))), rng()).score.value
    )
