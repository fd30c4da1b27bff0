"""Residual variance: planted growth, the definition, the plain loop."""

import pytest
import torch
from reference import FAMILIES, branch_updates, run_config, states
from support.handmade_models import HandMadeModel, brackets, ends, identity, integers, rng, tokens_per_pass

from sparsedepth.measure.variance import residual_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def test_planted_growth():
    """Each block triples the stream: v_l = 9^l v_0; var(1, 2, 3, 4) = 5/3 with D - 1 in the denominator."""
    probed = HandMadeModel([lambda x: 3 * x] * 4, torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]]))
    found = residual_variance(probed, torch.tensor([[0, 1], [0, 0]]), rng())
    v_0 = (5 / 3 + 0 + 5 / 3 + 5 / 3) / 4  # mean over the four tokens; the constant one varies by nothing
    assert found["residual_variance"].by_layer == pytest.approx([v_0 * 9**layer for layer in range(5)], rel=1e-6)
    assert ends(found["residual_growth"].score) == pytest.approx((9.0, 9.0, 9.0), rel=1e-6)  # of every resample
    assert found["residual_growth"].by_layer == pytest.approx([9.0] * 4, rel=1e-6)
    assert found.keys() == {"residual_variance", "residual_growth"}
    assert found["residual_variance"].score.value == pytest.approx(v_0 * 9**4, rel=1e-6)
    assert brackets(found["residual_variance"].score)


def test_a_shift_of_the_whole_stream_is_no_variance():
    probed = HandMadeModel([lambda x: x + 10, lambda x: 0 * x], torch.tensor([[1.0, 3.0]]))
    found = residual_variance(probed, torch.zeros(1, 5, dtype=torch.int64), rng())
    assert found["residual_variance"].by_layer == pytest.approx([2.0, 2.0, 0.0], abs=1e-6)
    assert found["residual_growth"].score.value == 0.0
    still = HandMadeModel([lambda x: 0 * x, identity], torch.tensor([[1.0, 3.0]]))
    again = residual_variance(still, torch.zeros(2, 5, dtype=torch.int64), rng())
    assert again["residual_growth"].by_layer == [0.0, None]
    assert ends(again["residual_growth"].score) == (None, None, None)


def test_branches_by_hand():
    """Attention adds x, the feed-forward part 2: var(1, 3) = 2 and 0, then the stream is (4, 8): var 8."""
    probed = HandMadeModel(
        [identity] * 2, torch.tensor([[1.0, 3.0]]), branches=lambda layer, x: (x, torch.full_like(x, 2.0))
    )
    found = residual_variance(probed, torch.zeros(2, 3, dtype=torch.int64), rng())
    assert found["residual_variance"].by_layer == pytest.approx([2, 8, 32], abs=1e-6)
    assert found["attention_variance"].by_layer == pytest.approx([2, 8], abs=1e-6)
    assert found["attention_variance"].score.value == pytest.approx(5, abs=1e-6)
    assert found["ffn_variance"].by_layer == pytest.approx([0, 0], abs=1e-6)


def test_growth_is_from_layer_1_on_and_missing_where_it_is_undefined():
    def growth(*factors):
        """Of a stream that each block multiplies: the embedding's own variance does not count."""
        probed = HandMadeModel([lambda x, factor=factor: factor * x for factor in factors], torch.tensor([[1.0, 3.0]]))
        return residual_variance(probed, torch.zeros(2, 3, dtype=torch.int64), rng())["residual_growth"].score.value

    assert growth(2) is None  # one layer: nothing to grow over
    assert growth(0, 3) is None  # from nothing
    assert growth(0.5, 2, 2) == pytest.approx(4.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_plain_loop_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 5, 16)
    expected = [x.numpy().var(axis=-1, ddof=1).mean() for x in states(model, tokens)]
    for max_tokens in (40, 8192):
        with tokens_per_pass(max_tokens):
            found = residual_variance(ProbedDecoder(model), tokens, rng())
        assert found["residual_variance"].by_layer == pytest.approx(expected, rel=1e-5)
        branches = (found["attention_variance"], found["ffn_variance"])
        for branch, seen in zip(branches, branch_updates(model, tokens, 4), strict=True):
            assert branch.by_layer[3] == pytest.approx(seen.var(dim=-1).mean().item(), rel=1e-5)
            assert brackets(branch.score)
        assert brackets(found["residual_growth"].score)
