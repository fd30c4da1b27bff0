"""The hand-written derivatives are those of the plain formulas."""

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model import fused
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.norms import RMSNorm
from sparsedepth.model.self_attention import rotate


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_products_gradient_is_that_of_finite_differences():
    assert gradcheck(fused.product, (draws(2, 3, 8).requires_grad_(), draws(4, 8, seed=1).requires_grad_()))


def test_the_norms_gradient_is_that_of_finite_differences():
    x, weight = draws(2, 3, 8).requires_grad_(), draws(8, seed=1).requires_grad_()
    assert gradcheck(lambda x, weight: fused.rms_norm(x, weight, 1e-6), (x, weight))


def angles(n_tokens: int, d_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle_TK = draws(n_tokens, d_head // 2).repeat(1, 2)
    return angle_TK.cos(), angle_TK.sin()


def matrices(*n_outputs: int) -> list[torch.Tensor]:
    return [draws(n, 8, seed=seed).requires_grad_() for seed, n in enumerate(n_outputs, start=1)]


def test_the_gradient_of_rotated_heads_is_that_of_finite_differences():
    def heads(x_BTD, *weights_XD):
        return fused.rotated_heads(x_BTD, *weights_XD, angles(5, 4))

    assert gradcheck(heads, (draws(2, 5, 8).requires_grad_(), *matrices(8, 4, 4)))


def test_a_gradient_of_any_strides_is_turned():
    x_BTD = draws(2, 5, 8).requires_grad_()
    q_BHTK, *_ = fused.rotated_heads(x_BTD, *matrices(8, 4, 4), angles(5, 4))
    (expanded,) = torch.autograd.grad(q_BHTK.sum(), x_BTD, retain_graph=True)
    (whole,) = torch.autograd.grad(q_BHTK, x_BTD, torch.ones_like(q_BHTK))
    assert torch.equal(expanded, whole)


def test_the_gradient_of_a_sum_is_that_of_finite_differences():
    x, hidden = draws(2, 3, 4, seed=2).requires_grad_(), draws(2, 3, 8).requires_grad_()
    assert gradcheck(fused.add_product, (x, hidden, *matrices(4)))


def test_a_norm_inside_an_operation_has_the_gradient_of_finite_differences():
    x_BTD, norm = draws(2, 5, 8).requires_grad_(), draws(8, seed=3).requires_grad_()

    def heads(x_BTD, norm, *weights_XD):
        return fused.rotated_heads(x_BTD, *weights_XD, angles(5, 4), norm=fused.Norm(norm, 1e-6))

    def hidden(x_BTD, norm, *weights_XD):
        return fused.swiglu(x_BTD, *weights_XD, norm=fused.Norm(norm, 1e-6))

    assert gradcheck(heads, (x_BTD, norm, *matrices(8, 4, 4)))
    assert gradcheck(hidden, (x_BTD, norm, *matrices(6, 6)))
    normed_BTD = fused.rms_norm(x_BTD, norm, 1e-6)
    torch.testing.assert_close(hidden(x_BTD, norm, *matrices(6, 6)), fused.swiglu(normed_BTD, *matrices(6, 6)))
    torch.testing.assert_close(
        heads(x_BTD, norm, *matrices(8, 4, 4)), fused.rotated_heads(normed_BTD, *matrices(8, 4, 4), angles(5, 4))
    )


def test_the_gradient_of_swiglu_is_that_of_finite_differences():
    assert gradcheck(fused.swiglu, (draws(2, 3, 8).requires_grad_(), *matrices(6, 6)))


def test_a_quarter_turn_by_hand():
    """Of a head of two channels, (1, 2) becomes (-2, 1) in q and k, and v stays."""
    one = torch.eye(2)
    rotary = torch.zeros(1, 2), torch.ones(1, 2)
    parts = fused.rotated_heads(torch.tensor([[[1.0, 2.0]]]), one, one, one, rotary)
    assert [part.flatten().tolist() for part in parts] == [[-2.0, 1.0], [-2.0, 1.0], [1.0, 2.0]]


def test_pairs_by_hand():
    weight_XD = torch.arange(8.0)[:, None]  # two heads of 4: halves (0, 1), (2, 3) and (4, 5), (6, 7)
    assert fused.interleave_halves(weight_XD, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("training", [True, False])
def test_training_and_measuring_compute_one_function(training):
    norm = RMSNorm(8, 1e-6).train(training)
    torch.nn.init.normal_(norm.weight)
    x = draws(4, 8).float().requires_grad_()
    plain = norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    (expected,) = torch.autograd.grad(plain.square().sum(), x)
    y = norm(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(found, expected)
    assert ("_RMSNorm" in type(y.grad_fn).__name__) is training


WHOLE = {"_HeadsBackward", "_SwiGLUBackward", "_SumBackward"}
"""of a block both of whose branches are fused as a whole"""


@pytest.mark.parametrize(
    ("fields", "by_hand"),
    [
        ({}, WHOLE),
        ({"depth_scale": "lns"}, WHOLE),
        ({"sliding_window": 3}, WHOLE),
        ({"value_residual": True}, WHOLE),
        ({"residual_scalars": True}, WHOLE),
        ({"weight_density": 0.5}, WHOLE),
        ({"norm": "mix", "mix_frac": 0.5}, WHOLE),
        ({"qk_norm": True}, {"_SwiGLUBackward", "_SumBackward"}),
        ({"n_experts": 4, "top_k": 2, "d_expert": 8}, {"_HeadsBackward", "_SumBackward"}),
        ({"activation": "gelu"}, {"_HeadsBackward", "_SumBackward"}),
        ({"norm": "sandwich"}, {"_HeadsBackward", "_SwiGLUBackward"}),
        ({"norm_kind": "layer"}, {"_HeadsBackward", "_SwiGLUBackward"}),
        ({"depth_scale": "after_branch"}, {"_HeadsBackward", "_SwiGLUBackward"}),
        ({"residual_gate": "layerscale"}, {"_HeadsBackward", "_SwiGLUBackward"}),
    ],
)
def test_a_training_step_takes_every_short_way_and_another_mode_none(fields, by_hand):
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24, "vocab_size": 11, "seq_len": 6}
    model = Decoder(build(ModelConfig, sizes | fields, "test"))
    tokens_BT = torch.arange(12).view(2, 6) % 11
    found = {}
    for training in (True, False):
        logits_BTV = model.train(training)(tokens_BT)
        found[training] = (logits_BTV, *torch.autograd.grad(logits_BTV.square().sum(), list(model.parameters())))
        taken = names_of_the_graph(model(tokens_BT).grad_fn)
        assert WHOLE & taken == (by_hand if training else set())
    for short, plain in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(short, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"n_kv_heads": 1}, {"n_kv_heads": 1, "sliding_window": 3}])
def test_inference_takes_the_short_rotation_alone(fields):
    fields = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "vocab_size": 11, "seq_len": 6, **fields}
    model, tokens_BT = Decoder(build(ModelConfig, fields, "test")).eval(), torch.arange(12).view(2, 6) % 11
    attention, x_BTD, rotary = model.blocks[0].attention, draws(2, 6, 16).float(), model.rotary(6)
    with torch.no_grad():
        plain, logits_BTV = attention._queries_keys_values(x_BTD, rotary), model(tokens_BT)
    with torch.inference_mode():
        short = attention._queries_keys_values(x_BTD, rotary)
        torch.testing.assert_close(model(tokens_BT), logits_BTV)
    pairs = [0, 4, 1, 5, 2, 6, 3, 7]  # the halves of a head of eight channels, side by side
    for one, other in zip(short, (plain[0][..., pairs], plain[1][..., pairs], plain[2]), strict=True):
        torch.testing.assert_close(one, other)


def names_of_the_graph(node: Any) -> set[str]:
    """Of a result's autograd graph."""
    found, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        found.add(type(one).__name__)
        waiting += [before for before, _ in one.next_functions if before is not None]
    return found


def test_a_function_transform_takes_the_plain_formula():
    norm = RMSNorm(8, 1e-6).double().eval()
    x, v = draws(8), draws(8, seed=1)
    _, tangent = torch.func.jvp(norm, (x,), (v,))
    h = 1e-6
    torch.testing.assert_close(tangent, (norm(x + h * v) - norm(x - h * v)) / (2 * h), atol=1e-8, rtol=1e-6)


def test_pairs_side_by_side_turn_as_halves_do():
    x_BTD, weight_XD, rotary = draws(2, 5, 6), draws(24, 6, seed=1), angles(5, 8)
    halves_BTXK = rotate((x_BTD @ weight_XD.T).unflatten(-1, (-1, 8)), rotary)
    q_BHTK, *_ = fused.rotated_heads(x_BTD, weight_XD, weight_XD, weight_XD, rotary)
    halves_ND = halves_BTXK.flatten(2).flatten(0, 1)
    torch.testing.assert_close(
        fused.interleave_halves(halves_ND.T, 8).T, q_BHTK.transpose(1, 2).flatten(2).flatten(0, 1)
    )
