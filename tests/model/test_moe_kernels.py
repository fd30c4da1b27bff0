"""The kernels of the experts against the loop, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from support.optional_packages import megablocks_ops

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.model import megablocks, moe_kernels
from sparsedepth.model.decoder import Decoder

SHAPES = [(23, 16, 8, 5, 2), (9, 8, 12, 3, 1), (7, 8, 8, 1, 1), (6, 8, 4, 4, 4), (2, 8, 8, 16, 3)]
"""N, D, F, E, C: also one expert, all experts chosen, and experts without a token."""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """megablocks over our own functions in place of its compiled ones."""
    loaded = megablocks.MegaBlocks(megablocks_ops(megablocks.substitute()), compiled=False)
    monkeypatch.setattr(megablocks, "load", lambda: loaded)


def results(kernel: str, shape: tuple, autocast: bool) -> list[torch.Tensor]:
    """The output, and the gradients of x, the gates and both weights."""
    N, D, width, E, C = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(N, D), (N, E), (E, 2 * width, D), (E, D, width)]
    x_ND, logits_NE, gate_up, down = (torch.randn(s, generator=generator).requires_grad_() for s in sizes)
    gate_NC, choice_NC = logits_NE.softmax(-1).topk(C)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out_ND = moe_kernels.KERNELS[kernel](x_ND, gate_NC, choice_NC, gate_up, down)
    assert out_ND.shape == (N, D) and out_ND.dtype == torch.float32
    out_ND.square().mean().backward()
    return [out_ND.detach(), *(leaf.grad for leaf in (x_ND, logits_NE, gate_up, down))]


@pytest.mark.parametrize("kernel", ["grouped", "megablocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_equals_the_loop(kernel, shape):
    torch.testing.assert_close(results(kernel, shape, False), results("loop", shape, False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["grouped", "megablocks"])
def test_bf16_equals_the_loop_to_its_rounding(kernel):
    for ours, expected in zip(results(kernel, SHAPES[0], True), results("loop", SHAPES[0], True), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize("kernel", ["grouped", "megablocks"])
@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_products_run_in_the_dtype_of_autocast(kernel, autocast, dtype, monkeypatch):
    """grouped_mm itself ignores autocast."""
    real, seen = F.grouped_mm, []

    def spy(a, b, **rest):
        seen.extend((a.dtype, b.dtype))
        return real(a, b, **rest)

    monkeypatch.setattr(F, "grouped_mm", spy)
    results(kernel, SHAPES[0], autocast)
    assert seen == [dtype] * 4


@pytest.mark.parametrize("call", ["bincount", "nonzero", "item", "tolist", "cpu"])
def test_grouped_never_asks_the_device(call, monkeypatch):
    """None of the calls that make the host wait for a GPU."""
    monkeypatch.setattr(torch.Tensor, call, lambda *_, **__: pytest.fail(f"{call} waits for the device"))
    monkeypatch.setattr(torch, "bincount", lambda *_, **__: pytest.fail("bincount waits for the device"))
    results("grouped", SHAPES[1], False)


@pytest.mark.slow  # compiling takes half a minute
def test_a_compiled_block_with_experts_computes_what_an_eager_one_does():
    fields = {"n_layers": 1, "d_model": 32, "n_heads": 2, "seq_len": 16, "n_experts": 4, "top_k": 2}
    model = Decoder(build(RunConfig, {**fields, "batch_tokens": 64, "train_tokens": 64}, "test"))
    tokens_BT = torch.arange(64).view(4, 16)
    eager = model(tokens_BT)
    model.blocks[0].compile()
    compiled = model(tokens_BT)
    torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-5)
    compiled.square().mean().backward()
    assert model.blocks[0].ffn.down_EDF.grad.isfinite().all()
