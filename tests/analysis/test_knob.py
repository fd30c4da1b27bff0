"""The effects of one knob: the numbers that were planted, and one line where it has none."""

import knob
import pytest
from support.made_up_runs import make_run
from support.runs_frame import config_of, grid

AXES = {"n_layers": [4, 12], "n_kv_heads": [4, 1], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}


def summary(config):
    """One key/value head halves the variance and lowers the loss by 0.1 at 4 layers, 0.3 at 12. LNS does nothing."""
    is_one = config.n_kv_heads == 1
    gain = 0.1 if config.n_layers == 4 else 0.3
    noise = 1e-4 * ((7 * config.seed + config.n_kv_heads + 3 * (config.depth_scale == "lns")) % 5 - 2)
    return {
        "val_loss": 3 - gain * is_one + noise,
        "residual_variance_last": (10 + config.seed) * (0.5 if is_one else 1.0) * (1 + noise),
    }


def test_planted_effects_are_rows():
    effects = knob.effects_of_knob(grid(AXES, summary), "n_kv_heads")
    alone = effects[effects["setting"] == "n_kv_heads=1"]
    rows = [knob.row(effect) for effect in alone.to_dict("records")]
    assert [row[:3] for row in rows] == [
        ("residual_variance_last", 4, "x0.5"),
        ("residual_variance_last", 12, "x0.5"),
        ("val_loss", 4, "-0.1"),
        ("val_loss", 12, "-0.3"),
    ]
    assert {row[5:] for row in rows} == {(3, "lower", "n_kv_heads=1")}
    nothing = knob.effects_of_knob(grid(AXES, summary), "depth_scale")
    nothing = nothing[nothing["setting"] == "depth_scale=lns"]
    assert {knob.row(effect)[-2] for effect in nothing.to_dict("records")} == {"-"}


def test_a_field_that_does_not_vary_has_no_effects(tmp_path, capsys):
    with pytest.raises(ValueError, match="no two runs differ in top_k; these runs vary: depth_scale, n_kv_heads"):
        knob.effects_of_knob(grid(AXES, summary), "top_k")
    for heads in (4, 1):
        make_run(tmp_path, config_of(n_kv_heads=heads), {})
    with pytest.raises(ValueError, match="no two runs that differ in n_kv_heads have a value of"):
        knob.main([str(tmp_path), "n_kv_heads"])
    assert capsys.readouterr().out == ""
