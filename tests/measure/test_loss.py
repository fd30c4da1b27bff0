"""Held-out loss, accuracy by difficulty and the highest that is solved: by hand, planted, and by the plain loop.

What each layer would say, beside what the model says: by hand, at the ends, against plain softmaxes.

Early exit: exits worked out by hand, the corner cases, the plain loop.
"""

import math

import numpy as np
import pytest
import torch
from reference import FAMILIES, exit_losses, loss, run_config, states
from support.handmade_models import (
    HandMadeModel,
    brackets,
    identity,
    integers,
    known,
    normal,
    profiles,
    rng,
    scored_text,
    tokens_per_pass,
)

from sparsedepth.config.task import IGNORED
from sparsedepth.measure import loss as module
from sparsedepth.measure.bootstrap import shared_resamples
from sparsedepth.measure.loss import (
    add_exit_rows,
    add_lens_rows,
    bits_per_byte,
    by_difficulty,
    fork_losses,
    held_out_loss,
    relative_change,
)
from sparsedepth.measure.measurements import Scored
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def lens(probed, tokens):
    return profiles(add_lens_rows, probed, tokens)


def early_exit(probed, scored):
    increases = {name: f"{name}_increase" for name in ("lens_loss", "early_exit_loss")}
    return profiles(add_exit_rows, probed, scored, scores=increases)


def test_each_position_is_scored_on_the_next_token():
    head = torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0]])  # p(1 | 0) = 3/4, p(0 | 1) = 4/5
    probed = HandMadeModel([identity], torch.eye(2), head_DV=head)
    base_N, changed_NF = fork_losses(probed, scored_text(torch.tensor([[0, 1, 0], [0, 0, 1]])), [])
    by_hand = [-math.log(3 / 4) - math.log(4 / 5), -math.log(1 / 4) - math.log(3 / 4)]
    np.testing.assert_allclose(base_N, np.array(by_hand) / 2, atol=1e-6)
    assert changed_NF.shape == (2, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_plain_loop(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 4, 17)
    probed = ProbedDecoder(model)
    assert held_out_loss(probed, scored_text(tokens), rng()).loss.value == pytest.approx(loss(model, tokens), rel=1e-6)
    _, changed_NF = fork_losses(probed, scored_text(tokens), [{2: None}])
    assert changed_NF.mean() == pytest.approx(loss(model, tokens, [1, None, 3, 4, 5]), rel=1e-6)


def test_no_result_depends_on_how_the_work_is_cut(monkeypatch):
    probed, tokens = ProbedDecoder(Decoder(run_config())), integers(40, 5, 17)
    forks = [{layer: None} for layer in (5, 1, 3)]
    whole = fork_losses(probed, scored_text(tokens), forks)
    monkeypatch.setattr(module, "MAX_LOGITS", 40 * 7)  # 7 positions at a time: across sequences and forks
    for max_tokens in (40, 100):
        with tokens_per_pass(max_tokens):
            parts = fork_losses(probed, scored_text(tokens), forks)
        for one, other in zip(parts, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_logits_in_memory_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 100)
    probed, sizes = HandMadeModel([identity], normal(7, 3)), []
    monkeypatch.setattr(probed, "logits", lambda x: sizes.append((x @ probed.head_DV).numel()) or x @ probed.head_DV)
    held_out_loss(probed, scored_text(integers(7, 5, 20)), rng())
    assert max(sizes) <= 100 and sum(sizes) == 5 * 19 * 7


def test_bits_per_byte():
    assert bits_per_byte(math.log(2), 1.0) == pytest.approx(1.0)  # one bit per token, one byte per token
    assert bits_per_byte(8 * math.log(2), 4.0) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="bytes_per_token=0"):
        bits_per_byte(1.0, 0)


def test_change_relative_to_no_loss_is_undefined():
    found = relative_change(np.array([3.0, 1.0, 1.0]), np.array([2.0, 2.0, 0.0]))
    np.testing.assert_array_equal(found, [0.5, -0.5, math.nan])


def estimate():
    return shared_resamples(rng())


def solved(accuracy_D, n_sequences=40, first=0):
    """Sequences with one position of each difficulty, of which these shares are right."""
    correct_NT = np.arange(n_sequences)[:, None] < np.array(accuracy_D) * n_sequences
    levels_NT = np.broadcast_to(first + np.arange(len(accuracy_D)), correct_NT.shape)
    return by_difficulty(np.ones(correct_NT.shape), correct_NT, np.zeros(correct_NT.shape), levels_NT, estimate())[1]


@pytest.mark.parametrize(
    ("accuracy_D", "highest"),
    [([1, 1, 0.95, 0.9, 0.6], 3), ([1, 1, 1], 2), ([0.5, 1, 1], -1), ([1, 0.8, 1, 1], 0), ([0.875, 0.2], -1)],
)
def test_the_highest_difficulty_up_to_which_all_are_solved(accuracy_D, highest):
    assert solved(accuracy_D).value == highest
    assert solved(accuracy_D, first=3).value == highest + 3


def test_nine_in_ten_are_solved_however_they_lie_in_the_sequences():
    """45 of 50 positions in sequences of 17, 17 and 16: the mean 15 is less than 0.9 x 50/3 by its rounding alone."""
    counts_NT = np.arange(17) < np.array([17, 17, 16])[:, None]
    targets_NT = np.where(counts_NT, 0, IGNORED)
    correct_NT = counts_NT.copy()
    correct_NT[0, :5] = False
    (row,), found = by_difficulty(np.ones((3, 17)), correct_NT, targets_NT, np.zeros((3, 17), dtype=int), estimate())
    assert row["accuracy"] == 0.9 and found.value == 0


def test_its_interval_holds_what_other_sequences_would_have_given():
    sure, close = solved([1, 1, 0.5, 0.1]), solved([1, 0.975, 0.9, 0.875, 0.2])
    assert (sure.lo, sure.value, sure.hi) == (1, 1, 1)
    assert close.lo < close.value == 2 < close.hi <= 4


def test_the_lowest_of_many_accuracies_does_not_exclude_that_all_are_solved():
    """20 difficulties of true accuracy .93, 64 sequences: some accuracy is always below .9; and one fails for sure."""
    for seed in range(20):
        draws = np.random.default_rng(seed)
        correct_NT = draws.random((64, 21)) < np.array([0.93] * 20 + [0.5])
        levels_NT = np.broadcast_to(np.arange(21), correct_NT.shape)
        _, found = by_difficulty(np.ones((64, 21)), correct_NT, np.zeros((64, 21)), levels_NT, estimate())
        assert found.lo <= found.value < 19 == found.hi


def test_of_many_difficulties_one_counts_as_failed_only_where_all_together_are_sure():
    """One of ten has 47 of 60 right: its own 95% interval ends below .9, that at 99.5% above."""
    correct_NT = np.ones((60, 10))
    correct_NT[47:, 0] = 0
    levels_NT = np.broadcast_to(np.arange(10), correct_NT.shape)
    given = (np.ones((60, 10)), correct_NT, np.zeros((60, 10)), levels_NT)
    of_ten, of_one = (by_difficulty(*(each[:, :n] for each in given), estimate())[1] for n in (10, 1))
    assert (of_ten.value, of_ten.hi) == (-1, 9) and (of_one.value, of_one.hi) == (-1, -1)


def test_rows_by_hand():
    loss_NT = np.array([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    correct_NT = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    targets_NT = np.array([[0, 0, IGNORED], [0, 0, 0]])
    rows, found = by_difficulty(loss_NT, correct_NT, targets_NT, np.array([[2, 5, 5], [2, 2, 5]]), estimate())
    assert rows == [
        {"difficulty": 2, "positions": 3, "loss": pytest.approx(8 / 3), "accuracy": 1.0},
        {"difficulty": 5, "positions": 2, "loss": 3.5, "accuracy": 0.0},
    ]
    assert found.value == 2


def test_accuracy_is_over_the_positions_that_count():
    """p(1 | 0) = 3/4 and p(0 | 1) = 4/5: the likelier answer is the other token."""
    probed = HandMadeModel([identity], torch.eye(2), head_DV=torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0]]))
    inputs = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]])
    targets = torch.tensor([[1, 0, 1, IGNORED], [0, IGNORED, 1, 1]])
    found = held_out_loss(probed, Scored(inputs, targets), rng())
    assert found.accuracy.value == pytest.approx(4 / 6) and found.solved is None
    costs = [-math.log(p) for p in (3 / 4, 4 / 5, 3 / 4, 1 / 4, 3 / 4, 1 / 5)]
    assert found.loss.value == pytest.approx(sum(costs) / 6, abs=1e-6)
    levels = torch.tensor([[0, 1, 2, 3]] * 2)
    rows = held_out_loss(probed, Scored(inputs, targets, levels), rng()).by_difficulty
    assert [(row["difficulty"], row["positions"], row["accuracy"]) for row in rows] == [
        (0, 2, 0.5), (1, 1, 1.0), (2, 2, 1.0), (3, 1, 0.0)
    ]  # fmt: skip
    assert sum(row["loss"] * row["positions"] for row in rows) == pytest.approx(sum(costs), abs=1e-5)


def test_lens_by_hand():
    """Logits ln 2 x (1, 0) after each layer: x_0 = 0 says 1/2, 1/2; x_1 = 1 says 2/3, 1/3; x_2 = 2 says 4/5, 1/5."""
    probed = HandMadeModel([lambda x: x + 1, lambda x: x + 1], torch.zeros(2, 1), torch.tensor([[math.log(2), 0.0]]))
    found = lens(probed, integers(2, 3, 4))
    kl = [
        0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2),
        2 / 3 * math.log(2 / 3 / 0.8) + 1 / 3 * math.log(1 / 3 / 0.2),
        0,
    ]
    assert found["lens_kl"].by_layer == pytest.approx(kl, abs=1e-6)
    assert found["lens_overlap"].by_layer == [1, 1, 1]  # of a vocabulary of two
    assert {profile.first for profile in found.values()} == {0}  # of states, the embedding's included
    assert found["lens_kl"].score.value == pytest.approx((kl[0] + kl[1]) / 2, abs=1e-6)


def test_the_five_most_likely_tokens():
    """Layer 0 ranks 8 tokens upwards, the model downwards: tokens 3 and 4 are in both sets of five."""
    probed = HandMadeModel([identity, lambda x: -x], torch.ones(8, 1), torch.arange(8.0)[None])
    assert lens(probed, integers(8, 2, 3))["lens_overlap"].by_layer == pytest.approx([2 / 5, 2 / 5, 1])


def test_an_early_prediction_may_be_settled_and_wrong():
    """Blocks that double leave each token's order as it was: the lens sees one opinion, and an early loss is bad."""
    probed = HandMadeModel([lambda x: 2 * x], torch.tensor([[0.0, 5.0], [5.0, 0.0]]), torch.eye(2))
    tokens = torch.tensor([[0, 0, 0, 0]])
    assert lens(probed, tokens)["lens_kl"].by_layer[0] < 0.05
    assert known(early_exit(probed, scored_text(tokens))["lens_loss"].by_layer[0]) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_against_plain_softmaxes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 16)
    with torch.no_grad():
        read = [model.logits(x.float()).double().log_softmax(-1) for x in states(model, tokens)]
    kl = [(p.exp() * (p - read[-1])).sum(-1).mean().item() for p in read]
    tops = [[set(row.tolist()) for row in p.flatten(0, 1).topk(5).indices] for p in read]
    overlap = [np.mean([len(a & b) / 5 for a, b in zip(top, tops[-1], strict=True)]) for top in tops]
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = lens(ProbedDecoder(model), tokens)
        assert found["lens_kl"].by_layer == pytest.approx(kl, abs=1e-5)
        assert found["lens_overlap"].by_layer == pytest.approx(overlap)
        assert brackets(found["lens_kl"].score) and brackets(found["lens_overlap"].score)


def values(exits):
    return [known(value) for value in exits.by_layer]


def test_early_exits_by_hand():
    """x_0 = 1; add 1, then 2, then double. With logits (x, 0) the token 1 costs ln(1 + e^x) =: c(x).

    The lens reads 1, 2, 4, 8; through the last block 2, 4, 8."""
    blocks = [lambda x: x + 1, lambda x: x + 2, lambda x: 2 * x]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = early_exit(probed, scored_text(torch.ones(3, 5, dtype=torch.int64)))
    cost = {x: math.log(1 + math.exp(x)) for x in (1, 2, 4, 8)}
    assert values(found["lens_loss"]) == pytest.approx([cost[x] for x in (1, 2, 4, 8)], abs=1e-6)
    assert values(found["early_exit_loss"]) == pytest.approx([cost[x] for x in (2, 4, 8)], abs=1e-6)
    increases = [(cost[x] - cost[8]) / cost[8] for x in (1, 2, 4)]
    assert found["lens_loss"].score.value == pytest.approx(np.mean(increases), abs=1e-6)
    assert found["early_exit_loss"].score.value == pytest.approx(np.mean(increases[1:]), abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_shorter_models_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    lens, block = exit_losses(model, tokens, []), exit_losses(model, tokens, [5])
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = early_exit(ProbedDecoder(model), scored_text(tokens))
        assert values(found["lens_loss"]) == pytest.approx(lens, rel=1e-5)
        assert values(found["early_exit_loss"]) == pytest.approx(block, rel=1e-5)
        assert brackets(found["lens_loss"].score) and brackets(found["early_exit_loss"].score)
        assert found["early_exit_loss"].by_layer == pytest.approx(block, rel=1e-5)
