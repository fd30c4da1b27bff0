"""Loss and accuracy by difficulty, and the highest that is solved: values worked out by hand, and planted ones."""

import math

import numpy as np
import pytest
import torch
from handmade import HandMadeModel, identity, integers, normal

from sparsedepth.config.task import IGNORED
from sparsedepth.measure.bootstrap import shared_resamples
from sparsedepth.measure.context import Scored
from sparsedepth.measure.loss import by_difficulty, held_out_loss


def rng():
    return np.random.default_rng(0)


def estimate():
    return shared_resamples(rng())


def solved(accuracy_D, n_sequences=40, first=0):
    """Sequences with one position of each difficulty, of which these shares are right."""
    correct_NT = np.arange(n_sequences)[:, None] < np.array(accuracy_D) * n_sequences
    levels_NT = np.broadcast_to(first + np.arange(len(accuracy_D)), correct_NT.shape)
    return by_difficulty(
        np.ones(correct_NT.shape), correct_NT, np.zeros(correct_NT.shape), levels_NT, estimate()
    ).solved


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
    found = by_difficulty(np.ones((3, 17)), correct_NT, targets_NT, np.zeros((3, 17), dtype=int), estimate())
    assert found.rows[0]["accuracy"] == 0.9 and found.solved.value == 0


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
        found = by_difficulty(np.ones((64, 21)), correct_NT, np.zeros((64, 21)), levels_NT, estimate()).solved
        assert found.lo <= found.value < 19 == found.hi


def test_rows_by_hand():
    loss_NT = np.array([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    correct_NT = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    targets_NT = np.array([[0, 0, IGNORED], [0, 0, 0]])
    found = by_difficulty(loss_NT, correct_NT, targets_NT, np.array([[2, 5, 5], [2, 2, 5]]), estimate())
    assert found.rows == [
        {"difficulty": 2, "positions": 3, "loss": pytest.approx(8 / 3), "accuracy": 1.0},
        {"difficulty": 5, "positions": 2, "loss": 3.5, "accuracy": 0.0},
    ]
    assert found.solved.value == 2


def test_accuracy_is_over_the_positions_that_count():
    """p(1 | 0) = 3/4 and p(0 | 1) = 4/5: the likelier answer is the other token."""
    probed = HandMadeModel([identity], torch.eye(2), head_DV=torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0]]))
    inputs = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]])
    targets = torch.tensor([[1, 0, 1, IGNORED], [0, IGNORED, 1, 1]])
    found = held_out_loss(probed, Scored(inputs, targets), rng())
    assert found.accuracy.value == pytest.approx(4 / 6) and found.n_tokens == 6 and found.by_difficulty is None
    costs = [-math.log(p) for p in (3 / 4, 4 / 5, 3 / 4, 1 / 4, 3 / 4, 1 / 5)]
    assert found.loss.value == pytest.approx(sum(costs) / 6, abs=1e-6)
    levels = torch.tensor([[0, 1, 2, 3]] * 2)
    rows = held_out_loss(probed, Scored(inputs, targets, levels), rng()).by_difficulty.rows
    assert [(row["difficulty"], row["positions"], row["accuracy"]) for row in rows] == [
        (0, 2, 0.5), (1, 1, 1.0), (2, 2, 1.0), (3, 1, 0.0)
    ]  # fmt: skip
    assert sum(row["loss"] * row["positions"] for row in rows) == pytest.approx(sum(costs), abs=1e-5)


def test_accuracy_and_loss_are_of_the_same_resamples():
    probed = HandMadeModel([identity], normal(7, 3))
    first, again = (held_out_loss(probed, Scored.text(integers(7, 6, 20)), rng()) for _ in range(2))
    assert first.loss == again.loss and first.accuracy == again.accuracy
    assert first.accuracy.lo <= first.accuracy.value <= first.accuracy.hi
