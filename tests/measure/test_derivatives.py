"""Jacobian deviation: blocks with known Jacobians, plain autograd, unbiased probes with honest standard errors.

Gradient along depth: blocks that double it, one chain of derivatives at a time, and what training notes of it.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import FAMILIES, jacobian_blocks, run_config
from support.handmade_models import (
    HandMadeModel,
    brackets,
    by_layer,
    by_pair,
    found_by,
    identity,
    integers,
    normal,
    profiles,
    rng,
    score,
    scored_text,
    tokens_per_pass,
)

from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.measure.derivatives import (
    _summarise,
    add_gradient_rows,
    add_jacobian_map_rows,
    add_jacobian_rows,
)
from sparsedepth.measure.measurements import Scored
from sparsedepth.measure.variance import add_variance_rows
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities.measured import MEASURES
from sparsedepth.train.loop import train
from sparsedepth.train.runtime import resolve

TOKENS = integers(5, 3, 4)


def jacobian_deviation(probed, tokens, draws, n_probes):
    """By form."""
    rows = found_by(add_jacobian_rows, probed, tokens, draws=draws, jacobian_probes=n_probes)
    names = {form: "jacobian_deviation" + ("" if form == "per_token" else f"_{form}") for form in FORMS}
    return {
        form: SimpleNamespace(
            by_layer=by_layer(rows, name),
            standard_error=by_layer(rows, f"{name}_se"),
            score=score(rows, name),
            score_standard_error=rows.summary[f"{name}_se"],
        )
        for form, name in names.items()
    }


def gradients(probed, scored):
    return profiles(add_gradient_rows, probed, scored, scores={"stream_gradient": "gradient_gain"})["stream_gradient"]


FORMS = ("per_token", "averaged", "released")


def running_mean(x_BTD):
    """x_t + the mean of x_1 .. x_t: J_ts = I / t for s < t, and J_tt = I + I / t."""
    return x_BTD + x_BTD.cumsum(1) / torch.arange(1, x_BTD.shape[1] + 1)[:, None]


@pytest.mark.parametrize("n_probes", [None, 3])
def test_the_identity_and_a_constant_deviate_by_nothing(n_probes):
    probed = HandMadeModel([identity, lambda x: x + 7, lambda x: 1 * x], normal(5, 4))
    found = jacobian_deviation(probed, TOKENS, rng(), n_probes)
    for deviation in found.values():
        assert deviation.by_layer == deviation.standard_error == [0, 0, 0]
        assert (deviation.score.value, deviation.score.hi, deviation.score_standard_error) == (0, 0, 0)


def test_a_linear_block_by_hand():
    """x W^T has J = W at every token: ||W - I||_F of [[1, 2], [3, 0]] is sqrt(0 + 4 + 9 + 1); released: / D."""
    weight = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    found = jacobian_deviation(HandMadeModel([lambda x: x @ weight.T], normal(5, 2)), TOKENS, rng(), None)
    assert found["per_token"].by_layer == pytest.approx([14**0.5], abs=1e-6)
    assert found["averaged"].by_layer == pytest.approx([14**0.5], abs=1e-6)
    assert found["released"].by_layer == pytest.approx([14**0.5 / 2], abs=1e-6)


def test_a_block_that_mixes_tokens_by_hand():
    """T = 4, D = 2: ||J_tt - I|| = sqrt(2) / t, and the columns of J - I sum to 1 over t >= s: in all T, / T = 1."""
    found = jacobian_deviation(HandMadeModel([running_mean], normal(5, 2)), TOKENS, rng(), None)
    assert found["per_token"].by_layer == pytest.approx([(2 * (1 + 1 / 4 + 1 / 9 + 1 / 16) / 4) ** 0.5], abs=1e-6)
    assert found["averaged"].by_layer == pytest.approx([2**0.5 * (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4], abs=1e-6)
    assert found["released"].by_layer == pytest.approx([2**0.5 / 2], abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_against_plain_autograd_under_any_budget(family):
    model = Decoder(run_config(n_layers=2, d_model=16, d_ff=24, init_std=0.4, **FAMILIES[family]))
    tokens = integers(40, 3, 5)
    exact_BTDTD = {layer: jacobian_blocks(model, tokens, layer) for layer in (1, 2)}
    for max_tokens in (80, 8192):
        with tokens_per_pass(max_tokens):
            found = jacobian_deviation(ProbedDecoder(model), tokens, rng(), None)
        for layer, jacobian_BTDTD in exact_BTDTD.items():
            own_BTDD = np.einsum("btitj->btij", jacobian_BTDTD) - np.eye(16)
            norm_BT = np.linalg.norm(own_BTDD, axis=(2, 3))
            summed_DD = jacobian_BTDTD.sum(1).mean((0, 2)) - np.eye(16)
            expected = {
                "per_token": np.sqrt((norm_BT**2).mean()),
                "averaged": np.linalg.norm(own_BTDD.mean((0, 1))),
                "released": np.linalg.norm(summed_DD) / 16,
            }
            by_form = {form: found[form].by_layer[layer - 1] for form in FORMS}
            assert by_form == pytest.approx(expected, rel=1e-5)
    assert all(brackets(found[form].score) for form in FORMS)


def test_probes_are_unbiased_and_their_standard_errors_hold():
    model = Decoder(run_config(n_layers=2, d_model=16, d_ff=24, init_std=0.4))
    probed, tokens = ProbedDecoder(model), integers(40, 3, 6)
    exact = jacobian_deviation(probed, tokens, rng(), None)
    draws = [jacobian_deviation(probed, tokens, rng(seed), 8) for seed in range(80)]
    for form in FORMS:
        truth = np.array(exact[form].by_layer)
        values = np.array([draw[form].by_layer for draw in draws])
        errors = np.array([draw[form].standard_error for draw in draws])
        squares = values**2  # what is unbiased
        assert (np.abs(squares.mean(0) - truth**2) < 4 * squares.std(0) / 80**0.5).all(), form
        spread = values.std(0)
        assert (errors.mean(0) > 0.8 * spread).all() and (errors.mean(0) < 3 * spread).all(), form
        assert (np.abs(values - truth) < 4 * errors).mean() > 0.98, form
        scores = np.array([draw[form].score.value for draw in draws])
        assert draws[0][form].score_standard_error < 3 * scores.std()
        assert scores.mean() == pytest.approx(exact[form].score.value, rel=0.1)


def test_the_error_of_a_mean_over_layers_is_that_of_independent_ones():
    """Layers have their own probes: sqrt(e_1^2 + e_2^2) / 2."""
    probed = ProbedDecoder(Decoder(run_config(n_layers=2, d_model=16, d_ff=24, init_std=0.4)))
    for deviation in jacobian_deviation(probed, integers(40, 3, 8), rng(), 4).values():
        first, second = deviation.standard_error
        assert 0 < first != second > 0
        assert deviation.score_standard_error == pytest.approx((first**2 + second**2) ** 0.5 / 2)


def test_a_square_that_noise_makes_negative_is_missing_and_not_0():
    """The second layer's two draws of probes disagree: of all forms only the one that multiplies them is negative."""
    probes_NPD = np.array([[[1.0, 2.0], [2.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]], [[1.5, 1.0], [1.0, 1.0]]])
    first_NLPD = np.stack((probes_NPD, probes_NPD), axis=1)

    def summarised(second_NLPD):
        return _summarise(np.ones((3, 2, 4)), first_NLPD, second_NLPD, first_NLPD, rng(), is_exact=False)

    found = summarised(np.stack((probes_NPD, -probes_NPD), axis=1))
    averaged, released = found["jacobian_deviation_averaged"], found["jacobian_deviation_released"]
    known, missing = averaged.by_layer
    assert known is not None and known > 0 and missing is None
    assert (averaged.score.value, averaged.score.lo) == (None, None)
    assert None not in released.by_layer and released.score.value is not None
    assert summarised(first_NLPD)["jacobian_deviation_averaged"].score.value == pytest.approx(known)


def test_probes_do_not_depend_on_the_batch():
    probed, tokens = ProbedDecoder(Decoder(run_config(n_layers=2))), integers(40, 5, 8)
    with tokens_per_pass(1):
        one = jacobian_deviation(probed, tokens, rng(1), 2)
    other = jacobian_deviation(probed, tokens, rng(1), 2)
    for form in FORMS:
        assert one[form].by_layer == pytest.approx(other[form].by_layer, rel=1e-5)


def test_the_exact_form_costs_what_it_is_planned_to(monkeypatch):
    """T = 4, D = 2: 8 products for one position at a time and 2 for all; the rest of the 11 passes is the block."""
    products, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **named: products.append(1) or grad(*a, **named))
    jacobian_deviation(HandMadeModel([running_mean], normal(5, 2)), TOKENS, rng(), None)
    (planned,) = (measure.passes for measure in MEASURES if measure.name == "jacobian")
    sizes = run_config(d_model=2, n_heads=1, seq_len=4, batch_tokens=4, train_tokens=4, jacobian_probes=None)
    assert planned(sizes) == (1 + len(products), 0) == (11, 0)


def test_a_single_probe_is_refused():
    probed = HandMadeModel([identity], normal(5, 4))
    with pytest.raises(ValueError, match="n_probes=1"):
        jacobian_deviation(probed, TOKENS, rng(), 1)


def test_gradients_along_the_stream_by_hand():
    """x_2 = 3 (2 x_0): by the chain rule g_1 = 3 g_2 and g_0 = 6 g_2. The identity changes nothing."""
    scored = scored_text(integers(20, 3, 9))
    found = gradients(HandMadeModel([lambda x: 2 * x, identity, lambda x: 3 * x], normal(20, 8)), scored)
    assert found.by_layer == pytest.approx([6, 3, 3, 1], rel=1e-5)
    assert found.score.value == pytest.approx(6, rel=1e-5) and found.score.lo == pytest.approx(6, rel=1e-5)


def test_no_gradient_has_no_ratio():
    """A last block that forgets its input: nothing reaches the others, the gain is 0; a loss of nothing has none."""
    forgets = HandMadeModel([identity, lambda x: 0 * x + 1], normal(20, 8))
    assert gradients(forgets, scored_text(integers(20, 2, 9))).by_layer == [0, 0, 1]
    scored = Scored(integers(20, 2, 8), torch.full((2, 8), -100))
    assert gradients(forgets, scored).by_layer == [None] * 3


def test_a_sign_is_seen_by_neither_and_a_turn_by_the_jacobian_alone():
    """x -> -x: as far from the identity as a block of twice the stream, which stays as large, and so does g."""
    probed, scored = HandMadeModel([lambda x: -x] * 2, normal(20, 8)), scored_text(integers(20, 3, 9))
    assert gradients(probed, scored).by_layer == pytest.approx([1, 1, 1])
    assert jacobian_deviation(probed, scored.inputs, rng(), None)["per_token"].by_layer[0] > 1
    growth = by_layer(found_by(add_variance_rows, probed, scored.inputs), "residual_variance")
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
            found = gradients(probed, scored_text(tokens))
        assert found.by_layer == pytest.approx([norm / norms[-1] for norm in norms], rel=1e-4)


def test_batches_of_unequal_scored_positions_add_up():
    """The loss is a mean over all positions, in one batch or in three: of 1, 4 and 16 that count, in a stream where
    each token's gradient has another ratio, since block 1 squares."""
    inputs, counts = integers(20, 3, 16), torch.tensor([[1], [4], [16]])
    targets = integers(20, 3, 16, seed=1).masked_fill(torch.arange(16) >= counts, -100)
    probed = HandMadeModel([lambda x: x * x], normal(20, 8))
    whole = gradients(probed, Scored(inputs, targets))
    with tokens_per_pass(1):
        parts = gradients(probed, Scored(inputs, targets))
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


def test_ranges_of_blocks_by_hand():
    """T = 4, D = 2: blocks that double, or mix tokens with J_tt = (1 + 1/t) I, have Jacobians 2 I, (1 + 1/t) I, and
    together 2 (1 + 1/t) I, whatever other tokens do; the deviation is sqrt(2) times the root mean square of less 1."""
    model = HandMadeModel([lambda x: 2 * x, running_mean, identity], normal(5, 2))
    tokens, t = integers(5, 4000, 4), np.arange(1, 5)
    rows = found_by(add_jacobian_map_rows, model, tokens)
    found = by_pair(rows, "jacobian_map")
    alone, both = (2 * (1 / t**2).mean()) ** 0.5, (2 * ((1 + 2 / t) ** 2).mean()) ** 0.5
    expected = {(0, 1): 2**0.5, (0, 2): both, (1, 2): alone, (0, 3): both, (1, 3): alone, (2, 3): 0}
    assert found == pytest.approx(expected, rel=0.05) and len(rows.pairs) == 6


def test_ranges_against_plain_autograd_under_any_budget():
    model = Decoder(run_config(n_layers=3, d_model=16, d_ff=24, init_std=0.4, **FAMILIES["gqa_lns"]))
    probed, tokens = ProbedDecoder(model), integers(40, 150, 5)
    found = by_pair(found_by(add_jacobian_map_rows, probed, tokens), "jacobian_map")
    with tokens_per_pass(3000):
        again = by_pair(found_by(add_jacobian_map_rows, probed, tokens), "jacobian_map")
    assert again == pytest.approx(found, rel=1e-4)
    single = jacobian_deviation(probed, tokens, rng(), 2)["per_token"].by_layer
    assert [found[layer - 1, layer] for layer in (1, 2, 3)] == pytest.approx(single, rel=0.1)
    few = tokens[:12]
    exact = []
    for row_T in few:
        through = torch.autograd.functional.jacobian(
            lambda x: probed.block(3, probed.block(2, x[None]))[0],
            probed.block(1, probed.embed(row_T[None]))[0].detach(),
        )
        exact += [(through[t, :, t] - torch.eye(16)).square().sum().item() for t in range(5)]
    assert found[1, 3] == pytest.approx(np.mean(exact) ** 0.5, rel=0.15)
