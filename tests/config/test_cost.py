"""Counts from the config against the built model and a FLOP counter."""

import pytest
import torch
from reference import ZOO
from torch.utils.flop_counter import FlopCounterMode

from sparsedepth.config.cost import cost
from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder

CASES = {**ZOO, "tied": {"n_kv_heads": 1, "tie_embeddings": True}}


@pytest.mark.parametrize("name", CASES)
def test_every_architecture_has_the_parameters_and_flops_that_are_counted(name):
    config = build(ModelConfig, {"n_layers": 3, "d_model": 128, "n_heads": 4, "seq_len": 48, **CASES[name]}, "test")
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


def test_weights_that_loops_share_are_active_once():
    """6 layers of which 2 have weights of their own are as large as 2 layers, and compute as much as 6."""
    looped, two, six = (
        cost(build(ModelConfig, fields, "test"))
        for fields in ({"n_layers": 6, "loops": 3}, {"n_layers": 2}, {"n_layers": 6})
    )
    assert looped.params_active == looped.params_total == two.params_total
    assert looped.flops_per_token == six.flops_per_token
