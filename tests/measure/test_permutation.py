"""Permutation effects: twins, a case worked out by hand, the choice of pairs, the plain loop."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import FAMILIES, permutation_effects, run_config
from toy import ToyStack, brackets, integers, known, normal, residual_mlp

from sparsedepth.measure.permutation import choose_pairs, permutation_effect
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.stack import DecoderStack

TOKENS = integers(5, 3, 7)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_swapping_twins_changes_nothing():
    twin, other = residual_mlp(4, 0), residual_mlp(4, 1)
    found = permutation_effect(ToyStack([twin, other, twin], normal(5, 4)), TOKENS, rng())
    assert found.effects[1, 3] == pytest.approx(0, abs=1e-6)
    assert known(found.effects[1, 2]) > 1e-3


def test_twins_in_a_decoder():
    model = Decoder(run_config())
    model.blocks[3].load_state_dict(model.blocks[1].state_dict())
    found = permutation_effect(DecoderStack(model), integers(40, 3, 17), rng())
    assert found.effects[2, 4] == pytest.approx(0, abs=1e-6)
    assert min(known(effect) for pair, effect in found.effects.items() if pair != (2, 4)) > 1e-6


def test_by_hand():
    """x_0 = 1; add 1 then double: 4; the other way round: 3. With logits (x, 0) the token 1 costs ln(1 + e^x)."""
    stack = ToyStack([lambda x: x + 1, lambda x: 2 * x], torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = permutation_effect(stack, torch.ones(3, 4, dtype=torch.int64), rng())
    base, swapped = math.log(1 + math.e**4), math.log(1 + math.e**3)
    assert found.effects == pytest.approx({(1, 2): (base - swapped) / base}, rel=1e-6)
    assert found.score.value == pytest.approx((base - swapped) / base, rel=1e-6)  # a gain counts as an effect, too
    assert found.n_tokens == 9


def test_a_single_block_has_no_score():
    found = permutation_effect(ToyStack([residual_mlp(4, 0)], normal(5, 4)), TOKENS, rng())
    assert (found.effects, found.score.value, found.score.lo) == ({}, None, None)


@given(n_layers=st.integers(1, 9), n_pairs=st.integers(1, 50), seed=st.integers(0, 99))
def test_pairs_are_a_sample_without_replacement(n_layers, n_pairs, seed):
    every = list(itertools.combinations(range(1, n_layers + 1), 2))
    assert choose_pairs(n_layers, None, rng()) == every
    chosen = choose_pairs(n_layers, n_pairs, rng(seed))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(every)
    assert len(chosen) == min(n_pairs, len(every))
    assert chosen == choose_pairs(n_layers, n_pairs, rng(seed))


def test_every_pair_is_as_likely():
    drawn = [pair for seed in range(600) for pair in choose_pairs(4, 2, rng(seed))]
    assert all(150 < drawn.count(pair) < 250 for pair in itertools.combinations(range(1, 5), 2))  # 200 expected, sd 12


@pytest.mark.parametrize("family", FAMILIES)
def test_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    expected = permutation_effects(model, tokens)
    for max_tokens in (1, 40, 8192):
        found = permutation_effect(DecoderStack(model), tokens, rng(), None, max_tokens)
        assert found.effects == pytest.approx(expected, abs=1e-5)
        assert found.score.value == pytest.approx(np.mean(list(expected.values())), abs=1e-5)
    some = permutation_effect(DecoderStack(model), tokens, rng(), 4)
    assert some.effects == pytest.approx({pair: expected[pair] for pair in some.effects}, abs=1e-5)
    assert len(some.effects) == 4 and brackets(some.score)
