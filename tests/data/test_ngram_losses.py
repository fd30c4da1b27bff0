"""Tables of counts: by hand, against a plain count, and at the chance that a task's symmetry gives."""

import math
from collections import Counter

import numpy as np
import pytest
from support.tiny_sweep import BASE, corpus

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.ngram_losses import STRENGTHS, after_tokens_of_text, losses_ahead, losses_of, ngram_losses
from sparsedepth.data.sequences import Sequences, after_tokens, next_tokens, open_source


def test_a_small_table_by_hand():
    """Training pairs ab ab aa ba over {a, b}; held out ab, ba."""
    held_out = Sequences(inputs=np.array([[0, 1]]), targets=np.array([[1, 0]]))
    trained = Sequences(inputs=np.array([[0, 0, 0, 1]]), targets=np.array([[1, 1, 0, 0]]))
    unigram, bigram, chance = losses_of(after_tokens(held_out, [trained], 2)).values()
    assert chance is None and unigram == pytest.approx(math.log(2))  # each token twice of four
    by_strength = [-(math.log((2 + m / 2) / (3 + m)) + math.log((1 + m / 2) / (1 + m))) / 2 for m in STRENGTHS]
    assert bigram == pytest.approx(min(by_strength)) and bigram == by_strength[0]
    unscored = Sequences(inputs=trained.inputs, targets=np.full_like(trained.inputs, IGNORED))
    assert {*losses_of(after_tokens(held_out, [unscored], 2)).values()} == {None}


def test_a_texts_tables_count_the_very_tokens_trained_on(tmp_path):
    config = build(RunConfig, {**BASE, "corpus": str(corpus(tmp_path))}, "test")
    source = open_source(config, tmp_path / "data")
    looked: list[None] = []
    found = ngram_losses(source, config, tick=lambda: looked.append(None))
    assert len(looked) == config.n_steps and found["chance_loss"] is None
    pairs, firsts, targets = Counter(), Counter(), Counter()
    for step in range(config.n_steps):
        part = source.batch(config, step)
        for x, y in zip(part.inputs.ravel().tolist(), part.targets.ravel().tolist(), strict=True):
            pairs[x, y] += 1
            firsts[x] += 1
            targets[y] += 1
    held_out, n = source.held_out(config.seq_len, config.val_tokens), sum(targets.values())
    positions = list(zip(held_out.inputs.ravel().tolist(), held_out.targets.ravel().tolist(), strict=True))
    p = {y: (targets[y] + 1) / (n + 264) for _, y in positions}
    plain = [
        -sum(math.log((pairs[x, y] + m * p[y]) / (firsts[x] + m)) for x, y in positions) / len(positions)
        for m in STRENGTHS
    ]
    assert found["unigram_loss"] == pytest.approx(-sum(math.log(p[y]) for _, y in positions) / len(positions))
    assert found["bigram_loss"] == pytest.approx(min(plain)) and found["bigram_loss"] < found["unigram_loss"]
    assert losses_ahead(source, config) == found


def test_the_tables_of_another_text_count_its_training_part(tmp_path):
    """Every token of the training part once, whatever the windows: the same as one long sequence."""
    config = build(RunConfig, {**BASE, "corpus": str(corpus(tmp_path))}, "test")
    source = open_source(config, tmp_path / "data")
    ids, held_out = np.array(source.corpus.train), source.held_out(config.seq_len, config.val_tokens)
    expected = losses_of(after_tokens(held_out, [next_tokens(ids[None].astype(int))], 264))
    assert (
        losses_of(after_tokens_of_text(held_out, source.corpus.train, 264)) == expected
        and expected["chance_loss"] is None
    )


@pytest.mark.parametrize(
    ("fields", "chance"),
    [
        ({"corpus": "task:state_tracking", "n_operations": 4}, math.log(5)),
        ({"corpus": "task:state_tracking", "task_group": "A5", "tracked": "element"}, math.log(60)),
        ({"corpus": "task:state_tracking", "n_operations": 4, "task_form": "text"}, math.log(5)),
        ({"corpus": "task:k_hop", "min_hops": 0, "max_hops": 0}, math.log(4)),
    ],
)
def test_chance_is_what_symmetry_says(tmp_path, fields, chance):
    """A task whose answers are evenly spread: ln of their number."""
    config = build(RunConfig, {**BASE, "val_fraction": 0.05, "val_tokens": 16_384, **fields}, "test")
    found = ngram_losses(open_source(config, tmp_path), config)
    assert found["chance_loss"] == pytest.approx(chance, rel=0.01)
    assert found["unigram_loss"] is None and found["bigram_loss"] is None


def test_chance_knows_that_far_hops_break_off_early_in_a_sequence(tmp_path):
    fields = {"corpus": "task:k_hop", "max_hops": 8, "val_fraction": 0.05, "val_tokens": 16_384}
    config = build(RunConfig, {**BASE, **fields}, "test")
    assert ngram_losses(open_source(config, tmp_path), config)["chance_loss"] < 0.9 * math.log(5)
