"""Decay groups and Muon, by hand."""

import math

import pytest
import torch
from reference import ZOO

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.optimizer import decays, make_optimizer


def config(**fields) -> RunConfig:
    shape = {"n_layers": 1, "d_model": 8, "n_heads": 1, "vocab_size": 8, "seq_len": 4, "batch_tokens": 4}
    return build(RunConfig, {**shape, "train_tokens": 44, **fields}, "test")  # 11 steps


NORMS = {"blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight", "norm.weight"}


@pytest.mark.parametrize(
    ("rule", "undecayed"),
    [("all", set()), ("matrices", NORMS), ("no_embed_norm", {*NORMS, "embed.weight"})],
)
def test_which_parameters_decay(rule, undecayed):
    model = Decoder(config())
    assert {name for name, p in model.named_parameters() if not decays(name, p, rule)} == undecayed
    optimizer = make_optimizer(model, config(weight_decay=0.3, weight_decay_on=rule))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert {group["weight_decay"] for group in optimizer.param_groups} == ({0.3, 0.0} if undecayed else {0.3})


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_falls_under_its_rule(name):
    """Norms (also of queries, keys and the embedding) and gates are vectors: only 'all' decays them."""
    model = Decoder(config(**{"n_layers": 2, "d_model": 16, "n_heads": 2, **ZOO[name]}))
    for parameter_name, parameter in model.named_parameters():
        kinds = parameter_name.split(".")
        is_vector = kinds[-1].endswith(("_gate", "_scalar")) or (
            kinds[-1] in ("weight", "bias") and kinds[-2].endswith("norm")
        )
        decayed = {rule for rule in ("all", "matrices", "no_embed_norm") if decays(parameter_name, parameter, rule)}
        if is_vector:
            assert decayed == {"all"}, parameter_name
        else:
            assert decayed == {"all", "matrices"} | ({"no_embed_norm"} if kinds[0] != "embed" else set()), (
                parameter_name
            )


def test_muon_moves_the_blocks_matrices_along_all_their_directions_as_far_as_adamw_would():
    """lr 0.1, decay 0.5: the weight shrinks by 0.95 and moves by 0.1 x 0.2 sqrt(8) O, O near U V' of the gradient,
    whose singular values Newton-Schulz brings between 0.68 and 1.13. All else takes AdamW's first step: the sign of
    the gradient."""
    cfg = config(optimizer="muon", lr=0.1, weight_decay=0.5, n_layers=2, d_ff=8)
    model = Decoder(cfg)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    make_optimizer(model, cfg).step()
    n_muon = 0
    for name, weight in model.named_parameters():
        moved = (weight - before[name] * (0.95 if weight.ndim > 1 else 1.0)).detach()
        if name.startswith("blocks.") and weight.ndim == 2:
            n_muon += 1
            u, _, vt = torch.linalg.svd(weight.grad)
            directions = -(u.T @ moved @ vt.T) / (0.1 * 0.2 * math.sqrt(8))
            assert (directions.diag() > 0.6).all() and (directions.diag() < 1.25).all(), name
            assert (directions - directions.diag().diag()).abs().max() < 0.05  # bf16
        else:
            torch.testing.assert_close(moved, -0.1 * weight.grad.sign(), rtol=1e-4, atol=1e-5, msg=name)
    assert n_muon == 2 * 7


def test_muon_refuses_what_is_no_whole_matrix():
    with pytest.raises(ValueError, match=r"optimizer='muon'.*n_experts=4"):
        config(optimizer="muon", n_experts=4, top_k=2)
