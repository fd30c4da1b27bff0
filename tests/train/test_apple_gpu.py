"""Apple's GPU, which none of these machines has: what is chosen for it, and that a run trained there is measured on the
CPU. Steps on it are untested."""

import pytest
import torch

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.run import train_and_measure
from sparsedepth.sweep.machine import machine
from sparsedepth.train.runtime import find_device, measuring_device, resolve

MPS = RuntimeConfig(device="mps")


@pytest.fixture
def apple(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def config(**fields) -> RunConfig:
    return build(RunConfig, {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 32, **fields}, "apple")


def test_it_is_used_where_asked_for_by_name_and_torch_offers_it(monkeypatch):
    with pytest.raises(ValueError, match="device='mps' does not exist here: torch finds no GPU of Apple's; use cpu"):
        find_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("mps") == torch.device("mps") and find_device("auto").type != "mps"


def test_a_run_there_is_in_fp32_with_kernels_that_exist_there(apple):
    runtime = resolve(config(n_experts=4, top_k=2, train_tokens=8192 * 2000), MPS)
    assert (runtime.device.type, runtime.precision, runtime.compile) == ("mps", "fp32", False)
    assert runtime.kernels == {"attention": "sdpa", "experts": "loop", "stream": "fp32"}
    with pytest.raises(ValueError, match="cuda_graph=true is not possible"):
        resolve(config(), RuntimeConfig(device="mps", cuda_graph=True))


def test_a_sweep_there_has_one_worker(apple, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = machine(None, MPS)
    assert (here.workers, here.gpus, here.runtime.device) == (1, [], "mps")
    assert machine(3, MPS).workers == 3


def test_measures_run_on_the_cpu_for_lack_of_fp64(monkeypatch):
    assert measuring_device(torch.device("mps")) == torch.device("cpu")
    assert measuring_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    model = Decoder(config())
    assert train_and_measure._to_measure(model) is model
    monkeypatch.setattr(train_and_measure, "measuring_device", lambda device: torch.device("meta"))
    copied = train_and_measure._to_measure(model)
    assert copied.embed.weight.device.type == "meta" and model.embed.weight.device.type == "cpu"
