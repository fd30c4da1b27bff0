"""Slopes that were planted: found where they are, and told where they are not."""

import math

import numpy as np
import pytest
import theorems
import torch
from reference import run_config
from support.handmade_models import HandMadeModel, integers, known
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.fork import probing
from sparsedepth.probe.probed_model import ProbedDecoder


def decoder(plant=None, **fields):
    """Random weights, planted by `plant(block)`: queries of 0, so that attention is uniform."""
    model = Decoder(run_config(**{"n_layers": 6, "init_std": 0.1, "vocab_size": 400, **fields}))
    with torch.no_grad():
        model.embed.weight.normal_(0, 1, generator=torch.Generator().manual_seed(1))
        model.embed.weight -= model.embed.weight.mean(0)  # tokens have nothing in common
        for block in model.blocks:
            block.attention.query.weight.zero_()
            if plant:
                plant(block)
    return ProbedDecoder(model.eval())


def found(ask, probed, tokens):
    with probing(probed, gradients=True):
        return [(one.theorem, one.verdict, one.slope) for one in ask(probed, tokens)]


def test_a_slope_by_hand():
    """y = 3 / x^2 and y = x: -2 and 1; a unit with a 0 has none."""
    x = np.array([1.0, 2, 5])
    assert theorems.slopes(x, np.stack([3 / x**2, x, 0 * x])) == pytest.approx([-2, 1])
    y = np.stack([3 / x**2 * (1 + e * x) for e in (-1e-3, 0, 1e-3)])
    told = theorems.check("4", "y over", [1, 2, 5], y, theorems.MINUS_ONE, "layers")
    assert told.verdict == "does not hold"
    assert "Theorem 4, y over 1, 2, 5: slope -2" in str(told) and "claimed -1.1 to -0.9: does not hold" in str(told)


def test_uniform_attention_over_independent_tokens_falls_with_their_number_and_over_equal_ones_does_not():

    def still(block):  # no layer gives the tokens anything in common
        block.attention.output.weight.mul_(1e-3)
        block.ffn.down.weight.mul_(1e-3)

    probed = decoder(still, n_layers=4)
    ((_, verdict, slope),) = found(theorems.by_keys, probed, integers(400, 40, 64))
    assert verdict == "holds within the interval" and slope.mean == pytest.approx(-1, abs=0.1)
    ((_, verdict, slope),) = found(
        theorems.by_keys, decoder(still, n_layers=4, sliding_window=8), integers(400, 40, 64)
    )
    assert verdict == "holds within the interval" and slope.mean == pytest.approx(-1, abs=0.1)
    ((_, verdict, slope),) = found(theorems.by_keys, probed, torch.full((40, 64), 7))
    assert verdict == "does not hold" and slope.mean == pytest.approx(0, abs=1e-3)


def test_heads_that_differ_average_out_and_copies_of_one_do_not():
    tokens = integers(400, 8, 16)
    fields = {"d_model": 64, "n_heads": 8}
    (_, verdict, slope), (_, grouped, of_groups) = found(theorems.by_heads, decoder(**fields), tokens)
    assert verdict == "holds within the interval" and slope.mean == pytest.approx(-1, abs=0.12)
    assert grouped == "does not hold" and of_groups.mean > 0.5  # the mean of different values is smaller

    def copies(block):
        for weight in (block.attention.key.weight, block.attention.value.weight):
            weight.copy_(weight[:8].repeat(8, 1))
        block.attention.output.weight.copy_(block.attention.output.weight[:, :8].repeat(1, 8))

    (_, verdict, slope), (_, grouped, of_groups) = found(theorems.by_heads, decoder(copies, **fields), tokens)
    assert verdict == "does not hold" and slope.mean == pytest.approx(0, abs=1e-4)
    assert of_groups.mean == pytest.approx(0, abs=1e-4) and (of_groups.lo <= 0 <= of_groups.hi) == (
        grouped != "does not hold"
    )


def test_experts_that_differ_average_out_and_copies_of_one_do_not():
    tokens, fields = integers(400, 4, 16), {"n_experts": 8, "top_k": 2, "d_expert": 24, "d_model": 64}

    def equal_gates(block):
        block.ffn.router.weight.zero_()

    def copies(block):
        equal_gates(block)
        for weight in (block.ffn.gate_up_E2FD, block.ffn.down_EDF):
            weight.copy_(weight[:1].expand_as(weight))

    for plant, expected in ((equal_gates, -1), (copies, 0)):
        for _, verdict, slope in found(theorems.by_experts, decoder(plant, **fields), tokens):
            assert slope.mean == pytest.approx(expected, abs=0.1 if expected else 1e-4)
            assert verdict == ("holds within the interval" if expected else "does not hold")
    assert found(theorems.by_experts, decoder(n_layers=3), tokens) == []


def growing(power):
    """x_l = l^(power / 2) x_1, so that variance grows as l^power, and the Jacobian is l^(power / 2) I."""
    factors = [1.0, *(((layer + 1) / layer) ** (power / 2) for layer in range(1, 6))]
    blocks = [lambda x, factor=factor: factor * x for factor in factors]
    return HandMadeModel(blocks, torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("power", "is_lns", "variance", "gradient"),
    [(1.0, False, True, False), (0.5, False, False, False), (1.5, True, True, True), (3.0, True, False, True)],
)
def test_growth_with_depth(power, is_lns, variance, gradient):
    checks = list(theorems.by_depth(growing(power), integers(50, 6, 7), is_lns, ""))
    assert [one.verdict == "holds within the interval" for one in checks] == [variance, gradient]
    assert [one.slope.mean for one in checks] == pytest.approx([power, power / 2], rel=0.05)


def test_all_is_asked_of_a_model_and_lns_is_put_on_and_taken_off():
    probed = decoder(n_experts=4, top_k=2, d_expert=24, depth_scale="lns")
    lines = [str(check) for check in theorems.checks_of_model(probed, integers(400, 4, 16))]
    numbers = [line[: line.index(",")].removeprefix("Theorem ") for line in lines]
    assert numbers == ["4", "5", "5", "6", "6", "3.3", "3.3", "4.3", "4.3"]
    assert "without LNS on the same weights" in lines[5] and "on the same weights" not in lines[7]
    assert probed.model.config.depth_scale == "lns"


def test_rows_of_several_seeds(tmp_path):
    """Variance l^1.2 of one scale, l^0.8 of the other, with a seed's noise: one reaches 1, one does not."""
    for seed in range(3):
        for scale, power in (("none", 0.8), ("lns", 1.2)):
            values = [(1 + 0.01 * seed) ** math.log(layer) * layer**power for layer in range(1, 7)]
            rows = [
                {"step": 9, "layer": layer, "metric": "residual_variance", "value": value, "n": 10}
                for layer, value in enumerate(values, start=1)
            ]
            make_run(tmp_path, config_of(n_layers=6, seed=seed, depth_scale=scale), {"val_loss": 2.0}, layers=rows)
    lns, none = theorems.checks_of_rows([str(tmp_path)])
    assert (lns.theorem, lns.verdict, none.theorem, none.verdict) == (
        "4.3", "holds within the interval", "3.3", "does not hold",
    )  # fmt: skip
    assert known(none.slope.mean) == pytest.approx(0.81, abs=0.01) and none.slope.n == 3
