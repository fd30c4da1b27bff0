"""The split depends on the text alone: not on order, copies or neighbours."""

import hashlib

import pytest
from hypothesis import given, strategies as st

from sparsedepth.data.pipeline import split

TEXTS = [f"document {i}" for i in range(400)]


def sides(texts, val_fraction) -> tuple[set[str], set[str]]:
    documents = list(split(texts, val_fraction))
    train = [each.text for each in documents if not each.held_out]
    held_out = [each.text for each in documents if each.held_out]
    assert len(set(train)) == len(train) and len(set(held_out)) == len(held_out)
    return set(train), set(held_out)


def test_the_border_is_the_first_64_bits_of_sha256():
    _, held_out = sides(TEXTS, 0.25)
    assert held_out == {
        text for text in TEXTS if int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64 < 0.25
    }
    assert 70 < len(held_out) < 130  # 100 expected, standard deviation 9


@given(
    st.lists(st.sampled_from(TEXTS), min_size=2, max_size=12), st.sampled_from([0.001, 0.05, 0.3, 0.49]), st.randoms()
)
def test_both_sides_have_text_and_order_and_copies_do_not_matter(texts, val_fraction, random):
    if len(set(texts)) == 1:
        with pytest.raises(ValueError, match="1 distinct document"):
            sides(texts, val_fraction)
        return
    train, held_out = sides(texts, val_fraction)
    assert train and held_out and not train & held_out
    assert train | held_out == set(texts)
    again = [*texts, *texts]
    random.shuffle(again)
    assert sides(again, val_fraction) == (train, held_out)


def test_where_all_are_on_one_side_the_one_nearest_the_border_changes_it():
    def key(text):
        return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)

    few = TEXTS[:20]
    _, held_out = sides(few, 1e-6)
    assert held_out == {min(few, key=key)}
    train, _ = sides(few, 1 - 1e-6)
    assert train == {max(few, key=key)}


def test_more_documents_move_at_most_the_one_at_the_border():
    for n in range(2, 60):
        _, before = sides(TEXTS[:n], 0.05)
        _, after = sides(TEXTS[: n + 1], 0.05)
        assert len(before - after) <= 1 and len(after - before) <= 1


def test_what_was_given_out_as_training_text_is_never_held_out_later():
    """A first pass that stops early (to train a tokenizer) must not have seen held-out text."""
    train, _ = sides(TEXTS[:50], 0.001)
    for n in range(1, 50):
        stream = (each.text for each in split(TEXTS[:50], 0.001) if not each.held_out)
        assert {next(stream) for _ in range(min(n, len(train)))} <= train


@pytest.mark.parametrize("texts", [[], ["only"], ["only", "only"]])
def test_fewer_than_two_documents_is_an_error(texts):
    with pytest.raises(ValueError, match="use a corpus of at least two documents"):
        list(split(texts, 0.05))
