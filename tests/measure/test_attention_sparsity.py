"""Attention sparsity: uniform and one-hot attention, transformers' own weights, a plain loop, blocks of rows."""

import numpy as np
import pytest
import torch
from parity import carry, reference
from reference import attention_weights, run_config
from toy import ToyStack, identity, integers, known, normal

from sparsedepth.measure import attention_sparsity as module
from sparsedepth.measure.attention_sparsity import attention_sparsity, count_below
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.stack import DecoderStack


def rng():
    return np.random.default_rng(0)


def uniform(layer, x_BTD):
    zeros = torch.zeros(x_BTD.shape[0], 2, x_BTD.shape[1], 4)
    return zeros, zeros[:, :1]


def to_itself(layer, x_BTD):
    """Scores 100 on the diagonal, 0 elsewhere."""
    n_tokens = x_BTD.shape[1]
    eye = torch.eye(n_tokens).expand(x_BTD.shape[0], 1, -1, -1)
    return 100 * n_tokens**0.5 * eye, eye


def test_uniform_attention():
    """Row i holds i weights 1/i. T = 8: 36 weights; below 0.3 are those of rows 4..8: 4 + 5 + 6 + 7 + 8 = 30."""
    stack = ToyStack([identity] * 3, normal(5, 4), queries_keys=uniform)
    found = attention_sparsity(stack, integers(5, 2, 8), [0.3, 0.1], [0.9, 1.1], rng())
    assert found.absolute[0.3].total.value == pytest.approx(30 / 36, abs=1e-12)
    assert found.absolute[0.1].total.value == 0.0
    assert found.relative[0.9].total.value == 0.0  # no weight is below 0.9 of what it is
    assert found.relative[1.1].total.value == 1.0
    assert found.absolute[0.3].by_head.shape == (3, 2) and found.absolute[0.3].by_layer.shape == (3,)
    assert found.weights_per_head == 2 * 36


def test_the_absolute_share_grows_with_length_alone_and_the_relative_one_does_not():
    stack = ToyStack([identity], normal(5, 4), queries_keys=uniform)
    short, long = (attention_sparsity(stack, integers(5, 1, n), [0.05], [0.9], rng()) for n in (20, 80))
    assert short.absolute[0.05].total.value == 0.0
    assert long.absolute[0.05].total.value == pytest.approx(1 - (20 * 21) / (80 * 81), abs=1e-12)
    assert short.relative[0.9].total.value == long.relative[0.9].total.value == 0.0


def test_attention_to_itself_alone():
    """One weight of each row is 1, the other T (T - 1) / 2 are 0."""
    stack = ToyStack([identity], normal(5, 4), queries_keys=to_itself)
    found = attention_sparsity(stack, integers(5, 1, 9), [1e-3], [0.1], rng())
    assert found.absolute[1e-3].total.value == found.relative[0.1].total.value == pytest.approx(36 / 45, abs=1e-12)


@pytest.mark.parametrize("fields", [{}, {"n_kv_heads": 2, "depth_scale": "lns"}, {"n_kv_heads": 1}])
def test_against_a_plain_loop(fields):
    model = Decoder(run_config(init_std=0.4, **fields))
    tokens = integers(40, 2, 12)
    found = attention_sparsity(DecoderStack(model), tokens, [0.05, 0.01], [0.5], rng(), max_tokens=12)
    rows = np.arange(1, 13)[:, None]
    visible = np.tril(np.ones((12, 12), dtype=bool))
    for layer in range(1, 6):
        weights = attention_weights(model, tokens, layer)
        for head in range(4):
            share = {tau: (weights[:, head] < tau)[:, visible].mean() for tau in (0.05, 0.01)}
            assert {tau: found.absolute[tau].by_head[layer - 1, head] for tau in share} == pytest.approx(
                share, abs=1e-9
            )
            relative = (weights[:, head] < 0.5 / rows)[:, visible].mean()
            assert found.relative[0.5].by_head[layer - 1, head] == pytest.approx(relative, abs=1e-9)
    assert 0.05 < known(found.absolute[0.05].total.value) < 0.95


def test_against_the_weights_that_transformers_reports():
    model = Decoder(run_config(init_std=0.4, n_kv_heads=2))
    tokens = integers(40, 3, 16)
    other = carry(model, reference(model.config))
    with torch.no_grad():
        attentions = other(tokens, output_attentions=True).attentions
    found = attention_sparsity(DecoderStack(model), tokens, [0.02], [0.1], rng())
    visible = torch.ones(16, 16, dtype=torch.bool).tril()
    for layer, weight_BHTT in enumerate(attentions):
        by_head = (weight_BHTT < 0.02)[..., visible].double().mean((0, 2))
        np.testing.assert_allclose(found.absolute[0.02].by_head[layer], by_head, atol=1e-9)


def test_blocks_of_rows_count_the_same(monkeypatch):
    q_BHTK, k_BGTK = normal(2, 4, 23, 6), normal(2, 2, 23, 6, seed=1)
    whole = count_below(q_BHTK, k_BGTK, [0.05, 0.01], [0.5])
    for rows in (1, 5, 22):
        monkeypatch.setattr(module, "MAX_WEIGHTS", rows * 2 * 4 * 23)
        assert torch.equal(count_below(q_BHTK, k_BGTK, [0.05, 0.01], [0.5]), whole)
    assert whole.min() > 0 and whole.max() < 23 * 24 // 2


def test_no_more_weights_at_a_time_than_said(monkeypatch):
    sizes, rows_of = [], module._attention_rows
    monkeypatch.setattr(module, "MAX_WEIGHTS", 1000)
    monkeypatch.setattr(module, "_attention_rows", lambda *args: sizes.append(rows_of(*args)) or sizes[-1])
    count_below(normal(1, 4, 50, 6), normal(1, 2, 50, 6), [0.1], [])
    assert max(weight.numel() for weight in sizes) <= 1000 and len(sizes) == 10
