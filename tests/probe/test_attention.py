"""Blocks of rows are the rows of the whole; windows and caps by hand."""

import math

import pytest
import torch
from handmade import normal

from sparsedepth.probe.probed_model import AttentionForm, attention_rows

Q, K = normal(2, 4, 9, 6, seed=1), normal(2, 2, 9, 6, seed=2)


@pytest.mark.parametrize("form", [None, AttentionForm(window=3), AttentionForm(softcap=0.5, window=1)])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_blocks_are_the_rows_of_the_whole(form, rows):
    whole, future = attention_rows(Q, K, 0, 9, form)
    for start in range(0, 9, rows):
        stop = min(start + rows, 9)
        part, hidden = attention_rows(Q, K, start, stop, form)
        torch.testing.assert_close(part, whole[:, :, start:stop, :stop])
        assert torch.equal(hidden, future[start:stop, :stop])
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 4, 9))
    assert not whole[..., future].any() and torch.equal(future, torch.ones(9, 9).triu(1).bool())


def test_plain_attention_is_the_softmax_of_q_k_over_root_width():
    whole, future = attention_rows(Q, K, 0, 9)
    score = torch.einsum("bhtk,bhsk->bhts", Q, K.repeat_interleave(2, dim=1)) / math.sqrt(6)
    torch.testing.assert_close(whole, score.masked_fill(future, -math.inf).softmax(-1))


def test_a_window_hides_what_lies_before_it():
    """Equal scores: each row is uniform over the window's keys, min(i, 2) of them."""
    zeros = torch.zeros(1, 1, 4, 2)
    expected = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
    found, _ = attention_rows(zeros, zeros, 0, 4, AttentionForm(window=2))
    torch.testing.assert_close(found[0, 0], torch.tensor(expected))


def test_documents_hide_each_other():
    """Equal scores: each row is uniform over its document's keys, and a sequence's documents are its own."""
    zeros = torch.zeros(2, 1, 3, 2)
    form = AttentionForm(documents=torch.tensor([[0, 1, 1], [0, 0, 0]]))
    expected = [[[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5]], [[1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]]
    found, _ = attention_rows(zeros, zeros, 0, 3, form)
    torch.testing.assert_close(found[:, 0], torch.tensor(expected))
    part, _ = attention_rows(zeros, zeros, 1, 2, form)
    torch.testing.assert_close(part, found[:, :, 1:2, :2])


def test_a_cap_bounds_the_scores():
    """Scores 0 and 1e6 with a cap of ln 3: 3 to 1, whatever the second score is."""
    q, k = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[0.0], [1e6]]]])
    found, _ = attention_rows(q, k, 1, 2, AttentionForm(softcap=math.log(3)))
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([0.25, 0.75]))
