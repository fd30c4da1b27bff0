"""Fields that a store varies by choice, and plain values."""

import numpy as np
import pandas as pd
from support.runs_frame import grid

from sparsedepth.effects.knobs import chosen_fields, keys, plain, value_order


def made(axes, **base):
    return grid(axes, lambda config: {"val_loss": 3.0}, **base)


def test_what_varies_by_choice():
    """Not how a run is logged, nor a size that follows from others, nor what tuning chose."""
    runs = made({"depth_scale": ["none", "lns"], "lr": [1e-3, 2e-3], "seed": [0, 1]})
    assert chosen_fields(runs) == ["depth_scale", "lr", "seed"]
    assert chosen_fields(runs.assign(tuned_fields="lr", tuning="best")) == ["depth_scale", "seed"]
    assert chosen_fields(made({"log_every": [1, 10], "weight_decay": [0.0, 0.1]})) == ["weight_decay"]
    assert chosen_fields(made({"d_model": [64, 128]}, n_heads=4)) == ["d_model"]
    assert chosen_fields(made({"d_model,d_ff": [(64, 100), (128, 300)]}, n_heads=4)) == ["d_model", "d_ff"]


def test_plain_values_and_keys():
    assert [plain(value) for value in (np.nan, None, pd.NA, np.int64(3), 2.0, 0.5, "a")] == [
        *(None, None, None, 3, 2, 0.5, "a"),
    ]
    assert plain("[0.1, 2]") == (0.1, 2) and plain(np.array([1.0, 2.5])) == (1, 2.5)
    runs = pd.DataFrame({"a": [1, 1, 2], "b": [None, np.nan, "x"]})
    first, second, third = keys(runs, ["a", "b"])
    assert first == second != third
    assert sorted(["b", 10, None, 2.0], key=value_order) == [2.0, 10, "b", None]
