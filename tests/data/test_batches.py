"""Batches are a pure function of corpus, seed and step; every chunk is read once per epoch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparsedepth.config.run import RunConfig
from sparsedepth.data.pipeline import Corpus, prepare
from sparsedepth.data.sequences import shuffled
from sparsedepth.data.text import TextSource


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"document {i}")
    return prepare(RunConfig(corpus=str(folder)), tmp_path_factory.mktemp("data"))


def counting(prepared: Corpus, n_train: int = 1000, first_val: int = 0) -> TextSource:
    """A text whose token i is i, so that a batch shows where it was read."""
    val = np.arange(first_val, first_val + 100, dtype=np.uint16)
    return TextSource(replace(prepared, train=np.arange(n_train, dtype=np.uint16), val=val))


def config(seq_len: int, batch_tokens: int, **fields) -> RunConfig:
    return RunConfig(seq_len=seq_len, batch_tokens=batch_tokens, train_tokens=batch_tokens, **fields)


def test_shapes_and_targets(prepared):
    read = counting(prepared).batch(config(8, 32), step=0)
    assert read.inputs.shape == (4, 8) and read.inputs.dtype == np.int64
    assert (np.diff(read.inputs) == 1).all() and (read.targets == read.inputs + 1).all()
    assert (read.inputs[:, 0] % 8 == 0).all()


def test_an_epoch_reads_every_chunk_once_and_the_next_in_another_order(prepared):
    text = counting(prepared, n_train=1 + 8 * 40)  # 40 chunks and the last target
    epochs = np.concatenate([text.batch(config(8, 32), step).inputs[:, 0] for step in range(30)]).reshape(3, 40)
    for starts in epochs:
        assert sorted(starts) == list(range(0, 320, 8))
    assert len({tuple(starts) for starts in [*epochs, np.arange(0, 320, 8)]}) == 4


def test_a_batch_may_cross_the_border_of_an_epoch(prepared):
    text = counting(prepared, n_train=1 + 8 * 6)  # 6 chunks, 4 per step: step 1 ends epoch 0 and begins epoch 1
    starts = np.concatenate([text.batch(config(8, 32), step).inputs[:, 0] for step in range(3)])
    assert sorted(starts[:6]) == sorted(starts[6:]) == [0, 8, 16, 24, 32, 40]


def test_a_batch_depends_on_seed_and_step_alone(prepared):
    text = counting(prepared)
    first = text.batch(config(8, 32, seed=3), 7).inputs
    text.batch(config(8, 32, seed=4), 123)
    assert (text.batch(config(8, 32, seed=3, lr=0.5), 7).inputs == first).all()
    assert (text.batch(config(8, 32, seed=4), 7).inputs != first).any()
    assert (text.batch(config(8, 32, seed=3), 8).inputs != first).any()


@settings(max_examples=40)
@given(step=st.integers(0, 10**7), seed=st.integers(0, 2**31 - 1), halvings=st.integers(0, 4))
def test_runs_of_different_seq_len_predict_the_same_tokens_in_the_same_step(prepared, step, seed, halvings):
    text = counting(prepared)
    long = text.batch(config(32, 64, seed=seed, chunk_len=32), step)
    short = text.batch(config(32 >> halvings, 64, seed=seed, chunk_len=32), step)
    assert (short.inputs.reshape(-1) == long.inputs.reshape(-1)).all()
    assert (short.targets.reshape(-1) == long.targets.reshape(-1)).all()


def test_text_shorter_than_a_batch_names_the_counts(prepared):
    assert counting(prepared, n_train=33).batch(config(8, 32), 0).inputs.shape == (4, 8)
    with pytest.raises(
        ValueError, match=r"has 32 tokens: 3 chunks of 8 .* batch_tokens=32 reads 4; use a longer corpus"
    ):
        counting(prepared, n_train=32).batch(config(8, 32), 0)
    with pytest.raises(ValueError, match="has 20 tokens: 0 chunks of 32"):
        counting(prepared, n_train=20).batch(config(8, 32, chunk_len=32), 0)


@given(n=st.integers(1, 300), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000))
def test_shuffled_is_a_permutation(n, seed, epoch):
    assert sorted(shuffled(np.arange(n), n, seed, epoch)) == list(range(n))


def test_shuffled_does_not_depend_on_what_else_is_asked():
    whole = shuffled(np.arange(1000), 1000, 1, 2)
    assert [shuffled(np.array([i]), 1000, 1, 2)[0] for i in range(0, 1000, 97)] == whole[::97].tolist()


def test_shuffled_of_a_huge_corpus_needs_no_table():
    places = shuffled(np.arange(10_000), 10**13, 0, 0)
    assert len(np.unique(places)) == 10_000 and places.min() >= 0 and places.max() < 10**13
    assert abs(places.mean() / 10**13 - 0.5) < 5 * 12**-0.5 / 100  # five standard errors of a uniform mean


@pytest.mark.parametrize("n", [2, 10, 64])
def test_shuffled_sends_a_place_everywhere_equally_often(n):
    """Chi-square of where places 0 and n-1 land over 1,000 epochs; mean n-1, standard deviation sqrt(2(n-1))."""
    images = np.array([shuffled(np.array([0, n - 1]), n, 0, epoch) for epoch in range(1000)])
    for image in images.T:
        counts = np.bincount(image, minlength=n)
        chi_square = ((counts - 1000 / n) ** 2 / (1000 / n)).sum()
        assert chi_square < (n - 1) + 5 * (2 * (n - 1)) ** 0.5


def test_shuffled_breaks_up_neighbours():
    steps = np.diff(shuffled(np.arange(10_000), 10_000, 0, 0))
    assert (np.abs(steps) <= 10).mean() < 0.01  # 0.002 by chance
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.05  # -1/2 for differences of independent draws


def test_training_reads_the_training_text_and_measures_the_other(prepared):
    """Tokens from 1000 on are held out."""
    text = counting(prepared, first_val=1000)
    read = text.held_out(10, 25, skip_tokens=5)
    assert read.inputs.dtype == np.int64 and read.inputs.tolist() == [[*range(1005, 1015)], [*range(1015, 1025)]]
    assert (read.targets == read.inputs + 1).all() and text.batch(config(8, 32), 0).inputs.max() < 1000


def test_held_out_is_shorter_where_the_text_ends_and_an_error_where_there_is_none(prepared):
    text = counting(prepared)
    assert text.held_out(10, 10**6).inputs.shape == (9, 10)  # the 100th token is a target only
    assert text.held_out(99, 10**6).inputs.shape == (1, 99)
    with pytest.raises(ValueError, match="9 tokens are less than one sequence of seq_len=10; raise the number"):
        text.held_out(10, 9, 0)
    for arguments in ((100, 10**6, 0), (10, 50, 90), (10, 50, 500)):
        with pytest.raises(ValueError, match=r"no window of seq_len=.* the held-out text has 100"):
            text.held_out(*arguments)
