"""Activation sparsity: hand-made hidden units, the plain loop, and what tells activations apart."""

import math

import pytest
import torch
from reference import run_config
from support.handmade_models import integers, tokens_per_pass

from sparsedepth.measure.activations import activations
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder

HIDDEN_VF = torch.tensor([[0.0, 0, 3, 4], [0, 0, 0, 0], [1, 1, 1, 1], [0.1, 0, 0, 5]])


class HiddenModel(ProbedDecoder):
    """A decoder whose second layer has the hidden units of a table by token, and whose third has experts."""

    def embed(self, tokens_BT):
        self.tokens_BT = tokens_BT
        return super().embed(tokens_BT)

    def hidden_units(self, layer, x_BTD):
        return HIDDEN_VF[self.tokens_BT] if layer == 2 else None


def test_by_hand():
    """Zeros 2 + 4 + 0 + 2 of 16. rms^2 = (25 + 4 + 25.01) / 16, a tenth of it 0.184: 0.1 is near 0 too. Units:
    25^2 / (4 (81 + 256)), none, 1, 25.01^2 / (4 (0.0001 + 625))."""
    with tokens_per_pass(2):
        found = activations(HiddenModel(Decoder(run_config(n_layers=3))), torch.tensor([[0, 1], [2, 3]]))
    assert found["activation_zeros"] == [None, pytest.approx(8 / 16), None]
    assert found["activation_sparsity"] == [None, pytest.approx(9 / 16), None]
    units = (625 / (4 * 337) + 1 + 25.01**2 / (4 * 625.0001)) / 3
    assert found["activation_units"] == [None, pytest.approx(units), None]


@pytest.mark.parametrize("activation", ["swiglu", "reglu", "relu", "relu2", "gelu"])
def test_against_a_plain_loop_and_only_relus_make_zeros(activation):
    model, tokens_BT = Decoder(run_config(activation=activation, n_layers=2)), integers(40, 3, 16)
    seen = []
    for block in model.blocks:
        block.ffn.down.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().flatten(0, 1)))
    model.eval()(tokens_BT)
    expected = list(seen)
    with tokens_per_pass(20):
        found = activations(ProbedDecoder(model), tokens_BT)
    for layer, h_nF in enumerate(expected):
        rms = math.sqrt(sum(value**2 for value in h_nF.flatten().tolist()) / h_nF.numel())
        near = sum(abs(value) < 0.1 * rms for value in h_nF.flatten().tolist()) / h_nF.numel()
        assert found["activation_sparsity"][layer] == pytest.approx(near, abs=2 / h_nF.numel())
        zeros = found["activation_zeros"][layer]
        assert 0.3 < zeros < 0.7 if "re" in activation else zeros == 0
        assert zeros == pytest.approx((h_nF == 0).float().mean().item())


def test_a_mixture_has_none_and_its_dense_layers_have():
    model = Decoder(run_config(n_layers=2, n_experts=4, top_k=2, n_dense_layers=1))
    for shares in activations(ProbedDecoder(model), integers(40, 2, 16)).values():
        assert shares[0] is not None and shares[1] is None
