"""The stream in branches: they add up to the block, and they are what its two modules put out."""

import pytest
import torch
from handmade import HandMadeModel, integers, normal
from reference import FAMILIES, branch_updates, run_config, states

from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import probing, updates
from sparsedepth.probe.probed_model import ProbedDecoder


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_of_a_decoder_add_up_to_its_blocks(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])).eval(), integers(40, 2, 16)  # training rounds otherwise
    probed, expected = ProbedDecoder(model), states(model, tokens)
    with probing(probed):
        for update in updates(probed, tokens):
            assert update.branches
            for part, seen in zip(update.branches, branch_updates(model, tokens, update.layer), strict=True):
                torch.testing.assert_close(part.double(), seen, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(update.after, probed.block(update.layer, update.before), rtol=1e-6, atol=1e-6)
            # The states reach 20, where rounding of five layers is 3e-5.
            torch.testing.assert_close(update.after.double(), expected[update.layer], rtol=1e-5, atol=1e-4)
    assert update.layer == 5


def test_a_model_without_branches_runs_its_blocks():
    probed = HandMadeModel([lambda x: 2 * x, lambda x: x + 1], normal(5, 4))
    found = list(updates(probed, integers(5, 2, 3)))
    assert [(update.layer, update.branches) for update in found] == [(1, None), (2, None)]
    torch.testing.assert_close(found[1].after, 2 * found[0].before + 1)
    assert found[1].before is found[0].after
