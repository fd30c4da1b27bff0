"""Gated attention, windows by layer, loops and hyper-connections: by hand, and where they start. Their formulas in fp64
are checked with all others (test_decoder.py), on every path in tests/test_contract.py."""

import pytest
import torch
import torch.nn.functional as F
from support.handmade_models import integers

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.run import RunConfig, check_parallel
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.variants.streams import Streams, sinkhorn
from sparsedepth.probe.fork import run_forks, stream
from sparsedepth.probe.probed_model import ProbedDecoder

SMALL = {"n_layers": 4, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8, "init_std": 0.3}
TOKENS = integers(12, 2, 8)


def config(**fields) -> ModelConfig:
    return build(ModelConfig, {**SMALL, **fields}, "test")


@pytest.mark.parametrize("kind", ["channel", "head"])
def test_a_gate_of_zero_weights_halves_what_attention_adds(kind):
    """sigmoid(0) = 1/2, as do output projections of half the size."""
    gated, plain = Decoder(config(gated_attention=kind)), Decoder(config())
    with torch.no_grad():
        for own, other in zip(gated.blocks, plain.blocks, strict=True):
            own.attention.gating.weight.zero_()
            other.attention.output.weight.mul_(0.5)
    torch.testing.assert_close(gated(TOKENS), plain(TOKENS), atol=1e-5, rtol=1e-5)
    assert gated.blocks[0].attention.gating.weight.shape == ({"channel": 16, "head": 2}[kind], 16)


def test_a_pattern_repeats_and_the_last_layer_sees_all():
    """SSSL over 6 layers: all but layers 4 and 6 have the window."""
    cfg = config(n_layers=6, sliding_window=3, window_pattern="SSSL")
    assert [cfg.has_window(layer) for layer in range(1, 7)] == [True, True, True, False, True, False]
    probed = ProbedDecoder(Decoder(cfg))
    x_BTD = probed.embed(TOKENS)
    assert [probed.attention_inputs(layer, x_BTD)[2].window for layer in range(1, 7)] == [3, 3, 3, None, 3, None]


@pytest.mark.parametrize("pattern", ["S", "SL"])
def test_a_token_reaches_as_far_as_the_windows_of_its_layers(pattern):
    """2 layers with window 3: a change at position 0 reaches 2 with one, and every later token through the last layer,
    which sees all."""
    model = Decoder(config(n_layers=2, sliding_window=3, window_pattern=pattern)).eval()
    other = TOKENS.clone()
    other[:, 0] = (other[:, 0] + 1) % 12
    with torch.no_grad():
        context = model.context(TOKENS, model.embed_tokens(TOKENS))
        one, two = (model.blocks[0](model.embed_tokens(tokens), context) for tokens in (TOKENS, other))
        changed = (one != two).any(-1).any(0)
        assert changed.tolist() == [True] * 3 + [False] * 5
        assert (model(TOKENS) != model(other)).any(-1).all()


def of_own_weights(looped: Decoder) -> Decoder:
    """The decoder with as many layers and loops=1, each layer with a copy of the weights of its block."""
    untied = Decoder(looped.config.model_copy(update={"loops": 1}))
    with torch.no_grad():
        for name, weight in untied.named_parameters():
            weight.copy_(looped.get_parameter(name))
    return untied


def test_a_block_gets_the_gradients_of_all_its_layers():
    looped = Decoder(config(loops=2, depth_scale="lns"))
    untied = of_own_weights(looped)
    torch.testing.assert_close(looped(TOKENS), untied(TOKENS), rtol=0, atol=0)
    for model in (looped, untied):
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    assert {name.split(".")[1] for name, _ in looped.named_parameters() if name.startswith("blocks.")} == {"0", "1"}
    for name, weight in looped.named_parameters():
        expected = untied.get_parameter(name).grad
        if name.startswith("blocks."):
            later = name.replace("blocks.0", "blocks.2").replace("blocks.1", "blocks.3")
            expected = expected + untied.get_parameter(later).grad
        torch.testing.assert_close(weight.grad, expected, atol=1e-6, rtol=1e-4)


def test_forks_change_one_pass_and_not_its_block_in_every_pass():
    """Layers 1 and 3 are one block: swapped they change nothing; left out, layer 1 is 2, 3, 4 of the unlooped one."""
    looped = Decoder(config(loops=2))
    probed, untied = ProbedDecoder(looped), ProbedDecoder(of_own_weights(looped))
    with torch.no_grad():
        states, (x_BTD, *_) = [*stream(probed, TOKENS)], stream(untied, TOKENS)
        for layer in (2, 3, 4):
            x_BTD = untied.block(layer, x_BTD)
        steps = [step for step in run_forks(probed, states, [{1: None}, {1: 3, 3: 1}]) if step.layer == 4]
        last = {fork: step.after[row] for step in steps for row, fork in enumerate(step.forks)}
    torch.testing.assert_close(last[0], x_BTD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last[1], states[-1], rtol=0, atol=0)


def test_a_branch_of_two_streams_by_hand():
    """X = (1, 2), a = (3, -1), b = (1, 10), R = ((1, 0), (5, 2)): reads 3 - 2 = 1; with 7 added, X'_1 = 1 + 5 x 2 + 7
    and X'_2 = 2 x 2 + 70. W = 0, so that coefficients do not depend on X."""
    streams = Streams(config(n_streams=2), 0)
    with torch.no_grad():
        streams.start_scalar.copy_(torch.tensor([3.0, 1.0, 1.0, 0.0, -1.0, 10.0, 5.0, 2.0]))
        x_BTW = torch.cat((torch.ones(1, 1, 16), torch.full((1, 1, 16), 2.0)), dim=-1)
        assert streams.read(x_BTW).unique().tolist() == [1.0]
        joined = streams.add_update(x_BTW, torch.full((1, 1, 16), 7.0)).unflatten(-1, (2, 16))
    assert joined[0, 0, 0].unique().tolist() == [18.0] and joined[0, 0, 1].unique().tolist() == [74.0]


def test_at_the_start_streams_are_the_residual_sum():
    """All streams are the sum, and the norm of n sums is that of one, but for its epsilon. Manifold is near: what is
    read is 1 - 0.018 of one stream and 0.018 of each other, and 0.1% is mixed."""
    plain, streams = Decoder(config(norm_eps=1e-12)), Decoder(config(norm_eps=1e-12, n_streams=4))
    torch.testing.assert_close(streams(TOKENS), plain(TOKENS), atol=1e-5, rtol=1e-5)
    manifold = Decoder(config(n_streams=2, stream_mixing="manifold"))
    torch.testing.assert_close(manifold(TOKENS), Decoder(config())(TOKENS), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("n", [2, 4])
def test_rows_and_columns_of_a_mixing_sum_to_one(n):
    matrix = sinkhorn(torch.randn(5, 7, n, n, generator=torch.Generator().manual_seed(0)))
    assert (matrix > 0).all()
    for axis in (-1, -2):
        torch.testing.assert_close(matrix.sum(axis), torch.ones(5, 7, n), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"loops": 3}, r"loops=3 does not divide n_layers=4"),
        ({"loops": 2, "parametrisation": "completep"}, r"loops=2.*own weights"),
        ({"n_streams": 2, "norm": "post"}, r"n_streams=2 with norm='post'"),
        ({"n_streams": 2, "gpas": True}, r"n_streams=2 with gpas=True"),
        ({"n_streams": 2, "parametrisation": "mup"}, r"n_streams=2.*no rule"),
        ({"n_streams": 2, "attention_residuals": 4}, r"attention_residuals=4 with n_streams=2"),
        ({"n_layers": 2, "stream_skips": True}, r"stream_skips joins blocks of two halves"),
        ({"n_streams": 2, "stream_skips": True}, r"n_streams=2 with stream_skips=True"),
        ({"stream_mixing": "manifold"}, r"stream_mixing='manifold' has no meaning with n_streams=1"),
        ({"window_pattern": "SSSL"}, r"window_pattern='SSSL' has no meaning without sliding_window"),
        ({"loops": 2, "sliding_window": 3, "window_pattern": "SL"}, r"window_pattern='SL' with loops=2"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        config(**fields)


def test_shared_weights_are_not_sharded():
    with pytest.raises(ValueError, match=r"loops=2 shares weights.*parallel='ddp'"):
        check_parallel(RunConfig(loops=2), "fsdp")


@pytest.mark.parametrize(("n_layers", "totals"), [(5, (1, 1, 1, 1, 2, 3)), (4, (1, 1, 1, 2, 3))])
def test_skips_are_nested_and_an_intervention_leaves_what_was_kept(n_layers, totals):
    """Branches that add nothing: of 5 layers block 4 adds c x_2 and block 5 adds c x_1, of 4 block 3 adds c x_2, its
    own input, and block 4 adds c x_1. So with c = 1 the stream is x_0, then 2 x_0 and 3 x_0; without the first of the
    two blocks 2 x_0. With x_1 five times as large the later ones add what they did."""
    model = Decoder(config(n_layers=n_layers, stream_skips=True, init="zero_outputs"))
    probed = ProbedDecoder(model)

    def last(fork):
        return next(step.after[0] for step in run_forks(probed, states, [fork]) if step.layer == n_layers)

    with torch.no_grad():
        states = [*stream(probed, TOKENS)]
        for state, times in zip(states, totals, strict=True):
            torch.testing.assert_close(state, times * states[0])
        torch.testing.assert_close(model.hidden(TOKENS), states[-1])
        torch.testing.assert_close(last({n_layers - 1: None}), 2 * states[0])
        torch.testing.assert_close(last({1: lambda x: 5 * x}), 7 * states[0])
