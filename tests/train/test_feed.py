"""Batches come in order, one step ahead, and what reading raises is raised where the step is taken."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.train.feed import Batch, feed

CPU = torch.device("cpu")


def test_batches_are_those_of_their_steps_from_any_first_one():
    read: list[int] = []

    def batch(step: int) -> Sequences:
        read.append(step)
        return next_tokens(np.full((1, 2), step))

    batches = [*feed(batch, range(3, 6), CPU)]
    assert [batch.inputs.tolist() for batch in batches] == [batch.targets.tolist() for batch in batches]
    assert [batch.inputs.tolist() for batch in batches] == [[[3]], [[4]], [[5]]]
    assert read == [3, 4, 5]  # none twice, none beyond the last


def test_the_next_batch_is_read_while_the_step_runs():
    ahead = threading.Event()

    def batch(step: int) -> Sequences:
        if step == 1:
            ahead.set()
        return next_tokens(np.zeros((1, 2), dtype=np.int64))

    with closing(feed(batch, range(2), CPU)) as batches:
        assert next(batches).inputs.shape == (1, 1)
        assert ahead.wait(10)


def test_an_error_of_reading_comes_with_its_step():
    def batch(step: int) -> Sequences:
        if step == 1:
            raise ValueError("shard 7 is damaged")
        return next_tokens(np.zeros((1, 2), dtype=np.int64))

    with closing(feed(batch, range(3), CPU)) as batches:
        assert next(batches).inputs.shape == (1, 1)
        with pytest.raises(ValueError, match="shard 7"):
            next(batches)


def test_a_part_weighs_as_much_as_it_has_of_all_scored_positions_times_the_devices():
    """Two of four sequences, with 3 and 1 of 8 scored positions, on one of two devices: 6/8 and 2/8."""
    two, scored = torch.zeros(2, 3, dtype=torch.int64), np.array([3, 1])
    batch = Batch(inputs=two, targets=two, scored=scored, n_devices=2, n_scored=8)
    assert [weight for *_, weight in batch.parts(1)] == [0.75, 0.25]
    assert [weight for *_, weight in batch.parts(None)] == [1.0]
