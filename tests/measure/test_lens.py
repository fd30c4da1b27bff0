"""What each layer would say, beside what the model says: by hand, at the ends, against plain softmaxes."""

import math

import numpy as np
import pytest
import torch
from reference import FAMILIES, run_config, states
from support.handmade_models import HandMadeModel, brackets, identity, integers, known, rng, tokens_per_pass

from sparsedepth.measure.lens import early_exit, lens
from sparsedepth.measure.measurements import Scored
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def test_by_hand():
    """Logits ln 2 x (1, 0) after each layer: x_0 = 0 says 1/2, 1/2; x_1 = 1 says 2/3, 1/3; x_2 = 2 says 4/5, 1/5."""
    probed = HandMadeModel([lambda x: x + 1, lambda x: x + 1], torch.zeros(2, 1), torch.tensor([[math.log(2), 0.0]]))
    found = lens(probed, integers(2, 3, 4), rng())
    kl = [
        0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2),
        2 / 3 * math.log(2 / 3 / 0.8) + 1 / 3 * math.log(1 / 3 / 0.2),
        0,
    ]
    assert found["lens_kl"].by_layer == pytest.approx(kl, abs=1e-6)
    assert found["lens_overlap"].by_layer == [1, 1, 1]  # of a vocabulary of two
    assert {profile.first for profile in found.values()} == {0}  # of states, the embedding's included
    assert found["lens_kl"].score.value == pytest.approx((kl[0] + kl[1]) / 2, abs=1e-6)


def test_the_five_most_likely_tokens():
    """Layer 0 ranks 8 tokens upwards, the model downwards: tokens 3 and 4 are in both sets of five."""
    probed = HandMadeModel([identity, lambda x: -x], torch.ones(8, 1), torch.arange(8.0)[None])
    assert lens(probed, integers(8, 2, 3), rng())["lens_overlap"].by_layer == pytest.approx([2 / 5, 2 / 5, 1])


def test_an_early_prediction_may_be_settled_and_wrong():
    """Blocks that double leave each token's order as it was: the lens sees one opinion, and an early loss is bad."""
    probed = HandMadeModel([lambda x: 2 * x], torch.tensor([[0.0, 5.0], [5.0, 0.0]]), torch.eye(2))
    tokens = torch.tensor([[0, 0, 0, 0]])
    assert lens(probed, tokens, rng())["lens_kl"].by_layer[0] < 0.05
    assert known(early_exit(probed, Scored.text(tokens), rng())["lens_loss"].by_layer[0]) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_against_plain_softmaxes_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 16)
    with torch.no_grad():
        read = [model.logits(x.float()).double().log_softmax(-1) for x in states(model, tokens)]
    kl = [(p.exp() * (p - read[-1])).sum(-1).mean().item() for p in read]
    tops = [[set(row.tolist()) for row in p.flatten(0, 1).topk(5).indices] for p in read]
    overlap = [np.mean([len(a & b) / 5 for a, b in zip(top, tops[-1], strict=True)]) for top in tops]
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = lens(ProbedDecoder(model), tokens, rng())
        assert found["lens_kl"].by_layer == pytest.approx(kl, abs=1e-5)
        assert found["lens_overlap"].by_layer == pytest.approx(overlap)
        assert brackets(found["lens_kl"].score) and brackets(found["lens_overlap"].score)
