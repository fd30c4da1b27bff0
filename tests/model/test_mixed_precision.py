"""Training in bf16: activations are cast once, the router computes in fp32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder

SHAPE = {"vocab_size": 50, "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "seq_len": 16}
TOKENS = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(1))


class Calls(TorchDispatchMode):
    """Counts casts of activations from fp32 to bf16, and products."""

    casts = products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        is_activation = args and isinstance(args[0], torch.Tensor) and args[0].ndim == 3
        self.casts += name == "_to_copy" and is_activation and kwargs.get("dtype") is torch.bfloat16
        self.products += name in ("mm", "addmm")
        return function(*args, **kwargs)


def test_each_normed_stream_is_cast_once_and_meets_one_product():
    block = Decoder(ModelConfig(**SHAPE)).blocks[1]
    x_BTD = torch.randn(3, 16, 32, requires_grad=True)
    for training, n_products in ((True, 2), (False, 3)):  # gate and up together, and down; apart for hooks
        with torch.autocast("cpu", dtype=torch.bfloat16), Calls() as calls:
            block.train(training).ffn(block.branch_input("ffn", x_BTD))
        assert (calls.casts, calls.products) == (1, n_products)


@pytest.mark.parametrize("fields", [{}, {"n_kv_heads": 1}, {"qk_norm": True}, {"activation": "relu2"}])
def test_together_is_as_near_to_fp32_as_one_by_one(fields):
    config = ModelConfig(**SHAPE | fields)
    gradients = {}
    for training, is_mixed in ((True, True), (False, True), (False, False)):
        model = Decoder(config).train(training)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            loss, _ = model.cross_entropy(model.hidden(TOKENS), TOKENS.roll(-1, 1))
        found = torch.autograd.grad(loss, [*model.parameters()])
        gradients[training, is_mixed] = torch.cat([gradient.flatten() for gradient in found])
    exact = gradients[False, False]
    together, one_by_one = ((gradients[way, True] - exact).norm() / exact.norm() for way in (True, False))
    assert together < max(1.2 * one_by_one, 0.005)
    assert 0 < together < 0.02


STREAMS = [{}, {"norm": "peri"}, {"residual_gate": "layerscale", "gate_init": 0.5}, {"norm": "keel", "gpas": True}]
STREAMS += [{"residual_scalars": True, "value_residual": True}, {"stream_skips": True, "n_layers": 4}]


@pytest.mark.parametrize("fields", STREAMS)
def test_a_stream_in_bf16_stays_so_and_its_gradient_is_near_to_that_of_fp64(fields):
    """Whatever a variant multiplies it with; without autocast, as measures read the model, nothing is cast."""
    model, streams = Decoder(ModelConfig(**SHAPE | fields)).train(), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, x_BTD: streams.append((given[0].dtype, x_BTD.dtype)))

    def gradient(stream: str, is_mixed: bool) -> torch.Tensor:
        model.use_kernels(stream=stream)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            loss, _ = model.cross_entropy(model.hidden(TOKENS), TOKENS.roll(-1, 1))
        return torch.cat([part.flatten().double() for part in torch.autograd.grad(loss, [*model.parameters()])])

    wide = gradient("fp32", True)
    assert set(streams) == {(torch.float32, torch.float32)}
    streams.clear()
    narrow = gradient("bf16", True)
    assert set(streams) == {(torch.bfloat16, torch.bfloat16)}
    streams.clear()
    model.double()
    exact = gradient("bf16", False)
    assert set(streams) == {(torch.float64, torch.float64)}
    errors = [((found - exact).norm() / exact.norm()).item() for found in (wide, narrow)]
    assert 0 < errors[0] < errors[1] < 0.03


def test_the_router_computes_in_fp32_under_autocast():
    model = Decoder(ModelConfig(**SHAPE, n_experts=4, top_k=2, d_expert=16)).train()
    experts = model.blocks[0].ffn
    x_ND = torch.randn(40, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = experts.route(x_ND)
    torch.testing.assert_close(mixed[0], x_ND @ experts.router.weight.T, atol=1e-6, rtol=1e-6)
    for part, exact in zip(mixed, experts.route(x_ND), strict=True):
        torch.testing.assert_close(part, exact, atol=0, rtol=0)
