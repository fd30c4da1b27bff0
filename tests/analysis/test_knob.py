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
    noise = 1e-3 * (config.seed - 1)
    return {
        "val_loss": 3 - gain * is_one + noise * is_one,
        "residual_variance_last": (10 + config.seed) * (0.5 if is_one else 1.0) * (1 + noise * is_one),
    }


def test_planted_effects_are_rows():
    found, effects = knob.effects_of_knob(grid(AXES, summary), "n_kv_heads")
    assert found.baseline == "n_kv_heads=4"
    rows = [knob.row(effect) for effect in effects]
    assert [row[:3] for row in rows] == [
        ("residual_variance_last", 4, "x0.5"),
        ("residual_variance_last", 12, "x0.5"),
        ("val_loss", 4, "-0.1"),
        ("val_loss", 12, "-0.3"),
    ]
    assert {row[5:] for row in rows} == {(3, "lower", "n_kv_heads=1")}
    _, nothing = knob.effects_of_knob(grid(AXES, summary), "depth_scale")
    assert {knob.row(effect)[-2] for effect in nothing} == {"-"}


def test_no_effect_is_attributed_to_one_of_the_fields_that_change_together():
    runs = grid({"weight_decay,lr": [(0.0, 1e-3), (0.3, 5e-4)], "seed": [0, 1]}, lambda config: {"val_loss": 3.0})
    with pytest.raises(ValueError, match="weight_decay and lr change only together: no effect can be attributed to lr"):
        knob.effects_of_knob(runs, "lr")


def test_a_field_that_does_not_vary_has_no_effects(tmp_path, capsys):
    with pytest.raises(ValueError, match="differ in 'top_k' alone; knobs that they vary: n_kv_heads, depth_"):
        knob.effects_of_knob(grid(AXES, summary), "top_k")
    for heads in (4, 1):
        make_run(tmp_path, config_of(n_kv_heads=heads), {})
    with pytest.raises(ValueError, match="no pair of runs that differ in n_kv_heads alone has a value of"):
        knob.main([str(tmp_path), "n_kv_heads"])
    assert capsys.readouterr().out == ""
