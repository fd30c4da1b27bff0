"""Positions that count: every measure with a loss takes it over them alone, whatever their number in a sequence.

Where in depth a score comes from: worked out by hand, planted, and undefined.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import run_config
from support.handmade_models import by_layer, by_pair, found_by, integers, rng, score

from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import Sequences
from sparsedepth.measure.bootstrap import shared_resamples
from sparsedepth.measure.interventions import add_causal_rows, add_removal_rows, permutation_effect
from sparsedepth.measure.loss import add_exit_rows, fork_losses, held_out_loss
from sparsedepth.measure.measurements import (
    MeasureContext,
    Scored,
    block_weights,
    depth_profile,
    entries_of,
    per_position,
)
from sparsedepth.measure.released_code import affine_increase_in_sample
from sparsedepth.measure.usefulness import add_usefulness_rows
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities import IN_RUNS, PROFILED


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(run_config())


@pytest.fixture(scope="module")
def uneven() -> Scored:
    """Six sequences of 16 tokens, of which 0, 3, 5, 8, 11 and 16 positions count; targets are not the next tokens."""
    counts = torch.tensor([0, 3, 5, 8, 11, 16])
    order = torch.rand(6, 16, generator=torch.Generator().manual_seed(1)).argsort(1).argsort(1)
    return Scored(integers(40, 6, 16), integers(40, 6, 16, seed=2).masked_fill(order >= counts[:, None], IGNORED))


def plain(model: Decoder, scored: Scored, order=None) -> float:
    """The mean over all positions that count at once, of the blocks in this order (None leaves one out)."""
    context = model.positions(16)
    x_BTD = model.embed_tokens(scored.inputs)
    for layer in order or range(1, 6):
        x_BTD = x_BTD if layer is None else model.blocks[layer - 1](x_BTD, context)
    counts_BT = scored.targets != IGNORED
    return F.cross_entropy(model.logits(x_BTD)[counts_BT], scored.targets[counts_BT]).item()


def increases(add_rows, metric, probed, scored):
    return by_layer(found_by(add_rows, probed, scored, integers(40, 6, 16, seed=3)), metric)


@torch.no_grad()
def test_losses_are_means_over_the_positions_that_count(model, uneven):
    probed = ProbedDecoder(model)
    orders = (None, [1, None, 3, 4, 5], [1, 4, 3, 2, 5])
    base, without, swapped = (plain(model, uneven, order) for order in orders)
    found = held_out_loss(probed, uneven, rng())
    assert found.loss.value == pytest.approx(base, rel=1e-6) and uneven.n_scored == 43
    base_N, changed_NF = fork_losses(probed, uneven, [{2: None}, {2: 4, 4: 2}])
    assert (base_N.mean(), *changed_NF.mean(0)) == pytest.approx((base, without, swapped), rel=1e-6)
    assert base_N[0] == 0  # nothing counts there
    dropped, exchanged = (without - base) / base, abs(swapped - base) / base
    assert removed(probed, uneven)[1][2, 2] == pytest.approx(dropped, rel=1e-4)
    assert increases(add_causal_rows, "skip_loss_increase", probed, uneven)[1] == pytest.approx(dropped, rel=1e-4)
    assert permutation_effect(probed, uneven, rng())[0][2, 4] == pytest.approx(exchanged, rel=1e-4)
    lens = increases(add_exit_rows, "lens_loss", probed, uneven)
    assert lens[5] == pytest.approx(base, rel=1e-6)
    assert lens[2] == pytest.approx(plain(model, uneven, [1, 2, None, None, None]), rel=1e-6)


def removed(probed, scored):
    rows = found_by(add_removal_rows, probed, scored, removal_ranges=None)
    return rows.summary, by_pair(rows, "removal_drop"), by_pair(rows, "removal_accuracy_lost")


MEASURES = {
    "usefulness": partial(increases, add_usefulness_rows, "affine_loss_increase"),
    "permutation": lambda probed, scored: permutation_effect(probed, scored, rng()),
    "removal": removed,
    "released": lambda probed, scored: affine_increase_in_sample(probed, scored),
    "early_exit": lambda probed, scored: score(found_by(add_exit_rows, probed, scored), "early_exit_loss_increase"),
    "skip": partial(increases, add_causal_rows, "skip_loss_increase"),
}


@pytest.mark.parametrize("name", MEASURES)
def test_what_does_not_count_changes_nothing(model, uneven, name):
    """Tokens behind the last position that counts are out of sight: other targets there are IGNORED in every measure,
    and the same measure on whole sequences of the first 8 tokens is the one on 16 of which 8 count."""
    probed = ProbedDecoder(model)
    inputs, targets = uneven.inputs, integers(40, 6, 16, seed=2)
    short = Scored(inputs[:, :8], targets[:, :8])
    masked = Scored(inputs, targets.masked_fill(torch.arange(16) >= 8, IGNORED))
    if name in ("released", "usefulness"):  # maps in sample are fitted on all tokens; on others, on the same ones
        increase = MEASURES[name](probed, masked)
        assert len(increase) == 5 and increase != MEASURES[name](probed, Scored(inputs, targets))
    else:
        assert_close(MEASURES[name](probed, masked), MEASURES[name](probed, short))


def assert_close(one, other) -> None:
    if hasattr(one, "__dataclass_fields__"):
        for field in one.__dataclass_fields__:
            assert_close(getattr(one, field), getattr(other, field))
    elif isinstance(one, tuple):
        for part, same in zip(one, other, strict=True):
            assert_close(part, same)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    else:
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_text_has_the_plain_mean_of_every_resample():
    value_N = np.random.default_rng(1).random(20)
    estimate = shared_resamples(rng())
    even = estimate(per_position, value_N, np.ones(20))
    weight_N = np.where(np.arange(20) < 10, 0.5, 1.5)
    uneven = estimate(per_position, value_N * weight_N, weight_N)
    assert even.value == pytest.approx(value_N.mean())
    assert uneven.value == pytest.approx((value_N * weight_N).sum() / 20)
    assert uneven.lo < uneven.value < uneven.hi
    # Equal values have no spread, however many positions a resample happens to have.
    flat = estimate(per_position, 2 * weight_N, weight_N)
    assert (flat.lo, flat.value, flat.hi) == pytest.approx((2, 2, 2))


def test_nothing_that_counts_is_said(model):
    nothing = Scored(integers(40, 2, 16), torch.full((2, 16), IGNORED))
    with pytest.raises(ValueError, match="none of the 32 targets is scored"):
        held_out_loss(ProbedDecoder(model), nothing, rng())


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
    two_and_two = [((1, 2), 3.0), ((3, 4), 1.0), ((1, 4), 2.0)]  # three pairs of four blocks
    assert (depth_profile(two_and_two, 4)["largest_share"], depth_profile(two_and_two, 4)["centre"]) == (None, None)
    one = depth_profile(of_layers(2.0), 1)
    assert (one["without_first"], one["largest_share"], one["centre"]) == (None, 1.0, None)


def test_kept_tokens_can_be_read_by_a_measure_that_computes_gradients():
    config = run_config()
    ids = integers(7, 2, config.seq_len).numpy()
    tokens = Sequences(inputs=ids, targets=ids)
    context = MeasureContext(
        probed=ProbedDecoder(Decoder(config)), config=config, held_out=lambda *_: tokens, bytes_per_token=None, eod=None
    )
    with torch.inference_mode():
        assert not context.inputs.is_inference()


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
    for own in PROFILED:
        columns = [f"{own.name}_{name}" for name in depth_profile(by_name[own.name], 3)]
        assert columns == [column.name for column in own.depth_columns()]
        assert all(IN_RUNS[name].measure == own.measure for name in columns)
    assert IN_RUNS["causal_score_deep_half"].better == "high" and not IN_RUNS["causal_score_centre"].better
    assert not IN_RUNS["causal_score_deep_half"].stage
