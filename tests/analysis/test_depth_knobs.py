"""LNS beside other remedies: effects at each side's own lr, variance at equal lr, nothing where nothing is crossed."""

import math

import depth_knobs
import pytest
from support.runs_frame import grid


def summary(config):
    """LNS halves the variance at any lr; its effect on the loss is -0.2 alone and 0 with Muon."""
    is_lns, is_muon = config.depth_scale == "lns", config.optimizer == "muon"
    loss = 1.0 + 0.1 * config.seed - 0.2 * (is_lns and not is_muon) - 0.5 * is_muon
    variance = 100 * config.lr * (0.5 if is_lns else 1.0) * math.exp(config.seed)
    return {"val_loss": loss, "needed_layers": 8.0, "residual_variance_last": variance}


AXES = {"depth_scale": ["none", "lns"], "seed": [0, 1, 2]}


def test_effects_and_ratios_are_those_that_were_planted():
    table = depth_knobs.crossed(grid({**AXES, "optimizer": ["adamw", "muon"], "n_layers": [4, 12]}, summary))
    assert table["beside"].tolist() == ["optimizer=muon", "nothing"] * 2
    assert table["n_layers"].tolist() == [4, 4, 12, 12]
    assert table["effect"].tolist() == pytest.approx([0.0, -0.2] * 2, abs=1e-12)
    assert table["variance_ratio"].tolist() == pytest.approx([0.5] * 4)
    assert set(table["pairs_of_equal_lr"]) == {3}
    assert table["loss"].tolist() == pytest.approx([0.6, 1.1] * 2)


def test_a_remedy_without_lns_has_no_line_and_a_sweep_without_lns_no_table():
    runs = grid({**AXES, "optimizer": ["adamw", "muon"]}, summary)
    left = runs[(runs["optimizer"] == "adamw") | (runs["depth_scale"] == "none")]
    assert depth_knobs.crossed(left)["beside"].tolist() == ["nothing"]
    assert depth_knobs.crossed(runs[runs["depth_scale"] == "none"]) is None
