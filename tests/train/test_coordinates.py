"""The coordinate check: by hand, flat for CompleteP and not for the standard rules, and the command that refuses."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from support.tiny_sweep import corpus, sparsedepth

from sparsedepth.config.run import RunConfig
from sparsedepth.data.sequences import Sequences, next_tokens
from sparsedepth.model.decoder import Decoder
from sparsedepth.plots.coordinates import coordinates_drawing
from sparsedepth.plots.page import write
from sparsedepth.train.coordinates import Coordinate, coordinates, sized, slopes

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "seq_len": 16, "batch_tokens": 128, "train_tokens": 1280}
COMPLETEP = {"parametrisation": "completep", "base_width": 16, "base_depth": 2}


def batch(config: RunConfig, step: int) -> Sequences:
    start = np.random.default_rng(step).integers(0, 12, (config.batch_tokens // config.seq_len, 1))
    return next_tokens((start + np.arange(config.seq_len + 1) ** 2) % 12)


def test_a_slope_is_the_power_of_the_size():
    """rms 3 size^0.5 in the last block; blocks before it do not count."""
    found = [
        Coordinate("d_model", size, seed, "update", place, 3 * size**0.5 * (1 if place == 1 else size))
        for size in (16, 32, 64) for seed in (0, 1) for place in (0.5, 1.0)
    ]  # fmt: skip
    (one,) = slopes(found)
    assert (one.axis, one.quantity, one.is_flat) == ("d_model", "update", False)
    assert one.slope == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("value", "fix"), [(0.0, "is 0 .*higher lr"), (np.nan, "is nan .*lower lr"), (np.inf, "is inf .*lower lr")]
)
def test_what_has_no_logarithm_is_refused_with_the_lr_to_try(value, fix):
    found = [Coordinate("n_layers", size, 0, "update", 1.0, value) for size in (2, 4)]
    with pytest.raises(ValueError, match=f"n_layers=2: the update {fix}"):
        slopes(found)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_without_learning_nothing_moves_and_activations_are_those_of_the_model(dropout):
    config = RunConfig(**SMALL, lr=1e-30, weight_decay=0.0, residual_dropout=dropout)
    found = [*coordinates(config, {"n_layers": [2, 3]}, batch, steps=1, n_seeds=1)]
    assert all(one.value < 1e-20 for one in found if one.quantity != "activation")
    model = Decoder(sized(config, "n_layers", 3), 0).eval()
    with torch.no_grad():
        rms = model.hidden(torch.from_numpy(batch(config, 0).inputs)).square().mean().sqrt().item()
    (last,) = [one.value for one in found if (one.size, one.quantity, one.place) == (3, "activation", 1.0)]
    assert last == pytest.approx(rms, rel=1e-5)


def test_a_width_moves_heads_of_one_size_and_the_feed_forward_part():
    wide = sized(RunConfig(**SMALL, d_ff=40), "d_model", 48)
    assert (wide.n_heads, wide.n_kv_heads, wide.d_ff) == (6, 6, 120)
    assert sized(RunConfig(**SMALL, n_experts=4, top_k=2, d_expert=8), "d_model", 48).d_expert == 24
    with pytest.raises(ValueError, match="heads of 8 channels"):
        sized(RunConfig(**SMALL), "d_model", 20)


@pytest.mark.parametrize(("rules", "flat"), [({}, False), (COMPLETEP, True)], ids=["standard", "completep"])
def test_completep_is_flat_over_width_and_depth_and_the_standard_rules_are_not(rules, flat):
    config = RunConfig(**SMALL, lr=0.01, **rules)
    found = slopes([*coordinates(config, {"d_model": [16, 64], "n_layers": [2, 8]}, batch, n_seeds=4)])
    assert {one.axis for one in found if not one.is_flat} == (set() if flat else {"d_model", "n_layers"}), found


def test_the_command_refuses_to_carry_where_it_is_not_flat(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({**SMALL, "corpus": str(corpus(tmp_path)), "lr": 0.01}))
    out, _ = sparsedepth("scaling", "check", run, "--vary", "n_layers=2,8", "--seeds", 1, code=3)
    assert "not flat (activation, update): do not carry lr over n_layers" in " ".join(out.split())


def test_the_figure_has_a_panel_for_each_size_and_quantity(tmp_path):
    found = pd.DataFrame([
        Coordinate("n_layers", size, seed, quantity, place, 1.0 + seed)
        for size in (2, 4) for seed in range(3)
        for quantity in ("activation", "update", "update of logits")
        for place in ((0.5, 1.0) if quantity != "update of logits" else (1.0,))
    ])  # fmt: skip
    write(coordinates_drawing(found, "notes"), tmp_path / "check.png")
    points = pd.read_csv(tmp_path / "check.csv")
    assert {*points["panel"]} == {"n_layers: activation", "n_layers: update", "n_layers: update of logits"}
    assert points["mean"].tolist() == pytest.approx([6 ** (1 / 3)] * len(points))  # the geometric mean of 1, 2, 3


@pytest.mark.parametrize("sizes", [{}, {"n_layers": [2]}, {"seq_len": [2, 4]}])
def test_sizes_that_cannot_be_compared_are_refused(sizes):
    with pytest.raises(ValueError, match="--vary must give two or more d_model or n_layers"):
        next(coordinates(RunConfig(**SMALL), sizes, batch))
