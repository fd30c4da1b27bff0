"""The card of the `gpu` tests: CUDA's or, in a rehearsal (GPU_TESTS_ON=cpu, `make gpu-dry`), the CPU, where the
compiler traces and runs eagerly and a graph is a record of operations (`cpu_graph`). What has no stand-in is left out
there."""

import functools
import os

import pytest
import torch
from support.cpu_graph import stand_in

from sparsedepth.train import cuda_graph

DEVICE = torch.device(os.environ.get("GPU_TESTS_ON", "cuda"))
IS_REHEARSAL = DEVICE.type == "cpu"


def only_on_a_card(why: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(IS_REHEARSAL, reason=f"only on a card: {why}")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """In place of the compiler and of CUDA's graph, in a rehearsal."""
    if not IS_REHEARSAL:
        return
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    stand_in(monkeypatch)
    known = cuda_graph.graph_obstacle
    as_on_a_card = functools.partial(_as_on_a_card, known)
    monkeypatch.setattr(cuda_graph, "graph_obstacle", as_on_a_card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def _as_on_a_card(known, config, device, parallel):
    return known(config, "cuda", parallel)
