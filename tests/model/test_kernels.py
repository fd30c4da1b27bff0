"""Which kernel is chosen, and what is said where one cannot be."""

import dataclasses
import importlib.util
import sys

import pytest
import torch
from support.optional_packages import flash_attn, install

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.model import attention, kernels, moe_kernels
from sparsedepth.model.kernels import KernelFacts, choose
from sparsedepth.train.runtime import resolve

CPU = KernelFacts(device=torch.device("cpu"), dtype=torch.float32)


def gpu(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> KernelFacts:
    return KernelFacts(device=torch.device("cuda"), dtype=dtype, **sizes)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Questions about a GPU's generation are answered without one; nothing optional is installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("flash_attn", "megablocks"):
        monkeypatch.setitem(sys.modules, name, None)
    moe_kernels.load_megablocks.cache_clear()
    yield
    moe_kernels.load_megablocks.cache_clear()


def test_every_kernel_has_its_obstacles():
    assert set(kernels.OBSTACLES["attention"]) == set(attention.KERNELS)
    assert set(kernels.OBSTACLES["experts"]) == set(moe_kernels.KERNELS)


def test_auto_on_a_cpu():
    found = choose("attention", "auto", CPU)
    assert found.kernel == "sdpa" and "needs a CUDA device, not cpu" in found.reason
    assert choose("experts", "auto", CPU) == ("grouped", "the first choice")


def test_auto_takes_flash_where_it_can_run(monkeypatch):
    assert "flash is not used: flash-attn is not installed" in choose("attention", "auto", gpu()).reason
    flash_attn(monkeypatch)
    assert choose("attention", "auto", gpu()).kernel == "flash"
    unmasked = choose("attention", "auto", dataclasses.replace(gpu(), is_masked=False))
    assert unmasked.kernel == "sdpa" and "PyTorch's own attention is as fast or faster" in unmasked.reason
    assert choose("attention", "auto", gpu(torch.float32)).kernel == "sdpa"
    for d_head, kernel in ((256, "flash"), (264, "sdpa")):
        assert choose("attention", "auto", gpu(d_head=d_head)).kernel == kernel
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "Ampere" in choose("attention", "auto", gpu()).reason


def test_a_broken_build_is_named_with_its_cure(monkeypatch):
    def fails():
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda\nand a long tail")

    install(monkeypatch, "flash_attn")
    monkeypatch.setattr(attention, "load_flash", fails)
    match = r"does not load: ImportError: flash_attn_2_cuda.so: undefined .*--no-deps"
    with pytest.raises(ValueError, match=match) as e:
        choose("attention", "flash", gpu())
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (gpu(torch.float32), "without waits in bf16 on CUDA, not in fp32; set precision=bf16"),
        (gpu(d_expert=172), "unlike d_expert=172; choose multiples of 8"),
        (gpu(d_model=12, d_expert=5), "d_model=12 and d_expert=5"),
        (KernelFacts(device=torch.device("cpu"), dtype=torch.float32, d_expert=6), "multiples of 4"),
    ],
)
def test_grouped_needs_bf16_and_whole_rows_else_the_loop(here, reason):
    with pytest.raises(ValueError, match=r"experts_kernel='grouped' cannot run") as error:
        choose("experts", "grouped", here)
    assert reason in str(error.value)
    found = choose("experts", "auto", here)
    assert found.kernel == "loop" and found.reason.startswith("grouped is not used: ")


def test_measures_take_the_grouped_product_in_fp32_whose_fallback_waits():
    waiting = dataclasses.replace(gpu(torch.float32), may_wait=True)
    assert choose("experts", "auto", waiting) == ("grouped", "the first choice")
    assert choose("experts", "auto", dataclasses.replace(waiting, d_expert=6)).kernel == "loop"


@pytest.mark.parametrize(("d_expert", "fails"), [(4, False), (6, True)])
def test_the_stated_multiple_is_the_one_that_runs(d_expert, fails):
    setting = dataclasses.replace(CPU, d_expert=d_expert)
    assert bool(kernels.OBSTACLES["experts"]["grouped"](setting)) == fails
    x_ND, gate_NC, choice_NC = torch.randn(5, 8), torch.ones(5, 1), torch.tensor([[0], [1], [1], [0], [1]])
    weights = torch.randn(2, 2 * d_expert, 8), torch.randn(2, 8, d_expert)
    if fails:
        with pytest.raises(RuntimeError, match="16 bytes"):
            moe_kernels.grouped(x_ND, gate_NC, choice_NC, *weights)
    else:
        moe_kernels.grouped(x_ND, gate_NC, choice_NC, *weights)


def test_megablocks_only_by_name(monkeypatch):
    with pytest.raises(ValueError, match="need a CUDA device"):
        choose("experts", "megablocks", CPU)
    real = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
        with pytest.raises(ValueError, match="triton is not installed; pip install triton"):
            choose("experts", "megablocks", gpu())
    install(monkeypatch, "triton")
    with pytest.raises(ValueError, match=r"not installed; pip install setuptools wheel .* --no-deps --no-build-iso"):
        choose("experts", "megablocks", gpu())
    install(monkeypatch, "megablocks")
    install(monkeypatch, "megablocks.ops")
    found = choose("experts", "megablocks", gpu())
    assert found.reason == "asked for by name"
    assert choose("experts", "auto", gpu()).kernel == "grouped"


def config(**fields) -> RunConfig:
    return build(RunConfig, {"precision": "fp32", **fields}, "test")


@pytest.mark.parametrize("fields", [{}, {"precision": "bf16", "n_streams": 2}, {"precision": "bf16", "n_layers": 3}])
def test_a_stream_in_bf16_is_one_and_of_a_run_in_bf16(fields):
    cfg, wanted = config(**fields), RuntimeConfig(device="cpu", stream="bf16")
    if "n_layers" in fields:
        assert (
            resolve(cfg, wanted).kernels["stream"] == "bf16"
            and resolve(cfg, wanted.model_copy(update={"stream": "fp32"})).kernels["stream"] == "fp32"
        )
        return
    with pytest.raises(ValueError, match=r"stream=bf16 needs precision=bf16, one stream .* use stream=fp32"):
        resolve(cfg, wanted)


def test_resolve_asks_with_the_sizes_of_the_run():
    cpu = RuntimeConfig(device="cpu")
    assert resolve(config(), cpu).kernels["attention"] == "sdpa"
    odd = resolve(config(n_experts=4, top_k=2, d_expert=6), cpu)
    assert odd.kernels["experts"] == "loop" and "d_expert=6" in odd.kernel_reasons["experts"]
    named = resolve(config(), RuntimeConfig(device="cpu", attention_kernel="reference"))
    assert named.kernels["attention"] == "reference"
    with pytest.raises(ValueError, match="attention_kernel='flash' cannot run: flash-attn needs a CUDA device"):
        resolve(config(), RuntimeConfig(device="cpu", attention_kernel="flash"))


def test_a_dense_run_ignores_the_kernel_of_the_experts():
    """So that one sweep over dense and routed models can name it."""
    resolve(config(), RuntimeConfig(device="cpu", experts_kernel="megablocks"))
    with pytest.raises(ValueError, match="experts_kernel='megablocks' cannot run"):
        resolve(config(n_experts=4, top_k=2), RuntimeConfig(device="cpu", experts_kernel="megablocks"))
