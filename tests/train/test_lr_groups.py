"""Learning rates by group: which parameters, by which factor, in both optimizers."""

import copy

import pytest
import torch
from reference import ZOO

from sparsedepth.config.load import build
from sparsedepth.config.lr_groups import GROUPS, group_of
from sparsedepth.config.run import RunConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.optimizer import make_optimizer, set_learning_rate

SHAPE = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 32, "seq_len": 8, "batch_tokens": 64}


def config(**fields) -> RunConfig:
    return build(RunConfig, {**SHAPE, "train_tokens": 640, **fields}, "test")


@pytest.mark.parametrize("name", ZOO)
def test_a_group_that_is_accepted_has_parameters_and_one_that_is_refused_has_none(name):
    fields = {name: value for name, value in ZOO[name].items() if name not in ("base_width", "base_depth")}
    cfg = config(**fields, **({"base_width": 8} if "parametrisation" in fields else {}))
    present = {group_of(parameter) for parameter, _ in Decoder(cfg).named_parameters()}
    for group in GROUPS:
        if group in present:
            config(**cfg.model_dump(mode="json", exclude_defaults=True) | {"lr_of": {group: 2.0}})
        elif group not in ("attention", "ffn"):  # every block has both
            with pytest.raises(ValueError, match=rf"lr_of\.{group} is of parameters that this model does not have"):
                config(**cfg.model_dump(mode="json", exclude_defaults=True) | {"lr_of": {group: 2.0}})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_first_step_without_decay_is_as_many_times_as_long(optimizer):
    """From the same gradients; AdamW's and Muon's first steps are in proportion to lr."""
    fields = {"optimizer": optimizer, "weight_decay": 0.0, "residual_scalars": True, "lr": 0.01}
    moved = []
    for lr_of in ({}, {"residual_scalars": 0.01, "embed": 3, "ffn": 0.5}):
        cfg = config(**fields, lr_of=lr_of)
        model = Decoder(cfg)
        before = copy.deepcopy(dict(model.named_parameters()))
        optimizer_of_run = make_optimizer(model, cfg)
        set_learning_rate(optimizer_of_run, cfg.lr)
        for name, weight in model.named_parameters():
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        optimizer_of_run.step()
        moved.append({name: (weight - before[name]).detach() for name, weight in model.named_parameters()})
    expected = {"residual_scalars": 0.01, "embed": 3.0, "ffn": 0.5}
    for name, step in moved[0].items():
        torch.testing.assert_close(moved[1][name], expected.get(group_of(name), 1.0) * step, rtol=1e-3, atol=2e-6)


def test_factors_of_group_and_parametrisation_multiply():
    """A quarter of lr for a matrix four times as wide as the base; twice that for the group."""
    cfg = config(parametrisation="completep", base_width=4, base_depth=2, lr_of={"attention": 2})
    model = Decoder(cfg)
    groups = make_optimizer(model, cfg).param_groups
    for name, expected in (("attention.query.weight", 0.5), ("ffn.up.weight", 0.25), ("attention_norm.weight", 1.0)):
        weight = model.get_parameter(f"blocks.1.{name}")
        (group,) = (group for group in groups if any(p is weight for p in group["params"]))
        assert group["lr_factor"] == expected


def test_one_mapping_is_one_run_in_any_order_and_the_default_is_none():
    one, other = (config(lr_of=lr_of) for lr_of in ({"embed": 2, "head": 3}, {"head": 3.0, "embed": 2.0}))
    assert one == other and one.run_id == other.run_id and hash(one) == hash(other)
    assert one.model_dump(mode="json")["lr_of"] == [["embed", 2.0], ["head", 3.0]]  # as it is stored, and read again
    assert config(lr_of={}).run_id == config().run_id
    assert config(lr_of=[["embed", 2.0], ["head", 3.0]]) == one  # as a column of a store has it


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lr_of": {"embde": 2}}, r"embde.*did you mean 'embed'"),
        ({"lr_of": {"embed": 0}}, r"lr_of"),
        ({"lr_of": 3}, r"lr_of=3 .*must map groups of parameters to multiples of lr"),
        ({"lr_of": [2]}, r"lr_of=\[2\] .*must map groups of parameters to multiples of lr"),
        ({"lr_of": {"head": 2}, "tie_embeddings": True}, r"lr_of\.head is of parameters that this model does not have"),
    ],
)
def test_a_mistake_is_told_with_its_fix(given, told):
    with pytest.raises(ValueError, match=told):
        config(**given)
