"""The hand-written derivatives are those of the plain formulas."""

from typing import Any, cast

import pytest
import torch
from reference import ZOO
from torch.autograd import gradcheck

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.role import Role, roles
from sparsedepth.model import fused
from sparsedepth.model.block import FusedBlock
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.norms import RMSNorm


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_norms_gradient_is_that_of_finite_differences():
    x, weight = draws(2, 3, 8).requires_grad_(), draws(8, seed=1).requires_grad_()
    assert gradcheck(lambda x, weight: fused.rms_norm(x, weight, 1e-6), (x, weight))


def rotary_of(n_tokens: int, d_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle_TK = draws(n_tokens, d_head // 2).repeat(1, 2)
    return angle_TK.cos(), angle_TK.sin()


def matrices(*n_outputs: int) -> list[torch.Tensor]:
    return [draws(n, 8, seed=seed).requires_grad_() for seed, n in enumerate(n_outputs, start=1)]


def test_the_gradient_of_rotated_heads_is_that_of_finite_differences():
    def heads(x_BTD, norm_D, *weights_XD):
        angle_TX = fused.angles(*rotary_of(5, 4), 3)
        return fused.rotated_heads(x_BTD, norm_D, 1e-6, angle_TX, 4, *weights_XD)

    inputs = draws(2, 5, 8).requires_grad_(), draws(8, seed=9).requires_grad_(), *matrices(8, 4, 4)
    assert gradcheck(heads, inputs)
    q_BHTK, *_ = heads(*inputs)
    (expanded,) = torch.autograd.grad(q_BHTK.sum(), inputs[0], retain_graph=True)
    (whole,) = torch.autograd.grad(q_BHTK, inputs[0], torch.ones_like(q_BHTK))
    assert torch.equal(expanded, whole)  # a gradient of any strides is turned


def test_the_gradient_of_swiglu_is_that_of_finite_differences():
    def hidden(x, norm_D, *weights_XD):
        return fused.swiglu(x, norm_D, 1e-6, *weights_XD)

    assert gradcheck(hidden, (draws(2, 3, 8).requires_grad_(), draws(8, seed=9).requires_grad_(), *matrices(6, 6)))


def test_a_quarter_turn_by_hand():
    """Of a head of two channels, (1, 7) becomes (-7, 1) in q and k, and v stays; (1, 7) / 5 is its RMSNorm."""
    quarter_TX, norm = fused.angles(torch.zeros(1, 2), torch.ones(1, 2), 2), (torch.full((2,), 5.0), 0.0)
    parts = fused.rotated_heads(torch.tensor([[[1.0, 7.0]]]), *norm, quarter_TX, 2, *[torch.eye(2)] * 3)
    torch.testing.assert_close(torch.stack(parts).view(3, 2), torch.tensor([[-7.0, 1.0], [-7.0, 1.0], [1.0, 7.0]]))


def test_pairs_by_hand():
    weight_XD = torch.arange(8.0)[:, None]  # two heads of 4: halves (0, 1), (2, 3) and (4, 5), (6, 7)
    assert fused.interleave_halves(weight_XD, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


SIZES = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_ff": 24, "vocab_size": 11, "seq_len": 6, "norm_groups": 4}
TOKENS = torch.arange(12).view(2, 6) % 11


def decoder(**fields) -> Decoder:
    return Decoder(build(ModelConfig, {**SIZES, "init_std": 0.3, **fields}, "test"))


@pytest.mark.parametrize("name", ["plain", *ZOO])
def test_three_modes_are_one_function(name):
    """Logits and gradients in training, evaluation and inference mode; of `gpas` at its initial value, beside which the
    training gradient leaves out a factor (`variants.factors.Gpas`)."""
    model, found = decoder(**ZOO.get(name, {})), {}
    for training in (True, False):
        logits_BTV = model.train(training)(TOKENS)
        found[training] = logits_BTV, *torch.autograd.grad(logits_BTV.square().sum(), [*model.parameters()])
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS), found[False][0], atol=2e-5, rtol=1e-4)
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * other.abs().max().item(), rtol=1e-4)


WHOLE = {"_HeadsBackward", "_SwiGLUBackward"}
"""of a block both of whose branches are fused"""
ATTENTION, FFN = {"_HeadsBackward"}, {"_SwiGLUBackward"}


@pytest.mark.parametrize(
    ("fields", "by_hand"),
    [
        *((fields, WHOLE) for fields in ({}, {"depth_scale": "lns"}, {"sliding_window": 3})),
        *((fields, WHOLE) for fields in ({"value_residual": True}, {"residual_scalars": True}, {"n_kv_heads": 1})),
        *((fields, ATTENTION) for fields in ({"n_experts": 4, "top_k": 2, "d_expert": 8}, {"activation": "gelu"})),
        ({"qk_norm": True}, FFN),
        *(({"norm": norm}, set()) for norm in ("sandwich", "mix")),
        *((fields, set()) for fields in ({"norm_kind": "layer"}, {"depth_scale": "after_branch"}, {"gpas": True})),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_a_training_step_fuses_what_is_listed_and_another_mode_nothing(fields, by_hand):
    model = decoder(**fields)
    for training in (True, False):
        taken = names_of_the_graph(model.train(training)(TOKENS).grad_fn)
        assert WHOLE & taken == (by_hand if training else set())


@pytest.mark.parametrize("name", ["sliding_window", "n_kv_heads"])
def test_a_field_that_does_not_declare_where_it_acts_takes_the_plain_path(name, monkeypatch):
    """As a new one would."""
    monkeypatch.setitem(cast(dict[str, Role], roles(ModelConfig)), name, Role())
    changed = {"sliding_window": 3, "n_kv_heads": 1}[name]
    assert isinstance(decoder().blocks[0], FusedBlock) or name == "n_kv_heads"
    assert not isinstance(decoder(**{name: changed}).blocks[0], FusedBlock)


def test_inference_mode_fuses_too(monkeypatch):
    """A block then has the bits of its branches, called one by one."""
    calls, real = [], fused.swiglu
    monkeypatch.setattr(fused, "swiglu", lambda *given: calls.append(1) or real(*given))
    model = decoder().eval()
    model(TOKENS)
    assert not calls
    with torch.inference_mode():
        block, x_BTD = model.blocks[0], model.embed_tokens(TOKENS)
        context = model.context(TOKENS, x_BTD)
        u_BTD = x_BTD + block.attention_update(x_BTD, context)
        assert torch.equal(block(x_BTD, context), u_BTD + block.ffn_update(u_BTD)) and len(calls) == 2


def names_of_the_graph(node: Any) -> set[str]:
    """Of a result's autograd graph."""
    seen, waiting = {node}, [node]
    while waiting:
        new = {before for before, _ in waiting.pop().next_functions if before is not None} - seen
        seen |= new
        waiting += new
    return {type(one).__name__ for one in seen}


def test_a_function_transform_takes_the_plain_formula():
    norm = RMSNorm(8, 1e-6).double().eval()
    x, v = draws(8), draws(8, seed=1)
    _, tangent = torch.func.jvp(norm, (x,), (v,))
    h = 1e-6
    torch.testing.assert_close(tangent, (norm(x + h * v) - norm(x - h * v)) / (2 * h), atol=1e-8, rtol=1e-6)
