"""Causal effects: models whose effects are known, undefined cases, the plain loop.

Permutation effects: twins, a case worked out by hand, the choice of pairs, the plain loop.

Layer removal: a case worked out by hand, the choice of ranges, the plain loop.
"""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from reference import FAMILIES, causal_effects, permutation_effects, removal_drops, run_config, skip_increases
from support.handmade_models import (
    HandMadeModel,
    brackets,
    by_layer,
    by_pair,
    ends,
    found_by,
    identity,
    integers,
    known,
    normal,
    residual_mlp,
    rng,
    score,
    scored_text,
    tokens_per_pass,
)

from sparsedepth.measure import interventions
from sparsedepth.measure.bootstrap import bootstrap
from sparsedepth.measure.interventions import (
    add_causal_rows,
    add_removal_rows,
    block_influence,
    choose_pairs,
    pair_interval,
    permutation_effect,
    rank_correlation,
)
from sparsedepth.measure.loss import fork_losses
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder

TOKENS = integers(5, 3, 7)


def causal(probed, tokens=TOKENS, threshold=0.1):
    return found_by(add_causal_rows, probed, scored_text(tokens), usefulness_threshold=threshold)


def effects(found):
    return by_pair(found, "causal_effect")


def removal(probed, tokens, n_ranges=None):
    return found_by(add_removal_rows, probed, scored_text(tokens), removal_ranges=n_ranges)


def drops(found):
    return by_pair(found, "removal_drop")


def test_skipping_an_identity_block_has_no_effect():
    probed = HandMadeModel([residual_mlp(4, 0), identity, residual_mlp(4, 2), residual_mlp(4, 3)], normal(5, 4))
    found = causal(probed)
    assert effects(found)[2, 3] == pytest.approx(0, abs=1e-6) and effects(found)[2, 4] == pytest.approx(0, abs=1e-6)
    assert by_layer(found, "causal_effect")[1] == pytest.approx(0, abs=1e-6)
    assert by_layer(found, "skip_loss_increase")[1] == pytest.approx(0, abs=1e-6)
    assert known(effects(found)[1, 3]) > 0.01
    assert effects(found)[1, 2] == 0.0  # an identity block is not affected either


def test_blocks_that_ignore_the_stream_do_not_affect_one_another():
    probed = HandMadeModel([lambda x, step=step: x + step for step in (1.0, 2.0, 4.0)], normal(5, 4))
    found = causal(probed)
    assert found.summary["causal_score"] == pytest.approx(0, abs=1e-6)


def test_doubling_blocks_halve_every_later_update():
    """u_l = x_(l-1) = 2^(l-1) x_0, and half of that without block s: every effect is 1/2, and so is the score."""
    probed = HandMadeModel([lambda x: 2 * x] * 4, normal(5, 4))
    found = causal(probed)
    assert effects(found) == pytest.approx({(s, later): 0.5 for s in range(1, 5) for later in range(s + 1, 5)})
    assert ends(score(found, "causal_score")) == pytest.approx((0.5, 0.5, 0.5))
    *on_later, on_none = by_layer(found, "causal_effect")
    assert on_later == pytest.approx([0.5] * 3) and on_none is None


def test_it_is_a_ratio_of_means_over_tokens_not_a_mean_of_ratios():
    """Block 1 adds 1, block 2 multiplies by the stream: u_2 = x_1^2, without block 1 x_0^2. With x_0 = 1 and 3:
    |1 - 4| + |9 - 16| over 4 + 16 = 1/2; the mean of ratios would be 0.594."""
    probed = HandMadeModel(
        [lambda x: x + 1, lambda x: x + x * x], torch.tensor([[1.0], [3.0]]), head_DV=torch.ones(1, 2)
    )
    found = causal(probed, torch.tensor([[0, 1, 0]]))
    assert effects(found) == pytest.approx({(1, 2): 0.5})


def test_an_effect_on_a_block_that_adds_nothing_is_undefined_not_infinite():
    """Block 2 adds relu(3/2 - x): nothing at x_1 = 2, but 1/2 without block 1."""
    blocks = [lambda x: x + 1, lambda x: x + torch.relu(1.5 - x), lambda x: 2 * x]
    found = causal(HandMadeModel(blocks, torch.ones(5, 4)))
    assert effects(found)[1, 2] is None and effects(found)[2, 3] == 0.0
    assert by_layer(found, "causal_effect")[0] is None and ends(score(found, "causal_score")) == (None, None, None)


@pytest.mark.parametrize(("threshold", "share"), [(0.01, 0.5), (0.2, 0.25), (9.0, 0.0)])
def test_a_block_is_useful_if_skipping_it_costs_more_than_the_runs_threshold(threshold, share):
    """A loss of ln(1 + e^-x) at x = 1 + 1 + .1; without block 1 at 1.1, 2.5 times as much, without 2 at 2, 1.1."""
    blocks = [lambda x: x + 1.0, lambda x: x + 0.1, identity, identity]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = causal(probed, torch.zeros(3, 4, dtype=torch.int64), threshold)
    losses = [math.log(1 + math.exp(-x)) for x in (2.1, 1.1, 2.0)]
    increases = [losses[1] / losses[0] - 1, losses[2] / losses[0] - 1, 0, 0]
    assert by_layer(found, "skip_loss_increase") == pytest.approx(increases, abs=1e-6)
    assert found.summary["usefulness_identity"] == share


@pytest.mark.parametrize("family", FAMILIES)
def test_skips_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    expected = causal_effects(model, tokens[:, :-1])
    skipped = skip_increases(model, tokens)
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = causal(ProbedDecoder(model), tokens)
        assert effects(found) == pytest.approx(expected, rel=1e-5)
        assert found.summary["causal_score"] == pytest.approx(np.mean(list(expected.values())), rel=1e-5)
        assert by_layer(found, "skip_loss_increase") == pytest.approx(skipped, abs=1e-6)
        mean = np.mean([expected[2, later] for later in (3, 4, 5)])
        assert by_layer(found, "causal_effect")[1] == pytest.approx(mean, rel=1e-5)
        assert brackets(score(found, "causal_score"))


def test_swapping_twins_changes_nothing():
    twin, other = residual_mlp(4, 0), residual_mlp(4, 1)
    swapped, _ = permutation_effect(HandMadeModel([twin, other, twin], normal(5, 4)), scored_text(TOKENS), rng())
    assert swapped[1, 3] == pytest.approx(0, abs=1e-6)
    assert known(swapped[1, 2]) > 1e-3


@given(n_layers=st.integers(1, 9), n_pairs=st.integers(1, 50), seed=st.integers(0, 99))
@pytest.mark.parametrize("by_first", [True, False])
def test_pairs_and_ranges_are_a_sample_without_replacement(by_first, n_layers, n_pairs, seed):
    every = list(itertools.combinations(range(1, n_layers + 1), 2))
    choose = functools.partial(choose_pairs, by_first=by_first)
    assert choose(n_layers, None, rng()) == every and choose_pairs(n_layers, 0, rng(), by_first=False) == []
    chosen = choose(n_layers, n_pairs, rng(seed))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(every)
    assert len(chosen) == min(n_pairs, len(every))
    assert chosen == choose(n_layers, n_pairs, rng(seed))


def test_every_pair_is_as_likely():
    drawn = [pair for seed in range(600) for pair in choose_pairs(4, 2, rng(seed))]
    assert all(150 < drawn.count(pair) < 250 for pair in itertools.combinations(range(1, 5), 2))  # 200 expected, sd 12


@pytest.mark.parametrize("family", FAMILIES)
def test_swaps_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    expected = permutation_effects(model, tokens)
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            swapped, score = permutation_effect(ProbedDecoder(model), scored_text(tokens), rng(), None)
        assert swapped == pytest.approx(expected, abs=1e-5)
        assert score.value == pytest.approx(np.mean(list(expected.values())), abs=1e-5)
    some, score = permutation_effect(ProbedDecoder(model), scored_text(tokens), rng(), 4)
    assert some == pytest.approx({pair: expected[pair] for pair in some}, abs=1e-5)
    assert len(some) == 4 and brackets(score)


def test_the_lower_end_is_lowered_by_twice_what_noise_adds_to_the_mean():
    probed = HandMadeModel([residual_mlp(4, seed, 0.8) for seed in range(3)], normal(5, 4))
    scored = scored_text(integers(5, 6, 7))
    base_N, swapped_NP = fork_losses(probed, scored, [{1: 2, 2: 1}, {1: 3, 3: 1}, {2: 3, 3: 2}])

    def mean_effect(swapped_RP, base_R):
        return np.abs(swapped_RP / base_R[:, None] - 1).mean(-1)

    plain = bootstrap(mean_effect, swapped_NP, base_N, rng=rng())
    _, found = permutation_effect(probed, scored, rng())
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
    every, some = (permutation_effect(probed, scored_text(tokens), rng(), n)[1] for n in (None, 8))
    assert known(some.lo) <= known(every.value) <= known(some.hi)
    assert known(some.hi) - known(some.lo) > known(every.hi) - known(every.lo)
    _, single = permutation_effect(probed, scored_text(tokens), rng(), 1)
    assert single.value is not None and (single.lo, single.hi) == (None, None)


def test_swaps_by_hand():
    """x_0 = 1; add 1, double, add 1: 5; swapped 1-2: 4, 2-3: 6, 1-3: 5. The loss of x is ln(1 + e^x)."""
    blocks = [lambda x: x + 1, lambda x: 2 * x, lambda x: x + 1]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    swapped, score = permutation_effect(probed, scored_text(torch.ones(3, 4, dtype=torch.int64)), rng())
    cost = {x: math.log(1 + math.exp(x)) for x in (4, 5, 6)}
    expected = {(1, 2): (cost[5] - cost[4]) / cost[5], (1, 3): 0.0, (2, 3): (cost[6] - cost[5]) / cost[5]}
    assert swapped == pytest.approx(expected, abs=1e-6)
    assert score.value == pytest.approx(sum(expected.values()) / 3, abs=1e-6)  # a gain counts as an effect, too


def test_the_interval_of_many_small_effects_reaches_down_to_their_mean(monkeypatch):
    """66 pairs whose effects are of the size of their noise: resamples of absolute values lie above the true mean."""
    draws, covered = rng(), []
    true_P = np.exp(draws.normal(math.log(0.02), 1.5, 66))
    for _ in range(40):
        swapped_NP = 1 + true_P + 0.01 * math.sqrt(32) * draws.normal(size=(32, 66))
        monkeypatch.setattr(interventions, "fork_losses", lambda *_, swapped_NP=swapped_NP: (np.ones(32), swapped_NP))
        _, found = permutation_effect(SimpleNamespace(n_layers=12), scored_text(integers(5, 3, 7)), draws)
        covered.append(known(found.lo) <= true_P.mean() <= known(found.hi))
    assert np.mean(covered) >= 0.85  # without lowering: .45


def test_the_loss_without_each_range_of_blocks_by_hand():
    """x_0 = 1; add 1, double, add 3: 7. What is left without each range, and c(x) = ln(1 + e^x) as the loss of x."""
    blocks = [lambda x: x + 1, lambda x: 2 * x, lambda x: x + 3]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = removal(probed, torch.ones(3, 4, dtype=torch.int64))
    left = {(1, 1): 5, (2, 2): 5, (3, 3): 4, (1, 2): 4, (2, 3): 2, (1, 3): 1}
    base = math.log(1 + math.exp(7))
    expected = {pair: (math.log(1 + math.exp(x)) - base) / base for pair, x in left.items()}
    assert drops(found) == pytest.approx(expected, abs=1e-6)
    single, longer = (found.summary[name] for name in ("removal_score", "removal_range_score"))
    assert single == pytest.approx((expected[1, 1] + expected[2, 2] + expected[3, 3]) / 3, abs=1e-6)
    assert longer == pytest.approx((expected[1, 2] + expected[2, 3] + expected[1, 3]) / 3, abs=1e-6)


def test_accuracy_lost_and_what_the_cosine_says_of_it():
    """x_0 = -1; add 3, keep, take 1: 1, and token 0 is right where x > 0. Without block 1 it is -2.

    Cosines: -1, 1, 1, so that the ranks of 1 - cosine are 3, 1.5, 1.5 beside 3, 2, 1 of the losses: 1.5 / sqrt(3)."""
    blocks = [lambda x: x + 3, identity, lambda x: x - 1]
    probed = HandMadeModel(blocks, -torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = removal(probed, torch.zeros(3, 4, dtype=torch.int64))
    assert by_pair(found, "removal_accuracy_lost") == {(1, 1): 1, (2, 2): 0, (3, 3): 0, (1, 2): 1, (2, 3): 0, (1, 3): 1}
    assert found.summary["removal_accuracy_lost"] == pytest.approx(1 / 3)
    assert block_influence(probed, torch.zeros(2, 5, dtype=torch.int64)) == pytest.approx([2, 0, 0], abs=1e-6)
    assert found.summary["removal_cosine_correlation"] == pytest.approx(1.5 / 3**0.5)
    assert rank_correlation([1, 2, 2, 4], [3, 1, 5, 5]) == pytest.approx(0.5)  # ranks 1 2.5 2.5 4 and 2 1 3.5 3.5
    assert rank_correlation([1, 2, 3], [5, 5, 5]) is None and rank_correlation([1, None, 2], [1, 2, 3]) is None


def test_removing_identities_costs_nothing():
    probed = HandMadeModel([identity, residual_mlp(4, 0), identity, identity], normal(5, 4))
    found = removal(probed, integers(5, 3, 7))
    for free in ((1, 1), (3, 3), (3, 4), (4, 4)):
        assert drops(found)[free] == pytest.approx(0, abs=1e-6)
    assert drops(found)[1, 2] == pytest.approx(drops(found)[2, 2], abs=1e-6) != 0


def test_a_single_block_has_no_longer_range():
    found = removal(HandMadeModel([residual_mlp(4, 0)], normal(5, 4)), integers(5, 3, 7))
    assert list(drops(found)) == [(1, 1)] and found.summary["removal_score"] is not None
    assert found.summary["removal_range_score"] is None


@pytest.mark.parametrize("family", FAMILIES)
def test_removal_against_full_forward_passes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    expected = removal_drops(model, tokens)
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = removal(ProbedDecoder(model), tokens, None)
        assert drops(found) == pytest.approx(expected, abs=1e-5)
        assert brackets(score(found, "removal_score")) and brackets(score(found, "removal_range_score"))
    some = removal(ProbedDecoder(model), tokens, 3)
    assert len(drops(some)) == 5 + 3 and all((layer, layer) in drops(some) for layer in range(1, 6))
    assert drops(some) == pytest.approx({pair: expected[pair] for pair in drops(some)}, abs=1e-5)
