"""Layers that share weights: the decoder whose layers hold equal weights of their own, one pass after the other."""

import pytest
import torch
import torch.nn.functional as F
from support.handmade_models import integers

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import record_states, run_forks, skip, swap
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.train.devices import Devices
from sparsedepth.train.loop import TrainingState
from sparsedepth.train.runtime import resolve

SMALL = {"n_layers": 4, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "batch_tokens": 32}
SMALL |= {"init_std": 0.3, "precision": "fp32"}


def config(**fields) -> RunConfig:
    return build(RunConfig, {**SMALL, **fields}, "test")


def of_own_weights(looped: Decoder) -> Decoder:
    """The decoder with as many layers and loops=1, each layer with a copy of the weights of its block."""
    untied = Decoder(looped.config.model_copy(update={"loops": 1}))
    with torch.no_grad():
        for name, weight in untied.named_parameters():
            weight.copy_(looped.get_parameter(name))
    return untied


@pytest.mark.parametrize("fields", [{}, {"depth_scale": "lns", "norm": "mix", "mix_frac": 0.75, "qk_norm": True}])
def test_a_block_gets_the_gradients_of_all_its_layers(fields):
    looped, tokens_BT = Decoder(config(loops=2, **fields)), integers(12, 3, 8)
    untied = of_own_weights(looped)
    torch.testing.assert_close(looped(tokens_BT), untied(tokens_BT), rtol=0, atol=0)
    for model in (looped, untied):
        F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten()).backward()
    assert {name.split(".")[1] for name, _ in looped.named_parameters() if name.startswith("blocks.")} == {"0", "1"}
    for name, weight in looped.named_parameters():
        expected = untied.get_parameter(name).grad
        if name.startswith("blocks."):
            later = name.replace("blocks.0", "blocks.2").replace("blocks.1", "blocks.3")
            expected = expected + untied.get_parameter(later).grad
        torch.testing.assert_close(weight.grad, expected, atol=1e-6, rtol=1e-4)


def test_forks_change_one_layer_and_not_its_block_in_every_pass():
    """Layer 1 left out: 2, 3, 4 of the unlooped decoder. Layers 1 and 3 are one block: swapped they change nothing."""
    looped = Decoder(config(loops=2))
    probed, tokens_BT = ProbedDecoder(looped), integers(12, 2, 8)
    with torch.no_grad():
        states, (x_BTD, *_) = (
            record_states(probed, tokens_BT),
            record_states(ProbedDecoder(of_own_weights(looped)), tokens_BT),
        )
        for layer in (2, 3, 4):
            x_BTD = ProbedDecoder(of_own_weights(looped)).block(layer, x_BTD)
        steps = [step for step in run_forks(probed, states, [skip(1), swap(1, 3)]) if step.layer == 4]
        last = {fork: step.after[row] for step in steps for row, fork in enumerate(step.forks)}
    torch.testing.assert_close(last[0], x_BTD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last[1], states[-1], rtol=0, atol=0)


def test_fsdp_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(Devices, "__init__", lambda self: vars(self).update(parallel="fsdp", rank=0, size=1))
    cfg = config(loops=2)
    with pytest.raises(ValueError, match=r"loops=2 shares weights between layers.*parallel='ddp'"):
        TrainingState(Decoder(cfg), cfg, resolve(cfg, RuntimeConfig(device="cpu")), Devices())
