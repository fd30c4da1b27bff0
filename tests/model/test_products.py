"""The two libraries that multiply a step's matrices: they agree, and each gives the same numbers at each call."""

import dataclasses

import pytest
import torch

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.data.sequences import next_tokens
from sparsedepth.model import kernels, products
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.kernels import Setting
from sparsedepth.model.linear import Linear
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.train.loop import train
from sparsedepth.train.runtime import resolve

CPU = Setting(device=torch.device("cpu"), dtype=torch.float32)

needs_onednn = pytest.mark.skipif(
    kernels.OBSTACLES["products"]["onednn"](CPU) is not None, reason="this torch is built without oneDNN"
)


@needs_onednn
@pytest.mark.parametrize(("n_tokens", "width", "n_outputs"), [(2048, 32, 96), (2048, 96, 32), (2048, 64, 64)])
def test_both_compute_the_same(monkeypatch, n_tokens, width, n_outputs):
    """At sizes at which oneDNN is asked for all three: a gradient wider than its input, narrower, and as wide."""
    calls = []
    real = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda *given: calls.append(1) or real(*given))
    draws = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=draws)
        for shape in ((2, n_tokens // 2, width), (n_outputs, width), (2, n_tokens // 2, n_outputs))
    )
    exact = x.double() @ weight.double().T, grad.double() @ weight.double(), torch.einsum("btx,btd->xd", grad, x)
    for kernel in ("blas", "onednn"):
        found = products.project(x, weight, kernel), *products.gradients(grad, x, weight, kernel)
        for part, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(part, expected.float(), atol=2e-3, rtol=1e-4)
    assert len(calls) == 3


def test_small_products_stay_with_blas(monkeypatch):
    monkeypatch.setattr(products, "_onednn", None)
    products.project(torch.ones(64, 32), torch.ones(32, 32), "onednn")
    products.gradients(torch.ones(64, 32), torch.ones(64, 32), torch.ones(32, 32), "onednn")


@needs_onednn
def test_training_with_onednn_repeats_itself_and_follows_blas(monkeypatch):
    monkeypatch.setattr(products, "MIN_WORK", 0)
    monkeypatch.setattr(products, "MIN_MATRIX", 0)
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "batch_tokens": 32}
    config = build(RunConfig, {**sizes, "train_tokens": 32 * 8, "precision": "fp32"}, "test")
    tokens_BT = (torch.arange(4)[:, None] + torch.arange(9)) % 12

    def weights_after(kernel: str) -> torch.Tensor:
        model = Decoder(config)
        train(model, config, resolve(config, RuntimeConfig(device="cpu", products_kernel=kernel)),
              lambda step: next_tokens(tokens_BT.numpy()))  # fmt: skip
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    first = weights_after("onednn")
    assert torch.equal(first, weights_after("onednn"))
    torch.testing.assert_close(first, weights_after("blas"), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("capability", "facts", "expected"),
    [
        ("AVX512", "vendor_id : AuthenticAMD\ncpu family\t: 26\n", "onednn"),
        ("AVX512", "vendor_id : AuthenticAMD\ncpu family\t: 25\n", "blas"),
        ("AVX512", "vendor_id : AuthenticAMD\n", "blas"),
        ("AVX512", "vendor_id : GenuineIntel\ncpu family\t: 26\n", "blas"),
        ("AVX2", "vendor_id : AuthenticAMD\ncpu family\t: 26\n", "blas"),
    ],
)
@needs_onednn
def test_auto_takes_onednn_where_mkl_leaves_avx512_unused(monkeypatch, tmp_path, capability, facts, expected):
    (tmp_path / "cpuinfo").write_text(facts)
    monkeypatch.setattr(kernels, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    choice = kernels.choose("products", "auto", CPU)
    assert choice.kernel == expected
    assert ("PyTorch's own products" in choice.reason) is (expected == "blas")
    assert kernels.choose("products", "onednn", CPU).kernel == "onednn"


def test_onednn_is_for_eager_fp32_on_a_cpu(monkeypatch):
    with pytest.raises(
        ValueError, match=r"products_kernel='onednn' cannot run: .* not on cuda in bf16; .* or use auto"
    ):
        kernels.choose("products", "onednn", Setting(device=torch.device("cuda"), dtype=torch.bfloat16))
    monkeypatch.setattr(kernels, "mkl_leaves_avx512_unused", lambda: True)
    assert kernels.choose("products", "auto", dataclasses.replace(CPU, is_compiled=True)).kernel == "blas"


@needs_onednn
@pytest.mark.parametrize("changes", [{}, {"n_experts": 4, "top_k": 2, "d_expert": 16}, {"norm": "sandwich"}])
def test_measures_multiply_with_the_faster_library_and_leave_the_models_own(monkeypatch, changes):
    calls = []
    real = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda *given: calls.append(1) or real(*given))
    monkeypatch.setattr(products, "MIN_WORK", 0)
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "depth_scale": "lns"}
    model = Decoder(build(RunConfig, {**sizes, **changes, "precision": "fp32"}, "test"))
    tokens_BT = torch.arange(8)[None] % 12
    with torch.no_grad():
        expected = model.eval()(tokens_BT)
    assert not calls
    for is_faster in (False, True):
        monkeypatch.setattr(kernels, "mkl_leaves_avx512_unused", lambda is_faster=is_faster: is_faster)
        with probing(ProbedDecoder(model)):
            measured = model(tokens_BT)
        torch.testing.assert_close(measured, expected, atol=1e-5, rtol=1e-5)
        assert bool(calls) is is_faster
    assert {part.kernel for part in model.modules() if isinstance(part, Linear)} == {"blas"}
