"""muP and CompleteP: the rules by hand, and outputs that change as much by a step at any width and depth."""

import math

import pytest
import torch
import torch.nn.functional as F

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.model.decoder import Decoder
from sparsedepth.train.optimizer import make_optimizer, set_learning_rate


def config(**fields) -> RunConfig:
    shape = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 32, "seq_len": 8, "batch_tokens": 64}
    return build(RunConfig, {**shape, "train_tokens": 640, **fields}, "test")


RULES = {
    "mup": ((1 / 4, 1e-8 / 4, 0.2), (1, 1e-8 / 4, 0.0), (1, 1e-8 / 4, 0.2), (1, 1e-8 / 4, 0.0)),
    "completep": ((1 / 4, 1e-8 / 12, 0.8), (1, 1e-8 / 12, 0.0), (1, 1e-8 / 4, 0.2), (1, 1e-8 / 4, 0.0)),
}
"""(lr factor, eps, weight decay) of a block's matrix, its norm, the embedding and the last norm: 2505.01618, table 1 at
alpha = 1, and its code. Four times the base width, three times the base depth, weight decay 0.2."""
NAMED = ("blocks.1.ffn.up.weight", "blocks.1.ffn_norm.weight", "embed.weight", "norm.weight")


@pytest.mark.parametrize("rules", RULES)
def test_groups_follow_the_papers_table(rules):
    base = {"base_width": 4, **({"base_depth": 2} if rules == "completep" else {})}
    cfg = config(n_layers=6, parametrisation=rules, weight_decay=0.2, adam_eps=1e-8, **base)
    model = Decoder(cfg)
    groups = make_optimizer(model, cfg).param_groups
    for name, expected in zip(NAMED, RULES[rules], strict=True):
        (group,) = (group for group in groups if any(p is model.get_parameter(name) for p in group["params"]))
        assert (group["lr_factor"], group["eps"], group["weight_decay"]) == pytest.approx(expected)
    standard = Decoder(config(n_layers=6))
    for name in ("blocks.1.ffn.up.weight", "blocks.1.attention.output.weight"):  # m_N = 4: half as large
        torch.testing.assert_close(2 * model.get_parameter(name), standard.get_parameter(name))
    assert torch.equal(model.embed.weight, standard.embed.weight)


def test_a_schedules_rate_is_divided_by_the_width_for_matrices_of_blocks_alone():
    cfg = config(parametrisation="mup", base_width=4)
    model = Decoder(cfg)
    optimizer = make_optimizer(model, cfg)
    set_learning_rate(optimizer, 0.5)
    for name, expected in zip(NAMED, (0.125, 0.5, 0.5, 0.5), strict=True):
        (group,) = (g for g in optimizer.param_groups if any(p is model.get_parameter(name) for p in g["params"]))
        assert group["lr"] == pytest.approx(expected), name


def test_at_the_base_nothing_changes():
    cfg, plain = config(parametrisation="completep", base_width=16, base_depth=2), config()
    model, tokens = Decoder(cfg), torch.arange(8)[None]
    assert torch.equal(model(tokens), Decoder(plain)(tokens))
    for own, expected in zip(*(make_optimizer(Decoder(c), c).param_groups for c in (cfg, plain)), strict=True):
        assert all(own[key] == expected[key] for key in ("lr_factor", "eps", "weight_decay"))


def changes(**fields) -> tuple[float, float]:
    """Rms by which 4 steps at lr 0.01 change the last state and the logits of a small text, mean of two seeds."""
    cfg = config(init_std=0.1, weight_decay=0.0, lr=0.01, **fields)
    tokens = torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for seed in (0, 1):
        model = Decoder(cfg, seed)
        optimizer = make_optimizer(model, cfg)
        set_learning_rate(optimizer, cfg.lr)
        seen = []
        for step in range(5):
            x_BTD = model.hidden(tokens[:, :-1])
            logits = model.logits(x_BTD)
            seen.append((x_BTD.detach(), logits.detach()))
            if step < 4:
                F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([(after - before).square().mean().item() for before, after in zip(seen[0], seen[-1], strict=True)])
    state, logits = torch.tensor(found).mean(0).sqrt().tolist()
    return state, logits


@pytest.mark.parametrize(
    ("rules", "low", "high", "sizes"),
    [
        *(("standard", 0.5, 2.0, (16, 128)), ("mup", -0.25, 0.25, (16, 128))),
        *(("standard", 0.35, 2.0, (2, 16)), ("completep", -0.25, 0.25, (2, 16))),
    ],
)
def test_coordinates_over_width_and_depth(rules, low, high, sizes):
    """2203.03466, appendix D.1: by the standard rules logits move the more the wider the model, with muP as much;
    2505.01618, figure 4: the stream moves the more the deeper the model is, with CompleteP as much."""
    base = {"standard": {}, "mup": {"base_width": 16}, "completep": {"base_width": 16, "base_depth": 2}}[rules]
    if sizes == (16, 128):
        moved = [changes(d_model=size, n_heads=size // 8, parametrisation=rules, **base)[1] for size in sizes]
    else:
        moved = [changes(n_layers=size, parametrisation=rules, **base)[0] for size in sizes]
    assert low < math.log(moved[1] / moved[0]) / math.log(8) < high, moved
