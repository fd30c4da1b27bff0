"""The kernels of the experts against the loop, forward and backward."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support.optional_packages import install, megablocks_ops

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.model import moe_kernels
from sparsedepth.model.decoder import Decoder

INSTALLED = all(importlib.util.find_spec(name) for name in ("megablocks", "stk", "triton"))

SHAPES = [(23, 16, 8, 5, 2), (9, 8, 12, 3, 1), (7, 8, 8, 1, 1), (6, 8, 4, 4, 4), (2, 8, 8, 16, 3)]
"""N, D, F, E, C: also one expert, all experts chosen, and experts without a token."""


LOAD = moe_kernels.load_megablocks


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(moe_kernels, "load_megablocks", megablocks_ops)


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


@pytest.mark.parametrize("has_extension", [False, True])
def test_an_extension_stands_in_for_the_import_alone(monkeypatch, has_extension):
    """While megablocks is imported its compiled part is found; afterwards nobody else finds ours."""
    found, name = [], moe_kernels.MEGABLOCKS_EXTENSION
    install(monkeypatch, "megablocks")
    ops = install(monkeypatch, "megablocks.ops")
    own = install(monkeypatch, name) if has_extension else None
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda asked: found.append(sys.modules.get(name)) or real(asked))
    assert LOAD.__wrapped__() is ops
    assert found[0] is not None and sys.modules.get(name) is own


@pytest.mark.skipif(INSTALLED, reason="megablocks is installed")
def test_absence_is_an_import_error_and_leaves_nothing():
    with pytest.raises(ImportError, match="megablocks"):
        LOAD.__wrapped__()
    assert moe_kernels.MEGABLOCKS_EXTENSION not in sys.modules


REAL = """
import torch
from sparsedepth.model import moe_kernels
moe_kernels.load_megablocks()
from megablocks.backend import kernels
for kernel in (kernels._padded_copy, kernels._padded_copy_wgrad):
    kernel.configs = kernel.configs[:1]  # to compare several it would need a GPU
N, width, E, K = 23, 8, 5, 2
for D in (16, 200):  # in one part of a kernel, and in four, the last not whole
    found = []
    for name in ("loop", "megablocks"):
        generator = torch.Generator().manual_seed(0)
        sizes = [(N, D), (N, E), (E, 2 * width, D), (E, D, width)]
        x, logits, gate_up, down = leaves = [torch.randn(s, generator=generator).requires_grad_() for s in sizes]
        gate, choice = logits.softmax(-1).topk(K)
        out = moe_kernels.KERNELS[name](x, gate, choice, gate_up, down)
        out.square().mean().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)

from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder
sizes = {"vocab_size": 20, "n_layers": 2, "d_model": 16, "n_heads": 2, "seq_len": 8}
model = Decoder(ModelConfig(**sizes, n_experts=4, top_k=2, d_expert=8)).train()
tokens, found = torch.arange(16).view(2, 8), []
for name in ("grouped", "megablocks"):
    model.use_kernels(experts=name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model.cross_entropy(model.hidden(tokens), tokens + 1)
    found.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, [*model.parameters()])]))
assert 0 < (found[1] - found[0]).norm() < 0.02 * found[0].norm()
print("equal")
"""


@pytest.mark.skipif(not INSTALLED, reason="megablocks, stk and triton are not installed")
def test_its_own_kernels_equal_the_loop_in_tritons_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr
