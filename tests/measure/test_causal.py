"""Causal effects: models whose effects are known, undefined cases, the plain loop."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import FAMILIES, causal_effects, run_config, skip_increases
from support.handmade_models import (
    HandMadeModel,
    brackets,
    identity,
    integers,
    known,
    normal,
    residual_mlp,
    rng,
    tokens_per_pass,
)

from sparsedepth.measure.causal import add_rows, causal_effect
from sparsedepth.measure.measurements import Measurements, Scored
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder

TOKENS = integers(5, 3, 7)


def test_skipping_an_identity_block_has_no_effect():
    probed = HandMadeModel([residual_mlp(4, 0), identity, residual_mlp(4, 2), residual_mlp(4, 3)], normal(5, 4))
    found = causal_effect(probed, Scored.text(TOKENS), rng())
    assert found.effects[2, 3] == pytest.approx(0, abs=1e-6) and found.effects[2, 4] == pytest.approx(0, abs=1e-6)
    assert found.by_layer[1] == pytest.approx(0, abs=1e-6)
    assert found.skip_increase[1] == pytest.approx(0, abs=1e-6)
    assert known(found.effects[1, 3]) > 0.01 and found.effects[1, 2] == 0.0  # an identity block is not affected either


def test_blocks_that_ignore_the_stream_do_not_affect_one_another():
    probed = HandMadeModel([lambda x, step=step: x + step for step in (1.0, 2.0, 4.0)], normal(5, 4))
    found = causal_effect(probed, Scored.text(TOKENS), rng())
    assert found.score.value == pytest.approx(0, abs=1e-6)


def test_doubling_blocks_halve_every_later_update():
    """u_l = x_(l-1) = 2^(l-1) x_0, and half of that without block s: every effect is 1/2, and so is the score."""
    probed = HandMadeModel([lambda x: 2 * x] * 4, normal(5, 4))
    found = causal_effect(probed, Scored.text(TOKENS), rng())
    assert found.effects == pytest.approx({(s, later): 0.5 for s in range(1, 5) for later in range(s + 1, 5)})
    assert (found.score.value, found.score.lo, found.score.hi) == pytest.approx((0.5, 0.5, 0.5))
    assert found.by_layer[:3] == pytest.approx([0.5] * 3) and found.by_layer[3] is None


def test_it_is_a_ratio_of_means_over_tokens_not_a_mean_of_ratios():
    """Block 1 adds 1, block 2 multiplies by the stream: u_2 = x_1^2, without block 1 x_0^2. With x_0 = 1 and 3:
    |1 - 4| + |9 - 16| over 4 + 16 = 1/2; the mean of ratios would be 0.594."""
    probed = HandMadeModel(
        [lambda x: x + 1, lambda x: x + x * x], torch.tensor([[1.0], [3.0]]), head_DV=torch.ones(1, 2)
    )
    found = causal_effect(probed, Scored.text(torch.tensor([[0, 1, 0]])), rng())
    assert found.effects == pytest.approx({(1, 2): 0.5})


def test_an_effect_on_a_block_that_adds_nothing_is_undefined_not_infinite():
    """Block 2 adds relu(3/2 - x): nothing at x_1 = 2, but 1/2 without block 1."""
    blocks = [lambda x: x + 1, lambda x: x + torch.relu(1.5 - x), lambda x: 2 * x]
    found = causal_effect(HandMadeModel(blocks, torch.ones(5, 4)), Scored.text(TOKENS), rng())
    assert found.effects[1, 2] is None and found.effects[2, 3] == 0.0
    assert found.by_layer[0] is None and found.score.value is None and found.score.lo is None


@pytest.mark.parametrize(("threshold", "share"), [(0.01, 0.5), (0.2, 0.25), (9.0, 0.0)])
def test_a_block_is_useful_if_skipping_it_costs_more_than_the_runs_threshold(threshold, share):
    """A loss of ln(1 + e^-x) at x = 1 + 1 + .1; without block 1 at 1.1, 2.5 times as much, without 2 at 2, 1.1."""
    blocks = [lambda x: x + 1.0, lambda x: x + 0.1, identity, identity]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    scored, rows = Scored.text(torch.zeros(3, 4, dtype=torch.int64)), Measurements(step=0)
    config = SimpleNamespace(usefulness_threshold=threshold)
    add_rows(SimpleNamespace(probed=probed, scored=scored, rng=rng, config=config, n_tokens=9), rows)
    losses = [math.log(1 + math.exp(-x)) for x in (2.1, 1.1, 2.0)]
    increases = [row["value"] for row in rows.layers if row["metric"] == "skip_loss_increase"]
    assert increases == pytest.approx([losses[1] / losses[0] - 1, losses[2] / losses[0] - 1, 0, 0], abs=1e-6)
    assert rows.summary["usefulness_identity"] == share


@pytest.mark.parametrize("family", FAMILIES)
def test_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    expected = causal_effects(model, tokens[:, :-1])
    skipped = skip_increases(model, tokens)
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = causal_effect(ProbedDecoder(model), Scored.text(tokens), rng())
        assert found.effects == pytest.approx(expected, rel=1e-5)
        assert found.score.value == pytest.approx(np.mean(list(expected.values())), rel=1e-5)
        assert found.skip_increase == pytest.approx(skipped, abs=1e-6)
        assert found.by_layer[1] == pytest.approx(np.mean([expected[2, later] for later in (3, 4, 5)]), rel=1e-5)
        assert brackets(found.score)
