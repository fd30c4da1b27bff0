"""The functions in place of MegaBlocks' compiled ones, and its own kernels where it is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from support.optional_packages import install

from sparsedepth.model import megablocks

INSTALLED = all(importlib.util.find_spec(name) for name in ("megablocks", "stk", "triton"))


@pytest.fixture(autouse=True)
def fresh():
    megablocks.load.cache_clear()
    yield
    megablocks.load.cache_clear()


def test_functions_by_hand():
    keys_S = torch.tensor([2, 0, 2, 3, 0], dtype=torch.int32)
    ops = megablocks.substitute()
    ops.sort(keys_S, 2, sorted_S := torch.empty_like(keys_S), order_S := torch.empty_like(keys_S))
    assert (sorted_S.tolist(), order_S.tolist()) == ([0, 0, 2, 2, 3], [1, 4, 0, 2, 3])
    count_E = ops.histogram(keys_S, 5)
    assert count_E.tolist() == [2, 0, 2, 1, 0] and count_E.dtype == torch.int32
    ops.inclusive_cumsum(count_E[None], 1, end_1E := torch.empty_like(count_E[None]))
    assert end_1E.tolist() == [[2, 2, 4, 5, 5]]


def test_the_substitute_is_there_for_the_import_alone(monkeypatch):
    """While megablocks is imported its compiled part is found; afterwards nobody else finds ours."""
    found = []
    install(monkeypatch, "megablocks")
    ops = install(monkeypatch, "megablocks.ops")
    real = importlib.import_module

    def spy(name):
        found.append(sys.modules.get(megablocks.COMPILED))
        return real(name)

    monkeypatch.setattr(importlib, "import_module", spy)
    loaded = megablocks.load()
    assert loaded == megablocks.MegaBlocks(ops, compiled=False)
    assert found[0].sort is megablocks.sort and megablocks.COMPILED not in sys.modules


def test_the_compiled_functions_come_first(monkeypatch):
    install(monkeypatch, "megablocks")
    install(monkeypatch, "megablocks.ops")
    install(monkeypatch, megablocks.COMPILED)
    assert megablocks.load().compiled
    assert megablocks.COMPILED in sys.modules


@pytest.mark.skipif(INSTALLED, reason="megablocks is installed")
def test_absence_is_an_import_error_and_leaves_nothing():
    with pytest.raises(ImportError, match="megablocks"):
        megablocks.load()
    assert megablocks.COMPILED not in sys.modules


REAL = """
import torch
from sparsedepth.model import megablocks, moe_kernels
megablocks.load()
from megablocks.backend import kernels
for kernel in (kernels._padded_copy, kernels._padded_copy_wgrad):
    kernel.configs = kernel.configs[:1]  # to compare several it would need a GPU
N, D, width, E, K = 23, 16, 8, 5, 2
found = []
for name in ("loop", "megablocks"):
    generator = torch.Generator().manual_seed(0)
    sizes = [(N, D), (N, E), (E, 2 * width, D), (E, D, width)]
    x, logits, gate_up, down = leaves = [torch.randn(s, generator=generator).requires_grad_() for s in sizes]
    gate, choice = logits.softmax(-1).topk(K)
    out = moe_kernels.KERNELS[name](x, gate, choice, gate_up, down)
    out.square().mean().backward()
    found.append([out.detach(), *(leaf.grad for leaf in leaves)])
torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
print("equal")
"""


@pytest.mark.skipif(not INSTALLED, reason="megablocks is not installed")
def test_its_own_kernels_equal_the_loop_in_tritons_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr
