"""Hyper-connections: mixing by hand, and where they start."""

import pytest
import torch

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.variants.streams import Streams, sinkhorn

SMALL = {"n_layers": 3, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "init_std": 0.3}
TOKENS = torch.arange(12).view(2, 6)


def config(**fields) -> ModelConfig:
    return build(ModelConfig, {**SMALL, **fields}, "test")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_plain_branch_by_hand():
    """X = (1, 2), a = (3, -1), b = (1, 10), R = ((1, 0), (5, 2)): reads 3 - 2 = 1; with 7 added, X'_1 = 1 + 5 x 2 + 7
    and X'_2 = 2 x 2 + 70. W = 0, so that coefficients do not depend on X."""
    streams = Streams(config(n_streams=2), 0)
    with torch.no_grad():
        streams.start_scalar.copy_(torch.tensor([3.0, 1.0, 1.0, 0.0, -1.0, 10.0, 5.0, 2.0]))
        x_BTW = torch.cat((torch.ones(1, 1, 16), torch.full((1, 1, 16), 2.0)), dim=-1)
        assert streams.read(x_BTW).unique().tolist() == [1.0]
        joined = streams.add_update(x_BTW, torch.full((1, 1, 16), 7.0)).unflatten(-1, (2, 16))
    assert joined[0, 0, 0].unique().tolist() == [18.0] and joined[0, 0, 1].unique().tolist() == [74.0]


def test_at_the_start_plain_streams_are_the_residual_sum():
    """All streams are the sum, and the norm of n sums is that of one, but for its epsilon."""
    plain, streams = Decoder(config(norm_eps=1e-12)), Decoder(config(norm_eps=1e-12, n_streams=4))
    torch.testing.assert_close(streams(TOKENS), plain(TOKENS), atol=1e-5, rtol=1e-5)
    x_BTW = streams.hidden(TOKENS)
    assert x_BTW.shape == (2, 6, 64)
    torch.testing.assert_close(x_BTW.unflatten(-1, (4, 16))[..., 3, :], plain.hidden(TOKENS), atol=1e-5, rtol=1e-5)


def test_at_the_start_manifold_streams_are_nearly_the_residual_sum():
    """What is read is 1 - 0.018 of one stream and 0.018 of each other, and 0.1% is mixed."""
    plain, streams = Decoder(config()), Decoder(config(n_streams=2, stream_mixing="manifold"))
    torch.testing.assert_close(streams(TOKENS), plain(TOKENS), atol=0.02, rtol=0.02)


def test_branches_read_the_streams_in_turn():
    model = Decoder(config(n_streams=4))
    starts = [part.start_scalar.view(4, 6)[:, 0] for block in model.blocks
              for part in (block.attention_streams, block.ffn_streams)]  # fmt: skip
    assert [start.argmax().item() for start in starts] == [0, 1, 2, 3, 0, 1]
    sizes = {name: w.unique().tolist() for name, w in model.named_parameters() if name.endswith("size_scalar")}
    assert len(sizes) == 6 and all(size == pytest.approx([0.01]) for size in sizes.values())


@pytest.mark.parametrize("n", [2, 4])
def test_rows_and_columns_of_a_mixing_sum_to_one(n):
    matrix = sinkhorn(normal(5, 7, n, n))
    assert (matrix > 0).all()
    for axis in (-1, -2):
        torch.testing.assert_close(matrix.sum(axis), torch.ones(5, 7, n), atol=1e-3, rtol=0)
    near = sinkhorn(torch.log(torch.tensor([[0.75, 0.25], [0.25, 0.75]])))
    torch.testing.assert_close(near, torch.tensor([[0.75, 0.25], [0.25, 0.75]]))


def test_manifold_mixing_keeps_the_sum_of_streams_and_enlarges_none():
    """With nothing added; plain mixing of the same coefficients does enlarge."""
    for mixing in ("manifold", "plain"):
        model = Decoder(config(n_streams=3, stream_mixing=mixing, init="zero_outputs"))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "streams.start_scalar" in name:
                    weight.add_(3 * normal(len(weight)))
            x_BTnD = normal(2, 6, 3, 16)
            after = model.blocks[0](x_BTnD.flatten(-2), Context(model.rotary(6))).view_as(x_BTnD)
        if mixing == "manifold":
            torch.testing.assert_close(after.sum(-2), x_BTnD.sum(-2), atol=1e-4, rtol=1e-4)
        assert bool(after.norm() > x_BTnD.norm()) is (mixing == "plain")
