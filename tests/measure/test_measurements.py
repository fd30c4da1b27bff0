"""Positions that count: every measure with a loss takes it over them alone, whatever their number in a sequence."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import run_config
from support.handmade_models import by_layer, by_pair, found_by, integers, rng

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import shared_resamples
from sparsedepth.measure.interventions import add_causal_rows, add_removal_rows, permutation_effect
from sparsedepth.measure.loss import early_exit, fork_losses, held_out_loss
from sparsedepth.measure.measurements import Scored, position_mean
from sparsedepth.measure.released_code import affine_increase_in_sample
from sparsedepth.measure.usefulness import add_usefulness_rows
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


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
    lens = early_exit(probed, uneven, rng())["lens_loss"].by_layer
    assert lens[5] == pytest.approx(base, rel=1e-6)
    assert lens[2] == pytest.approx(plain(model, uneven, [1, 2, None, None, None]), rel=1e-6)


def removed(probed, scored):
    rows = found_by(add_removal_rows, probed, scored, removal_ranges=None)
    return rows.summary, by_pair(rows, "removal_drop"), by_pair(rows, "removal_accuracy_lost")


MEASURES = {
    "usefulness": partial(increases, add_usefulness_rows, "affine_loss_increase"),
    "neighbours": lambda probed, scored: permutation_effect(probed, scored, rng(), neighbours=True),
    "permutation": lambda probed, scored: permutation_effect(probed, scored, rng()),
    "removal": removed,
    "released": lambda probed, scored: affine_increase_in_sample(probed, scored),
    "early_exit": lambda probed, scored: early_exit(probed, scored, rng())["early_exit_loss"].score,
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
    even = position_mean(value_N, np.ones(20), shared_resamples(rng()))
    weight_N = np.where(np.arange(20) < 10, 0.5, 1.5)
    uneven = position_mean(value_N * weight_N, weight_N, shared_resamples(rng()))
    assert even.value == pytest.approx(value_N.mean())
    assert uneven.value == pytest.approx((value_N * weight_N).sum() / 20)
    assert uneven.lo < uneven.value < uneven.hi
    # Equal values have no spread, however many positions a resample happens to have.
    flat = position_mean(2 * weight_N, weight_N, shared_resamples(rng()))
    assert (flat.lo, flat.value, flat.hi) == pytest.approx((2, 2, 2))


def test_nothing_that_counts_is_said(model):
    nothing = Scored(integers(40, 2, 16), torch.full((2, 16), IGNORED))
    with pytest.raises(ValueError, match="none of the 32 targets is scored"):
        held_out_loss(ProbedDecoder(model), nothing, rng())
