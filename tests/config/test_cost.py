"""Counts from the config against the built model and a FLOP counter."""

import pytest
import torch
from reference import ZOO
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder

CASES = [
    {},
    {"n_kv_heads": 1, "tie_embeddings": True},
    {"n_experts": 8, "top_k": 2, "d_expert": 24},
    {"n_experts": 2, "top_k": 2, "n_layers": 24, "seq_len": 64},
    {"n_layers": 6, "value_residual": True, "residual_scalars": True},
]


@pytest.mark.parametrize("fields", CASES)
def test_parameters_and_flops(fields):
    config = build(ModelConfig, {"n_layers": 2, "seq_len": 128, **fields}, "test")
    model, counted = Decoder(config), cost(config)
    assert counted.params_total == sum(p.numel() for p in model.parameters())
    model.use_kernels(experts="loop")  # the counter knows plain products; math attention is two of them
    tokens = torch.zeros(1, config.seq_len, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    assert counted.flops_per_token == pytest.approx(counter.get_total_flops() / config.seq_len, rel=0.01)


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_has_the_parameters_and_flops_that_are_counted(name):
    config = build(ModelConfig, {"n_layers": 3, "d_model": 128, "n_heads": 4, "seq_len": 48, **ZOO[name]}, "test")
    with torch.device("meta"):
        planned = Decoder(config)
    assert cost(config).params_total == sum(weight.numel() for weight in planned.parameters())
    model = Decoder(config)
    model.use_kernels(attention="reference", experts="loop")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 48, dtype=torch.long))
    assert cost(config).flops_per_token == counter.get_total_flops() / 48


def test_active_parameters_leave_out_the_unused_experts():
    config = build(ModelConfig, {"n_experts": 8, "top_k": 3, "d_expert": 10, "d_model": 16, "n_layers": 2}, "test")
    unused = 2 * (8 - 3) * 3 * 16 * 10  # layers x unused experts x three matrices of d_model x d_expert
    counted = cost(config)
    assert counted.params_total - counted.params_active == unused
    shared = build(ModelConfig, {**config.model_dump(mode="json"), "n_shared_experts": 2, "n_dense_layers": 1}, "test")
    counted, unused = cost(shared), 1 * (8 - 3) * 3 * 16 * 10  # one layer has experts; the shared ones are always used
    assert counted.params_total - counted.params_active == unused
