"""Attention sparsity, entropy, sink: uniform and one-hot attention, transformers, a plain loop, blocks of rows."""

import numpy as np
import pytest
import torch
from reference import attention_weights, run_config
from support.handmade_models import HandMadeModel, identity, integers, known, normal, rng, tokens_per_pass
from support.largest_tensor import Largest

from sparsedepth.measure import attention_sparsity as module
from sparsedepth.measure.attention_sparsity import attention_sparsity, attention_sums
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import AttentionForm, ProbedDecoder


def uniform(layer, x_BTD):
    zeros = torch.zeros(x_BTD.shape[0], 2, x_BTD.shape[1], 4)
    return zeros, zeros[:, :1]


def to_itself(layer, x_BTD):
    """Scores 100 on the diagonal, 0 elsewhere."""
    n_tokens = x_BTD.shape[1]
    eye = torch.eye(n_tokens).expand(x_BTD.shape[0], 1, -1, -1)
    return 100 * n_tokens**0.5 * eye, eye


def to_the_first(layer, x_BTD):
    keys = torch.zeros(x_BTD.shape[0], 1, x_BTD.shape[1], 4)
    keys[:, :, 0] = 100.0
    return torch.ones_like(keys), keys


def test_uniform_attention():
    """Row i holds i weights 1/i. T = 8: 36 weights; below 0.3 are those of rows 4..8: 4 + 5 + 6 + 7 + 8 = 30.
    H_i = ln i and a_i1 = 1/i: over T = 4 rows ln 24 / 4, and (1/2 + 1/3 + 1/4) / 3. Of one token neither is known."""
    probed = HandMadeModel([identity] * 3, normal(5, 4), queries_keys=uniform)
    found = attention_sparsity(probed, integers(5, 2, 8), [0.3, 0.1], [0.9, 1.1], rng())
    assert found["attention_sparsity@0.3"].total.value == pytest.approx(30 / 36, abs=1e-12)
    assert found["attention_sparsity@0.1"].total.value == 0.0
    assert found["attention_sparsity_rel@0.9"].total.value == 0.0  # no weight is below 0.9 of what it is
    assert found["attention_sparsity_rel@1.1"].total.value == 1.0
    assert found["attention_sparsity@0.3"].by_head.shape == (3, 2)
    assert found["attention_sparsity@0.3"].n == found["attention_sparsity_rel@1.1"].n == 2 * 36
    found = attention_sparsity(probed, integers(5, 2, 4), [0.1], [0.5], rng())
    assert found["attention_entropy"].total.value == pytest.approx(np.log(24) / 4, abs=1e-6)
    assert found["attention_entropy_rel"].total.value == pytest.approx(1.0, abs=1e-6)
    assert found["attention_sink"].total.value == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, abs=1e-6)
    assert found["attention_sink"].by_head.shape == (3, 2)
    assert (found["attention_entropy"].n, found["attention_entropy_rel"].n, found["attention_sink"].n) == (8, 6, 6)
    single = attention_sparsity(probed, integers(5, 3, 1), [0.1], [0.5], rng())
    assert (single["attention_entropy_rel"].total.value, single["attention_sink"].total.value) == (None, None)
    assert single["attention_entropy"].total.value == 0.0


def test_the_absolute_share_grows_with_length_alone_and_the_relative_one_does_not():
    probed = HandMadeModel([identity], normal(5, 4), queries_keys=uniform)
    short, long = (attention_sparsity(probed, integers(5, 1, n), [0.05], [0.9], rng()) for n in (20, 80))
    assert short["attention_sparsity@0.05"].total.value == 0.0
    assert long["attention_sparsity@0.05"].total.value == pytest.approx(1 - (20 * 21) / (80 * 81), abs=1e-12)
    assert short["attention_sparsity_rel@0.9"].total.value == long["attention_sparsity_rel@0.9"].total.value == 0.0


@pytest.mark.parametrize(("queries_keys", "sink"), [(to_itself, 0.0), (to_the_first, 1.0)])
def test_attention_to_one_token_alone(queries_keys, sink):
    """One weight of each row is 1, the other T (T - 1) / 2 are 0."""
    probed = HandMadeModel([identity], normal(5, 4), queries_keys=queries_keys)
    found = attention_sparsity(probed, integers(5, 1, 9), [1e-3], [0.1], rng())
    for name in ("attention_sparsity@0.001", "attention_sparsity_rel@0.1"):
        assert found[name].total.value == pytest.approx(36 / 45, abs=1e-12)
    for name, expected in (("attention_entropy", 0), ("attention_entropy_rel", 0), ("attention_sink", sink)):
        assert found[name].total.value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("fields", [{}, {"n_kv_heads": 2, "depth_scale": "lns"}, {"n_kv_heads": 1}])
def test_against_a_plain_loop(fields):
    model = Decoder(run_config(init_std=0.4, **fields))
    tokens = integers(40, 2, 12)
    with tokens_per_pass(12):
        found = attention_sparsity(ProbedDecoder(model), tokens, [0.05, 0.01], [0.5], rng())
    rows = np.arange(1, 13)[:, None]
    visible = np.tril(np.ones((12, 12), dtype=bool))
    for layer in range(1, 6):
        weights = attention_weights(model, tokens, layer)
        for head in range(4):
            share = {tau: (weights[:, head] < tau)[:, visible].mean() for tau in (0.05, 0.01)}
            ours = {tau: found[f"attention_sparsity@{tau:g}"].by_head[layer - 1, head] for tau in share}
            assert ours == pytest.approx(share, abs=1e-9)
            relative = (weights[:, head] < 0.5 / rows)[:, visible].mean()
            assert found["attention_sparsity_rel@0.5"].by_head[layer - 1, head] == pytest.approx(relative, abs=1e-9)
        entropy_BHT = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
        by_head = {
            "attention_entropy": entropy_BHT.mean((0, 2)),
            "attention_entropy_rel": (entropy_BHT[..., 1:] / np.log(rows[1:, 0])).mean((0, 2)),
            "attention_sink": weights[..., 1:, 0].mean((0, 2)),
        }
        for name, expected in by_head.items():
            np.testing.assert_allclose(found[name].by_head[layer - 1], expected, atol=1e-5)
    assert 0.05 < known(found["attention_sparsity@0.05"].total.value) < 0.95


def test_blocks_of_rows_give_the_same(monkeypatch):
    q_BHTK, k_BGTK = normal(2, 4, 23, 6), normal(2, 2, 23, 6, seed=1)
    whole = attention_sums(q_BHTK, k_BGTK, AttentionForm(), taus=[0.05, 0.01], relative_taus=[0.5])
    for rows in (1, 5, 22):
        monkeypatch.setattr(module, "MAX_WEIGHTS", rows * 2 * 4 * 23)
        found = attention_sums(q_BHTK, k_BGTK, AttentionForm(), taus=[0.05, 0.01], relative_taus=[0.5])
        shares = [name for name in whole if "@" in name]
        assert len(shares) == 3 and all(torch.equal(found[name], whole[name]) for name in shares)
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
    assert all(whole[name].min() > 0 and whole[name].max() < 23 * 24 // 2 for name in shares)


def test_a_context_of_8192_needs_no_square_of_it():
    q_BHTK, k_BGTK = normal(1, 1, 8192, 2), normal(1, 1, 8192, 2, seed=1)
    with Largest() as seen:
        sums = attention_sums(q_BHTK, k_BGTK, AttentionForm(), taus=[1e-4], relative_taus=[])
    assert 8192 < seen.entries <= module.MAX_WEIGHTS < 8192**2 / 8
    assert len(sums) == 4 and all(sum_BH.shape == (1, 1) and (sum_BH > 0).all() for sum_BH in sums.values())


def test_without_causality_every_row_has_all_weights():
    """Uniform attention over T = 4, as in a ViT: rows of 1/4, of entropy ln 4; 16 weights, all below 0.3 and 1.1 / 4,
    none below 0.2 and 0.9 / 4; the first token has 1/4."""
    probed = HandMadeModel([identity], normal(5, 4))
    probed.causal = False
    zeros = torch.zeros(2, 2, 4, 4)
    probed.attention_inputs = lambda layer, x_BTD: (zeros, zeros[:, :1], AttentionForm(causal=False))
    found = attention_sparsity(probed, integers(5, 2, 4), [0.3, 0.2], [1.1, 0.9], rng())
    shares = {name: found[name].total.value for name in found if name.startswith("attention_sparsity")}
    assert list(shares.values()) == [1.0, 0.0, 1.0, 0.0] and found["attention_sparsity@0.3"].n == 2 * 16
    assert found["attention_entropy"].total.value == pytest.approx(np.log(4), abs=1e-6)
    assert found["attention_entropy_rel"].total.value == pytest.approx(1.0, abs=1e-6)
    assert found["attention_sink"].total.value == pytest.approx(1 / 4, abs=1e-6)
