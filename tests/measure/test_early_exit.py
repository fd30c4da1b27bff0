"""Early exit: exits worked out by hand, the corner cases, the plain loop."""

import math

import numpy as np
import pytest
import torch
from reference import FAMILIES, exit_losses, run_config
from support.handmade_models import HandMadeModel, brackets, integers, known, rng, tokens_per_pass

from sparsedepth.measure.lens import early_exit
from sparsedepth.measure.measurements import Scored
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def values(exits):
    return [known(value) for value in exits.by_layer]


def test_by_hand():
    """x_0 = 1; add 1, then 2, then double. With logits (x, 0) the token 1 costs ln(1 + e^x) =: c(x).

    The lens reads 1, 2, 4, 8; through the last block 2, 4, 8."""
    blocks = [lambda x: x + 1, lambda x: x + 2, lambda x: 2 * x]
    probed = HandMadeModel(blocks, torch.ones(2, 1), head_DV=torch.tensor([[1.0, 0.0]]))
    found = early_exit(probed, Scored.text(torch.ones(3, 5, dtype=torch.int64)), rng())
    cost = {x: math.log(1 + math.exp(x)) for x in (1, 2, 4, 8)}
    assert values(found["lens_loss"]) == pytest.approx([cost[x] for x in (1, 2, 4, 8)], abs=1e-6)
    assert values(found["early_exit_loss"]) == pytest.approx([cost[x] for x in (2, 4, 8)], abs=1e-6)
    increases = [(cost[x] - cost[8]) / cost[8] for x in (1, 2, 4)]
    assert found["lens_loss"].score.value == pytest.approx(np.mean(increases), abs=1e-6)
    assert found["early_exit_loss"].score.value == pytest.approx(np.mean(increases[1:]), abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_shorter_models_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 17)
    lens, block = exit_losses(model, tokens, []), exit_losses(model, tokens, [5])
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = early_exit(ProbedDecoder(model), Scored.text(tokens), rng())
        assert values(found["lens_loss"]) == pytest.approx(lens, rel=1e-5)
        assert values(found["early_exit_loss"]) == pytest.approx(block, rel=1e-5)
        assert brackets(found["lens_loss"].score) and brackets(found["early_exit_loss"].score)
        assert found["early_exit_loss"].by_layer == pytest.approx(block, rel=1e-5)
