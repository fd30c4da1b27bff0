"""Where in depth a score comes from: worked out by hand, planted, and undefined."""

import itertools

import numpy as np
import pytest

from sparsedepth.measure.measurements import block_weights, depth_profile, entries_of
from sparsedepth.quantities import IN_RUNS, PROFILED


def of_layers(*values):
    return [((layer,), value) for layer, value in enumerate(values, start=1)]


def of_pairs(value_of, n_layers):
    return [(pair, value_of(*pair)) for pair in itertools.combinations(range(1, n_layers + 1), 2)]


def test_four_layers_by_hand():
    found = depth_profile(of_layers(6.0, 1.0, -1.0, 3.0), 4)  # a block that is better left out weighs 0
    assert (found["without_first"], found["deep_half"]) == (1.0, 1.0)  # (1 - 1 + 3) / 3, (-1 + 3) / 2
    assert found["largest_share"] == pytest.approx(0.6)  # 6 / 10
    assert found["centre"] == pytest.approx((0 * 6 + 1 / 3 * 1 + 1 * 3) / 10)


@pytest.mark.parametrize(("values", "mean"), [((9, 9, 1, 2, 3), 2.0), ((9, 9, 1, 2), 1.5), ((9, 1), 1.0)])
def test_the_deep_half_of_five_is_the_middle_and_what_follows_and_that_of_four_begins_at_the_third(values, mean):
    assert depth_profile(of_layers(*values), len(values))["deep_half"] == mean


def test_pairs_are_shared_out_as_a_sum_of_one_part_per_block():
    parts = np.array([5.0, 1.0, 0.0, 2.0])
    found = depth_profile(of_pairs(lambda a, b: parts[a - 1] + parts[b - 1], 4), 4)
    assert found["largest_share"] == pytest.approx(5 / 8) and found["centre"] == pytest.approx((1 / 3 + 2) / 8)
    assert found["without_first"] == pytest.approx((1 + 3 + 2) / 3) and found["deep_half"] == pytest.approx(2.0)


@pytest.mark.parametrize("n_layers", [3, 4, 12])
def test_where_all_pairs_are_alike_no_block_stands_out(n_layers):
    found = depth_profile(of_pairs(lambda a, b: 0.7, n_layers), n_layers)
    assert found["largest_share"] == pytest.approx(1 / n_layers) and found["centre"] == pytest.approx(0.5)


@pytest.mark.parametrize("carrier", [1, 5, 12])
def test_a_sample_of_pairs_finds_the_block_that_carries_all(carrier):
    pairs = of_pairs(lambda a, b: 4.0 if carrier in (a, b) else 0.01, 12)
    sample = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[:30]]
    weights = block_weights(sample, 12)
    assert weights.argmax() == carrier - 1 and depth_profile(sample, 12)["largest_share"] > 0.9


def test_what_is_undefined_is_missing():
    nothing = depth_profile(of_layers(0.0, -0.1), 2)
    assert (nothing["largest_share"], nothing["centre"], nothing["without_first"]) == (None, None, -0.1)
    assert depth_profile(of_layers(1.0, None), 2)["deep_half"] is None
    assert depth_profile([], 3)["largest_share"] is None
    assert depth_profile([((1, 2), 3.0)], 2)["largest_share"] is None  # one pair does not say which of the two
    one = depth_profile(of_layers(2.0), 1)
    assert (one["without_first"], one["largest_share"], one["centre"]) == (None, 1.0, None)


def test_every_score_with_a_profile_has_its_rows_and_its_columns():
    layers = [
        {"metric": "affine_loss_increase", "layer": layer, "value": value} for layer, value in ((1, 3.0), (2, 1.0))
    ]
    pairs = [
        {"metric": metric, "layer": a, "other_layer": b, "value": value}
        for metric in ("causal_effect", "permutation_effect")
        for a, b, value in ((1, 2, 0.4), (1, 3, 0.2), (2, 3, 0.1))
    ]
    by_name = {score.name: entries_of(score, layers, pairs) for score in PROFILED}
    assert by_name["usefulness_loss_increase"] == [((1,), 3.0), ((2,), 1.0)]
    assert by_name["causal_score"] == [((1,), 0.4), ((1,), 0.2), ((2,), 0.1)]  # of the block that was skipped
    assert by_name["permutation_score"] == [((1, 2), 0.4), ((1, 3), 0.2), ((2, 3), 0.1)]
    for score in PROFILED:
        columns = [f"{score.name}_{name}" for name in depth_profile(by_name[score.name], 3)]
        assert columns == [column.name for column in score.depth_columns()]
        assert all(IN_RUNS[name].measure == score.measure for name in columns)
    assert IN_RUNS["causal_score_deep_half"].better == "high" and not IN_RUNS["causal_score_centre"].better
    assert not IN_RUNS["causal_score_deep_half"].stage
