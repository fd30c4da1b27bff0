"""Permutation effects: twins, a case worked out by hand, the choice of pairs, the plain loop."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import FAMILIES, permutation_effects, run_config
from support.handmade_models import HandMadeModel, brackets, integers, known, normal, residual_mlp, rng, tokens_per_pass

from sparsedepth.measure import permutation
from sparsedepth.measure.bootstrap import bootstrap
from sparsedepth.measure.loss import fork_losses
from sparsedepth.measure.measurements import Scored
from sparsedepth.measure.permutation import choose_pairs, pair_interval, permutation_effect
from sparsedepth.measure.removal import choose_ranges
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import swap
from sparsedepth.probe.probed_model import ProbedDecoder

TOKENS = integers(5, 3, 7)


def test_swapping_twins_changes_nothing():
    twin, other = residual_mlp(4, 0), residual_mlp(4, 1)
    found = permutation_effect(HandMadeModel([twin, other, twin], normal(5, 4)), Scored.text(TOKENS), rng())
    assert found.effects[1, 3] == pytest.approx(0, abs=1e-6)
    assert known(found.effects[1, 2]) > 1e-3


@given(n_layers=st.integers(1, 9), n_pairs=st.integers(1, 50), seed=st.integers(0, 99))
@pytest.mark.parametrize("choose", [choose_pairs, choose_ranges])
def test_pairs_and_ranges_are_a_sample_without_replacement(choose, n_layers, n_pairs, seed):
    every = list(itertools.combinations(range(1, n_layers + 1), 2))
    assert choose(n_layers, None, rng()) == every and choose_ranges(n_layers, 0, rng()) == []
    chosen = choose(n_layers, n_pairs, rng(seed))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(every)
    assert len(chosen) == min(n_pairs, len(every))
    assert chosen == choose(n_layers, n_pairs, rng(seed))


def test_every_pair_is_as_likely():
    drawn = [pair for seed in range(600) for pair in choose_pairs(4, 2, rng(seed))]
    assert all(150 < drawn.count(pair) < 250 for pair in itertools.combinations(range(1, 5), 2))  # 200 expected, sd 12


@pytest.mark.parametrize("family", FAMILIES)
def test_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    expected = permutation_effects(model, tokens)
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = permutation_effect(ProbedDecoder(model), Scored.text(tokens), rng(), None)
        assert found.effects == pytest.approx(expected, abs=1e-5)
        assert found.score.value == pytest.approx(np.mean(list(expected.values())), abs=1e-5)
    some = permutation_effect(ProbedDecoder(model), Scored.text(tokens), rng(), 4)
    assert some.effects == pytest.approx({pair: expected[pair] for pair in some.effects}, abs=1e-5)
    assert len(some.effects) == 4 and brackets(some.score)
    neighbours = permutation_effect(ProbedDecoder(model), Scored.text(tokens), rng(), neighbours=True)
    pairs = [(layer, layer + 1) for layer in range(1, 5)]
    assert neighbours.effects == pytest.approx({pair: expected[pair] for pair in pairs}, abs=1e-5)


def test_the_lower_end_is_lowered_by_twice_what_noise_adds_to_the_mean():
    probed = HandMadeModel([residual_mlp(4, seed, 0.8) for seed in range(3)], normal(5, 4))
    scored = Scored.text(integers(5, 6, 7))
    base_N, swapped_NP = fork_losses(probed, scored, [swap(1, 2), swap(1, 3), swap(2, 3)])

    def mean_effect(swapped_RP, base_R):
        return np.abs(swapped_RP / base_R[:, None] - 1).mean(-1)

    plain = bootstrap(mean_effect, swapped_NP, base_N, rng=rng())
    found = permutation_effect(probed, scored, rng()).score
    assert 0.003 < plain.excess < plain.lo / 2
    assert (found.value, found.lo, found.hi) == pytest.approx((plain.value, plain.lo - 2 * plain.excess, plain.hi))


def planted(kind, pairs, generator):
    """Effects of all pairs of 24 blocks."""
    spread = {"skewed": 1.0, "even": 0.5}.get(kind, 0.3)
    effects = np.exp(spread * generator.normal(size=len(pairs)))
    first = np.array([a for a, _ in pairs])
    return effects * {"first block": np.where(first == 1, 10, 1), "decay": np.exp(-0.2 * first)}.get(kind, 1)


@pytest.mark.parametrize("kind", ["skewed", "even", "first block", "decay"])
@pytest.mark.parametrize("n_pairs", [16, 32])
def test_the_interval_of_sampled_pairs_covers_the_mean_of_all(kind, n_pairs):
    every = choose_pairs(24, None, rng())
    covered, means, truths = [], [], []
    for seed in range(400):
        effects = dict(zip(every, planted(kind, every, rng(seed + 1000)), strict=True))
        sample = np.array([effects[pair] for pair in choose_pairs(24, n_pairs, rng(seed))])
        lo, hi = pair_interval(sample, len(every))
        truths.append(np.mean(list(effects.values())))
        covered.append(lo <= truths[-1] <= hi)
        means.append(sample.mean())
    assert np.mean(covered) >= 0.945
    error = np.array(means) - truths
    assert abs(error.mean()) < 4 * error.std() / 400**0.5  # unbiased


def test_the_interval_of_sampled_pairs_by_hand():
    """Mean 2, sd 1, n = 3 of 12: relative error sqrt(0.75 / 3) / 2 = 1/4; times 2.8: a factor e^0.7."""
    assert pair_interval(np.array([1.0, 2.0, 3.0]), 12) == pytest.approx((2 * math.exp(-0.7), 2 * math.exp(0.7)))
    assert pair_interval(np.zeros(3), 12) == (0.0, 0.0)


def test_sampling_pairs_widens_the_interval_and_one_pair_has_none():
    probed, tokens = HandMadeModel([residual_mlp(4, seed) for seed in range(6)], normal(5, 4)), integers(5, 8, 7)
    every, some = (permutation_effect(probed, Scored.text(tokens), rng(), n).score for n in (None, 8))
    assert known(some.lo) <= known(every.value) <= known(some.hi)
    assert known(some.hi) - known(some.lo) > known(every.hi) - known(every.lo)
    single = permutation_effect(probed, Scored.text(tokens), rng(), 1).score
    assert single.value is not None and (single.lo, single.hi) == (None, None)


def test_neighbours_by_hand():
    """x_0 = 1; add 1, double, add 1: 5; swapped 1-2: 4, swapped 2-3: 6. The loss of x is ln(1 + e^x)."""
    blocks = [lambda x: x + 1, lambda x: 2 * x, lambda x: x + 1]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = permutation_effect(probed, Scored.text(torch.ones(3, 4, dtype=torch.int64)), rng(), neighbours=True)
    cost = {x: math.log(1 + math.exp(x)) for x in (4, 5, 6)}
    expected = {(1, 2): (cost[5] - cost[4]) / cost[5], (2, 3): (cost[6] - cost[5]) / cost[5]}
    assert found.effects == pytest.approx(expected, abs=1e-6)
    assert found.score.value == pytest.approx(sum(expected.values()) / 2, abs=1e-6)  # a gain counts as an effect, too


def test_the_interval_of_many_small_effects_reaches_down_to_their_mean(monkeypatch):
    """66 pairs whose effects are of the size of their noise: resamples of absolute values lie above the true mean."""
    draws, covered = rng(), []
    true_P = np.exp(draws.normal(math.log(0.02), 1.5, 66))
    for _ in range(40):
        swapped_NP = 1 + true_P + 0.01 * math.sqrt(32) * draws.normal(size=(32, 66))
        monkeypatch.setattr(permutation, "fork_losses", lambda *_, swapped_NP=swapped_NP: (np.ones(32), swapped_NP))
        found = permutation_effect(SimpleNamespace(n_layers=12), Scored.text(integers(5, 3, 7)), draws).score
        covered.append(known(found.lo) <= true_P.mean() <= known(found.hi))
    assert np.mean(covered) >= 0.85  # without lowering: .45
