"""Jacobian deviation: blocks with known Jacobians, plain autograd, unbiased probes with honest standard errors."""

import numpy as np
import pytest
import torch
from reference import FAMILIES, jacobian_blocks, run_config
from support.handmade_models import HandMadeModel, brackets, identity, integers, normal, rng, tokens_per_pass

from sparsedepth.measure import jacobian
from sparsedepth.measure.jacobian import FORMS, jacobian_deviation
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities.measured import MEASURES

TOKENS = integers(5, 3, 4)


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
    probes_NPD = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]], [[1.5, 1.0], [1.0, 1.0]]])
    first, second = ([(torch.ones(3, 4), (probes_NPD, sign * probes_NPD), probes_NPD)] for sign in (1, -1))
    found = jacobian._summarise([first, second], 2, 2, rng())
    known, missing = found["averaged"].by_layer
    assert known is not None and known > 0 and missing is None
    assert (found["averaged"].score.value, found["averaged"].score.lo) == (None, None)
    assert None not in found["released"].by_layer and found["released"].score.value is not None
    assert jacobian._summarise([first, first], 2, 2, rng())["averaged"].score.value == pytest.approx(known)


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
