"""Dropout: the entries that it leaves, how many it takes, none in evaluation; and the same ones when a run resumes."""

import dataclasses
import functools

import pytest
import torch
from reference import ZOO
from support.counting import counting

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.role import can_stack, fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.model import attention
from sparsedepth.model.block import Block
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.loop import Interrupted, train
from sparsedepth.train.runtime import resolve

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 12, "seq_len": 8}
FIELDS = fields_where(ModelConfig, lambda role: role.acts and "noise" in role.acts)


def decoder(**fields) -> Decoder:
    return Decoder(build(ModelConfig, {**SMALL, "init_std": 0.3, **fields}, "test"))


def tokens() -> torch.Tensor:
    return torch.arange(16).view(2, 8) % 12


def test_no_other_field_is_called_a_dropout():
    assert {name for name in RunConfig.model_fields if "drop" in name} == set(FIELDS)


@pytest.mark.parametrize("fields", [*ZOO.values(), *({field: 0.5} for field in FIELDS)], ids=str)
def test_no_other_field_draws_random_numbers(fields):
    """They are seeded only where a field of the role is above 0 (`train.runtime.dropout_masks`)."""
    model, before = decoder(**fields), torch.get_rng_state()
    model(tokens())
    assert torch.equal(torch.get_rng_state(), before) != bool(set(FIELDS) & set(fields))


@pytest.mark.parametrize("field", FIELDS)
def test_each_drops_in_training_and_nothing_in_evaluation(field):
    plain, dropping = decoder(), decoder(**{field: 0.5})
    assert not torch.allclose(dropping(tokens()), plain(tokens()), atol=1e-2)
    torch.testing.assert_close(dropping.eval()(tokens()), plain.eval()(tokens()), rtol=0, atol=0)


@pytest.mark.parametrize("field", FIELDS)
def test_nothing_is_dropped_while_admin_profiles_its_weights(field):
    """Initial weights are a function of configuration and seed, whatever random numbers were drawn before."""
    plain, dropping = (decoder(norm="post", residual_gate="admin", **fields) for fields in ({}, {field: 0.5}))
    assert dropping.training
    for one, other in zip(plain.parameters(), dropping.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("seen", [{}, {"window": 1}, {"document_BT": torch.tensor([[0, 1]])}], ids=str)
def test_a_weight_of_attention_is_dropped_or_as_much_larger(kernel, seen):
    """A query that sees itself alone has one weight, 1: out is 0 with chance 1/4, else v / (3/4). 4000 draws of the
    first of two tokens, and of both by a window of 1 or as documents of their own."""
    torch.manual_seed(0)
    q, v = torch.zeros(1, 4000, 2, 2), torch.full((1, 4000, 2, 2), 3.0)
    out_HT = attention.KERNELS[kernel](q, q, v, Context(**seen), 0.25)[0, :, : 2 if seen else 1, 0]
    assert set(out_HT.unique().tolist()) == {0.0, 4.0}
    assert (out_HT == 0).float().mean(0).tolist() == pytest.approx(
        [0.25] * out_HT.shape[1], abs=0.03
    )  # four standard errors


def test_entries_of_a_branch_and_hidden_units_are_dropped():
    """Of what a block adds a quarter is 0; of its hidden units as well, seen where the last product reads them."""
    model, seen = decoder(d_model=64, residual_dropout=0.25, ffn_dropout=0.25), []
    block = model.blocks[0]
    assert isinstance(block, Block)
    block.ffn.get_submodule("down").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    torch.manual_seed(0)
    x_BTD = torch.randn(20, 8, 64)
    added_BTD = block.ffn_update(x_BTD)
    whole_BTD = block.eval().ffn_update(x_BTD)
    for dropped in (added_BTD, seen[0]):
        assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(seen[0][seen[0] != 0], seen[1][seen[0] != 0] / 0.75)
    assert (whole_BTD != 0).all()


BASE = {**SMALL, "batch_tokens": 32, "train_tokens": 32 * 8, "log_every": 1, "precision": "fp32"}


def run_config(**fields) -> RunConfig:
    return build(RunConfig, {**BASE, **fields}, "test")


def weights(cfg: RunConfig, **options) -> list[torch.Tensor]:
    model = Decoder(cfg, seed=0)
    runtime = dataclasses.replace(resolve(cfg, RuntimeConfig(device="cpu")), checkpoint_seconds=1e9)
    state = torch.random.get_rng_state()
    train(model, cfg, runtime, counting, **options)
    assert options or torch.equal(torch.random.get_rng_state(), state)  # a checkpoint restores its own
    return list(model.parameters())


@pytest.mark.parametrize("field", FIELDS)
def test_a_run_that_resumes_drops_what_it_would_have_dropped(field, tmp_path):
    """Bit-equal, whatever was drawn in between; another seed drops others from the same initial weights."""
    whole = weights(run_config(**{field: 0.3}))
    calls = iter(range(1, 100))
    halves = functools.partial(weights, run_config(**{field: 0.3}), checkpoints=tmp_path)
    with pytest.raises(Interrupted):
        halves(stop=lambda: next(calls) == 3)
    torch.rand(7)
    for own, expected in zip(halves(), whole, strict=True):
        assert torch.equal(own, expected)
    assert not torch.equal(weights(run_config(**{field: 0.3}, seed=1))[0], whole[0])


@pytest.mark.parametrize("field", FIELDS)
def test_runs_that_drop_are_not_stacked(field):
    """Their masks are functions of their own seeds."""
    assert not can_stack(run_config(**{field: 0.3}), run_config(**{field: 0.3}, seed=1))
