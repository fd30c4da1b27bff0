"""Gain of the residual maps of several streams: by hand, by the plain product of matrices, and what others miss."""

import numpy as np
import pytest
import torch
from reference import run_config
from support.handmade_models import integers, tokens_per_pass

from sparsedepth.measure.bootstrap import ScoreByLayer
from sparsedepth.measure.composite_gain import composite_gain
from sparsedepth.measure.geometry import geometry
from sparsedepth.measure.variance import residual_variance
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder

TOKENS = integers(40, 3, 16)
IDENTITY = [[1.0, 0.0], [0.0, 1.0]]


def mixed(*maps, n_layers: int = 1, **fields) -> Decoder:
    """A model of two streams whose branches, in order, mix them by these matrices: X' = H X, whatever the token."""
    model = Decoder(run_config(n_streams=2, n_layers=n_layers, **fields))
    parts = [part for block in model.blocks for part in (block.attention_streams, block.ffn_streams)]
    with torch.no_grad():
        for part, entries in zip(parts, maps, strict=True):
            part.start_scalar.view(2, 4)[:, 2:] = torch.tensor(entries).T
    return model


def gain(model: Decoder) -> dict[str, ScoreByLayer]:
    return composite_gain(ProbedDecoder(model), TOKENS, np.random.default_rng(0))


def test_by_hand():
    """Block 1: attention mixes by A = ((1, 5), (0, -2)), the feed-forward part by B = ((1, 0), (1, 1)); B A has rows
    (1, 5) and (1, 3), so 6 forward, and 8 backward. Block 2 halves the streams, and its rows alone sum to 1/2."""
    half = [[0.5, 0.0], [0.0, 0.5]]
    result = gain(mixed([[1.0, 5.0], [0.0, -2.0]], [[1.0, 0.0], [1.0, 1.0]], half, IDENTITY, n_layers=2))
    assert result["composite_gain"].by_layer == pytest.approx([3, 0.5], rel=1e-6)
    assert result["composite_gain_backward"].by_layer == pytest.approx([4, 0.5], rel=1e-6)
    whole = result["composite_gain"].score
    assert (whole.value, whole.lo, whole.hi) == pytest.approx((3, 3, 3), rel=1e-6)


def test_signs_count_within_a_sum():
    """Rows of ((2, -3), (1, 1)): -1 and 2; columns 3 and -2."""
    result = gain(mixed([[2.0, -3.0], [1.0, 1.0]], IDENTITY))
    assert (result["composite_gain"].score.value, result["composite_gain_backward"].score.value) == pytest.approx(
        (2, 3), rel=1e-6
    )


def test_only_gradients_are_enlarged():
    """M = ((3, -2), (2, -1)) keeps equal streams as they are, and M^k has columns 1 + 4k and -(4k - 1): states, their
    variance and their angles do not change, which is all that those measures see."""
    model = mixed([[3.0, -2.0], [2.0, -1.0]], IDENTITY, [[3.0, -2.0], [2.0, -1.0]], IDENTITY, n_layers=2,
                  init="zero_outputs")  # fmt: skip
    result, probed, rng = gain(model), ProbedDecoder(model), np.random.default_rng(0)
    assert result["composite_gain"].by_layer == pytest.approx([1, 1], rel=1e-5)
    assert result["composite_gain_backward"].by_layer == pytest.approx([9, 5], rel=1e-5)
    variance = residual_variance(probed, TOKENS, rng).by_layer
    assert variance == pytest.approx([variance[0]] * 3, rel=1e-5)
    assert geometry(probed, TOKENS, rng).angular_distance_middle.value in (None, pytest.approx(0, abs=1e-3))


def moved(mixing: str, **fields) -> Decoder:
    """Coefficients of each token."""
    model = Decoder(run_config(n_streams=3, stream_mixing=mixing, **fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(end in name for end in ("streams.start_scalar", "streams.weight", "streams.size_scalar")):
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return model


def test_manifold_maps_have_none_and_one_stream_is_not_asked():
    result = gain(moved("manifold"))
    assert result["composite_gain_backward"].by_layer == pytest.approx(
        [1] * 5, abs=1e-5
    )  # the sums that a Sinkhorn step ends with
    assert result["composite_gain"].by_layer == pytest.approx([1] * 5, abs=0.05)  # 20 steps leave the others near 1
    one = ProbedDecoder(Decoder(run_config()))
    assert composite_gain(one, TOKENS, np.random.default_rng(0)) == {}


@pytest.mark.parametrize("mixing", ["plain", "manifold"])
def test_against_what_blocks_without_branches_do(mixing):
    """A block is then its map; gains are of each token's own product."""
    model = moved(mixing, init="zero_outputs")
    probed, before = ProbedDecoder(model), model.embed_tokens(TOKENS)
    maps, product, expected = [], torch.eye(3), []
    with torch.no_grad():
        for layer in range(1, 6):
            maps.append(probed.residual_map(layer, before))
            after = probed.block(layer, before)
            torch.testing.assert_close((maps[-1] @ before.unflatten(-1, (3, -1))).flatten(-2), after)
            before = after
    for map_BTnn in reversed(maps):
        product = product @ map_BTnn
        expected.append([product.sum(axis).abs().amax(-1).mean().item() for axis in (-1, -2)])
    forward, backward = zip(*reversed(expected), strict=True)
    for max_tokens in (1, 40, 8192):
        with tokens_per_pass(max_tokens):
            result = gain(model)
        assert result["composite_gain"].by_layer == pytest.approx(forward, rel=1e-4)
        assert result["composite_gain_backward"].by_layer == pytest.approx(backward, rel=1e-4)
