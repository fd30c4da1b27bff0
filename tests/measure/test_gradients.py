"""Gradient along depth: blocks that double it, one chain of derivatives at a time, and what training notes of it."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import run_config
from support.handmade_models import HandMadeModel, identity, integers, normal, tokens_per_pass

from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.measure.gradients import gradients
from sparsedepth.measure.jacobian import jacobian_deviation
from sparsedepth.measure.measurements import Scored
from sparsedepth.measure.variance import residual_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.train.loop import train
from sparsedepth.train.runtime import resolve

RNG = np.random.default_rng(0)


def test_by_hand():
    """x_2 = 3 (2 x_0): by the chain rule g_1 = 3 g_2 and g_0 = 6 g_2. The identity changes nothing."""
    scored = Scored.text(integers(20, 3, 9))
    found = gradients(HandMadeModel([lambda x: 2 * x, identity, lambda x: 3 * x], normal(20, 8)), scored, RNG)
    assert found.by_layer == pytest.approx([6, 3, 3, 1], rel=1e-5)
    assert found.score.value == pytest.approx(6, rel=1e-5) and found.score.lo == pytest.approx(6, rel=1e-5)


def test_no_gradient_has_no_ratio():
    """A last block that forgets its input: nothing reaches the others, the gain is 0; a loss of nothing has none."""
    forgets = HandMadeModel([identity, lambda x: 0 * x + 1], normal(20, 8))
    assert gradients(forgets, Scored.text(integers(20, 2, 9)), RNG).by_layer == [0, 0, 1]
    scored = Scored(integers(20, 2, 8), torch.full((2, 8), -100))
    assert gradients(forgets, scored, RNG).by_layer == [None] * 3


def test_a_sign_is_seen_by_neither_and_a_turn_by_the_jacobian_alone():
    """x -> -x: as far from the identity as a block of twice the stream, which stays as large, and so does g."""
    probed, scored = HandMadeModel([lambda x: -x] * 2, normal(20, 8)), Scored.text(integers(20, 3, 9))
    assert gradients(probed, scored, RNG).by_layer == pytest.approx([1, 1, 1])
    assert jacobian_deviation(probed, scored.inputs, RNG, None)["per_token"].by_layer[0] > 1
    growth = residual_variance(probed, scored.inputs, RNG)["residual_variance"].by_layer
    assert growth == pytest.approx([growth[0]] * 3)


def test_against_one_derivative_per_layer_under_any_budget():
    model, tokens = Decoder(run_config(depth_scale="lns", n_kv_heads=2)).eval(), integers(40, 3, 17)
    probed, norms = ProbedDecoder(model), []
    for start in range(6):
        x = probed.embed(tokens[:, :-1])
        for layer in range(1, start + 1):
            x = probed.block(layer, x)
        x = leaf = x.detach().requires_grad_()
        for layer in range(start + 1, 6):
            x = probed.block(layer, x)
        F.cross_entropy(probed.logits(x).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        norms.append(leaf.grad.norm().item())
    for max_tokens in (1, 8192):
        with tokens_per_pass(max_tokens):
            found = gradients(probed, Scored.text(tokens), RNG)
        assert found.by_layer == pytest.approx([norm / norms[-1] for norm in norms], rel=1e-4)


def test_batches_of_unequal_scored_positions_add_up():
    """The loss is a mean over all positions, in one batch or in three: of 1, 4 and 16 that count, in a stream where
    each token's gradient has another ratio, since block 1 squares."""
    inputs, counts = integers(20, 3, 16), torch.tensor([[1], [4], [16]])
    targets = integers(20, 3, 16, seed=1).masked_fill(torch.arange(16) >= counts, -100)
    probed = HandMadeModel([lambda x: x * x], normal(20, 8))
    whole = gradients(probed, Scored(inputs, targets), RNG)
    with tokens_per_pass(1):
        parts = gradients(probed, Scored(inputs, targets), RNG)
    assert parts.by_layer == pytest.approx(whole.by_layer, rel=1e-6)


def test_training_notes_the_norm_of_each_blocks_gradient_before_it_is_clipped():
    """Of the first step, against a backward pass by hand; then at every observation and of the last step. Only where
    the measure is asked for."""
    fields = {"batch_tokens": 32, "train_tokens": 32 * 7, "observe_every": 2, "precision": "fp32", "grad_clip": 1e-3}
    sequences = next_tokens(np.arange(34).reshape(2, 17) % 40)
    trained = {}
    for asked in (["gradients"], ["loss"]):
        cfg = run_config(**fields, measures=asked)
        runtime = dataclasses.replace(resolve(cfg, RuntimeConfig(device="cpu")))
        trained[asked[0]] = train(Decoder(cfg), cfg, runtime, lambda step: sequences)
    assert trained["loss"].observations == []
    rows = trained["gradients"].observations
    assert [row["step"] for row in rows if row["layer"] == 5] == [1, 2, 4, 6, 7]
    model = Decoder(run_config(**fields))
    logits = model(torch.from_numpy(sequences.inputs))
    F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(sequences.targets).flatten()).backward()
    for row, block in zip(rows[:5], model.blocks, strict=True):
        expected = sum(weight.grad.square().sum().item() for weight in block.parameters()) ** 0.5
        assert row["value"] == pytest.approx(expected, rel=1e-4) and row["metric"] == "gradient_norm"
