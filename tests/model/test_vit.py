"""The ViT: against transformers and against its formula in fp64, and what every position sees."""

import numpy as np
import pytest
import torch
from support import decoder_fp64
from support.run_folders import loud

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model import attention
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder

VIT = {
    "architecture": "vit", "image_size": 4, "patch_size": 2, "n_channels": 1, "vocab_size": 7,
    "n_layers": 3, "d_model": 8, "n_heads": 2,
}  # fmt: skip

KNOBS = {
    "pre": {},
    "lns": {"depth_scale": "lns"},
    "after_branch": {"depth_scale": "after_branch"},
    "layerscale": {"residual_gate": "layerscale"},
    "lns_and_layerscale": {"depth_scale": "lns", "residual_gate": "layerscale"},
    "peri": {"norm": "peri"},
    "post_admin": {"norm": "post", "residual_gate": "admin"},
    "rms": {"norm_kind": "rms", "activation": "swiglu", "n_kv_heads": 1, "qk_norm": True},
    "experts": {"n_experts": 4, "top_k": 2, "activation": "swiglu"},
    "scalars": {"residual_scalars": True, "value_residual": True},
    "keel_and_gpas": {"norm": "keel", "gpas": True},
    "completep": {"parametrisation": "completep", "base_width": 4, "base_depth": 1},
}


def config(**fields) -> ModelConfig:
    return build(ModelConfig, {**VIT, **fields}, "test")


def images(model: Decoder, n: int = 2) -> torch.Tensor:
    return model.embed.random_inputs(n, 5, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", KNOBS)
def test_every_kind_of_vit_is_its_formula(name):
    model = loud(Decoder(config(**KNOBS[name]))).double()
    model.use_kernels(experts="loop")
    pixels = images(model, 1)
    x_BTD = model.embed_tokens(pixels)
    found, context = [x_BTD], model.context(pixels, x_BTD)
    for block in model.blocks:
        found.append(block(found[-1], context))
    torch.testing.assert_close(model.hidden(pixels), found[-1], rtol=0, atol=0)
    for ours, theirs in zip(found, decoder_fp64.states(model, pixels[0].tolist()), strict=True):
        np.testing.assert_allclose(ours[0].detach().numpy(), theirs, rtol=1e-5, atol=1e-6)


def test_every_position_sees_every_other_and_the_class_token_has_no_pixels():
    model = loud(Decoder(config()))
    pixels = images(model, 1)
    x_BTD = model.embed_tokens(pixels).detach().requires_grad_()
    x = x_BTD
    for block in model.blocks:
        x = block(x, model.positions(5))
    for t in range(5):
        (gradient,) = torch.autograd.grad(x[0, t].square().sum(), x_BTD, retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 0).all()
    other = pixels.clone()
    other[:, 0] = 255
    assert torch.equal(model(other), model(pixels))


def test_the_kernels_agree_where_nothing_is_hidden():
    """Equal keys: every row is the mean of the values, where a causal one would be that of those so far."""
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 4, generator=draws) for _ in range(3))
    plain, formula = (attention.KERNELS[name](q, k, v, Context(causal=False)) for name in ("sdpa", "reference"))
    torch.testing.assert_close(plain, formula)
    mean = attention.sdpa(q, torch.zeros_like(k), v, Context(causal=False))
    torch.testing.assert_close(mean, v.mean(2, keepdim=True).expand_as(v))


@pytest.mark.parametrize("fields", [{}, {"n_channels": 3}, {"residual_gate": "layerscale"}, {"norm": "peri"}], ids=str)
def test_parameters_are_those_that_are_priced(fields):
    """By hand for the first: 8 x 4, 5 positions, 3 blocks of 4 x 8^2 + 2 x 8 x 32 and 2 norms, the last one, 7 x 8."""
    priced = cost(config(**fields))
    model = Decoder(config(**fields))
    assert priced.params_total == sum(weight.numel() for weight in model.parameters())
    if not fields:
        assert priced.params_total == 32 + 40 + 3 * (256 + 512 + 2 * 16) + 16 + 56


def test_a_vit_of_the_small_size_has_its_parameters():
    """ViT-S/16 of 1000 classes has 22.05 M with the biases of its matrices; without 9 x 384 a block and the head's."""
    small = build(
        ModelConfig, {"architecture": "vit", "n_layers": 12, "d_model": 384, "n_heads": 6, "vocab_size": 1000}, "test"
    )
    with_biases = cost(small).params_total + 12 * 9 * 384 + 1000 + 2 * 384  # and of the patches, and a class vector
    assert with_biases == 22_050_664
