"""Initial weights: what each rule scales, and what stays paired."""

import itertools
import math

import pytest
import torch
from reference import ZOO

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model.decoder import Decoder

SMALL = {"n_layers": 4, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 50, "seq_len": 16}


def decoder(seed: int = 0, **fields) -> Decoder:
    return Decoder(build(ModelConfig, {**SMALL, **fields}, "test"), seed)


def ratios(model: Decoder, base: Decoder) -> dict[str, float]:
    """Matrix name -> the one factor between two models, where it is not 1."""
    found = {}
    for name, weight in base.named_parameters():
        if weight.ndim > 1:
            ratio = model.get_parameter(name) / weight
            torch.testing.assert_close(ratio, torch.full_like(ratio, ratio.mean().item()))
            if not math.isclose(ratio.mean().item(), 1, rel_tol=1e-5):
                found[name] = ratio.mean().item()
    return found


def test_scaled_shrinks_all_output_projections_alike():
    found = ratios(decoder(init="scaled"), decoder())
    assert len(found) == 8 and all(name.endswith(("output.weight", "down.weight")) for name in found)
    assert list(found.values()) == pytest.approx([1 / math.sqrt(8)] * 8, rel=1e-5)


def test_depth_scaled_shrinks_those_of_deep_blocks_more():
    found = ratios(decoder(init="depth_scaled"), decoder())
    for layer in range(1, 5):
        for part in ("attention.output", "ffn.down"):
            assert found.pop(f"blocks.{layer - 1}.{part}.weight") == pytest.approx(1 / math.sqrt(2 * layer), rel=1e-5)
    assert not found


def test_zero_outputs_start_every_block_as_the_identity():
    model = decoder(init="zero_outputs", n_experts=4, top_k=2, n_dense_layers=2)
    tokens_BT = torch.arange(8)[None]
    torch.testing.assert_close(model.hidden(tokens_BT), model.embed_tokens(tokens_BT))
    same = dict(decoder(n_experts=4, top_k=2, n_dense_layers=2).named_parameters())
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, same[name])}
    assert len(changed) == 8 and all(name.endswith(("output.weight", "down.weight", "down_EDF")) for name in changed)


def test_deepnorm_shrinks_all_but_query_and_key():
    experts = {"n_experts": 4, "top_k": 2, "n_shared_experts": 1, "n_dense_layers": 1}
    found = ratios(decoder(norm="deepnorm", **experts), decoder(**experts))
    assert list(found.values()) == pytest.approx([32**-0.25] * len(found), rel=1e-5)
    kinds = {name.split(".", 2)[2] for name in found}
    shared = {f"ffn.shared.{kind}.weight" for kind in ("gate", "up", "down")}
    dense = {f"ffn.{kind}.weight" for kind in ("gate", "up", "down")}
    routed = {"ffn.gate_up_E2FD", "ffn.down_EDF"}
    assert kinds == {"attention.value.weight", "attention.output.weight"} | shared | dense | routed


@pytest.mark.parametrize("name", ZOO)
def test_matrices_that_two_architectures_share_are_equal_up_to_a_factor(name):
    """Comparisons are paired: every field leaves the draws of (seed, name) as they are."""
    base = dict(decoder().named_parameters())
    for key, weight in decoder(**ZOO[name]).named_parameters():
        if weight.ndim > 1 and key in base:
            exists = weight != 0
            ratio = weight[exists] / base[key][exists]
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


@pytest.mark.parametrize("name", ZOO)
def test_moving_off_the_meta_device_gives_the_same_model(name):
    """What is not saved must be set again: uninitialised memory once wiped the depth scales of another library."""
    config = build(ModelConfig, {**SMALL, **ZOO[name]}, "test")
    with torch.device("meta"):
        empty = Decoder(config)
    built = empty.to_empty(device="cpu")
    built.initialise(3)
    expected, tokens = Decoder(config, 3), torch.arange(12)[None]
    assert all(torch.equal(weight, built.get_parameter(key)) for key, weight in expected.named_parameters())
    torch.testing.assert_close(built(tokens), expected(tokens), rtol=0, atol=0)


def test_a_vector_without_an_initial_value_is_refused():
    model = decoder()
    model.new_scalar = torch.nn.Parameter(torch.empty(1))
    with pytest.raises(AssertionError, match="new_scalar has no initial value"):
        model.initialise(0)


def test_gates_start_where_their_papers_say():
    layerscale, skipinit = decoder(residual_gate="layerscale", gate_init=1e-3), decoder(residual_gate="skipinit")
    assert torch.equal(layerscale.blocks[1].ffn_gate, torch.full((32,), 1e-3))
    assert skipinit.blocks[1].attention_gate.tolist() == [0.0]
    tokens = torch.arange(12)[None]
    assert torch.equal(skipinit.hidden(tokens), skipinit.embed(tokens))  # every block is the identity


def test_scalars_start_where_they_change_nothing_and_where_values_are_means():
    """a = 1 and b = 0: the plain decoder; c = d = 1/2 in blocks 2 to 4, and none in block 1 (2410.17897)."""
    plain, scalars, values = decoder(), decoder(residual_scalars=True), decoder(value_residual=True)
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(scalars(tokens), plain(tokens), rtol=0, atol=0)
    start = {name: weight.item() for name, weight in values.named_parameters() if name.endswith("scalar")}
    names = ("value_scalar", "first_value_scalar")
    assert start == {f"blocks.{index}.attention.{name}": 0.5 for index in (1, 2, 3) for name in names}


@pytest.mark.parametrize("fields", [{}, {"n_layers": 8, "loops": 2}])
def test_falling_scalars_end_in_the_last_block_with_weights_of_its_own(fields):
    """1.15 and .2 in block 1, 1.05 and .05 in block 4 (nanochat)."""
    blocks = decoder(residual_scalars=True, scalars_start="falling", **fields).blocks
    start = [(blocks[at].stream_scalar.item(), blocks[at].first_scalar.item()) for at in (0, 3)]
    assert start == [pytest.approx((1.15, 0.2)), pytest.approx((1.05, 0.05))]


def test_admin_weights_are_the_roots_of_the_variances_so_far():
    """w_1 = 1, w_2^2 = Var x_0 + Var of branch 1, w_(i+1)^2 = w_i^2 + Var of branch i; the branches seen by hooks."""
    fields = {"residual_gate": "admin", "norm": "post", "seq_len": 24, "init_std": 0.3}
    model = decoder(**fields)

    def weights(model: Decoder) -> list[float]:
        gates = [gate for block in model.blocks for gate in (block.attention_gate, block.ffn_gate)]
        assert all(torch.equal(gate, gate[:1].expand(32)) for gate in gates)  # one number for all channels, at first
        return [gate[0].item() for gate in gates]

    before, variances = weights(model), []
    for block in model.blocks:
        for part in (block.attention, block.ffn):
            part.register_forward_hook(lambda module, inputs, output: variances.append(output.double().var().item()))
    model.initialise(0)
    assert before == weights(model) == weights(decoder(**fields))
    assert before[0] == 1
    assert before[1] ** 2 - variances[0] == pytest.approx(0.3**2, rel=0.15)
    steps = [after**2 - before**2 for before, after in itertools.pairwise(before[1:])]
    assert steps == pytest.approx(variances[1:7], rel=1e-3)
