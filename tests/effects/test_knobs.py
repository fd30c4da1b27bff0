"""What counts as one choice: fields that follow, fields that move together, fields that cannot be told apart."""

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import config_of, grid, runs_frame

from sparsedepth.effects.knobs import (
    changed,
    depth_knob,
    find_knob,
    find_knobs,
    joint_knob,
    keys,
    labels,
    plain,
)


def made(axes, **base):
    return grid(axes, lambda config: {"val_loss": 1.0}, **base)


def variants(*cells):
    return runs_frame((config_of(**cell), {"val_loss": 1.0}) for cell in cells)


def test_crossed_fields_are_knobs_of_their_own():
    runs = made({"n_layers": [12, 24], "weight_decay": [0.1, 0.0], "depth_scale": ["none", "lns"], "seed": [0, 1]})
    assert {knob.name: knob.fields for knob in find_knobs(runs)} == {
        "weight_decay": ("weight_decay",),
        "depth_scale": ("depth_scale",),
    }


def test_the_baseline_is_the_least_sparse_setting():
    runs = made(
        {"weight_decay": [0.3, 0.0], "seq_len": [512, 256], "n_kv_heads": [1, 4, 2], "init": ["scaled", "normal"]}
    )
    settings = {knob.name: list(knob.settings) for knob in find_knobs(runs)}
    assert settings == {
        "weight_decay": ["weight_decay=0", "weight_decay=0.3"],
        "seq_len": ["seq_len=256", "seq_len=512"],
        "n_kv_heads": ["n_kv_heads=4", "n_kv_heads=2", "n_kv_heads=1"],
        "init": ["init=normal", "init=scaled"],
    }


def test_experts_are_one_knob_ordered_by_the_share_in_use():
    runs = made({"n_experts,top_k": [(16, 2), (0, None), (8, 2)]})
    (knob,) = find_knobs(runs)
    assert (knob.name, knob.fields, knob.is_pure) == ("n_experts", ("n_experts", "top_k"), True)
    assert list(knob.settings) == ["n_experts=0", "n_experts=8, top_k=2", "n_experts=16, top_k=2"]
    assert knob.settings["n_experts=0"] == {"n_experts": 0, "top_k": None}


def test_what_only_experts_have_belongs_to_their_choice():
    routed = {"n_experts": 8, "top_k": 2, "d_expert": 80}
    (knob,) = find_knobs(variants({}, {**routed, "n_shared_experts": 1, "n_dense_layers": 1}))
    assert (knob.name, knob.is_pure) == ("n_experts", True)
    assert set(knob.fields) == {"n_experts", "top_k", "d_expert", "n_shared_experts", "n_dense_layers"}
    (knob,) = find_knobs(variants(*({**routed, "n_shared_experts": n} for n in (0, 1))))
    assert knob.fields == ("n_shared_experts",)


def test_sizes_that_follow_are_no_choice():
    """d_ff and n_kv_heads are RunConfig's own values at every width, so the width is the only knob."""
    (knob,) = find_knobs(made({"d_model,n_heads": [(64, 4), (128, 8)]}))
    assert set(knob.fields) == {"d_model", "n_heads"}
    (chosen,) = find_knobs(made({"d_model,d_ff": [(64, 176), (128, 352)]}))  # 352 is not the default of 128 (344)
    assert set(chosen.fields) == {"d_model", "d_ff"}


def test_a_field_that_another_determines_belongs_to_its_knob():
    """lr was lowered with the strongest decay only: there the two cannot be told apart."""
    cells = [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"weight_decay": 1.0, "lr": 3e-4}]
    (knob,) = find_knobs(variants(*cells))
    assert (knob.name, knob.fields, knob.is_pure) == ("weight_decay", ("weight_decay", "lr"), False)
    assert knob.baseline == "weight_decay=0, lr=0.001"


def test_one_change_at_a_time_and_ladders_keep_their_knobs_apart():
    ladder = [{}, {"weight_decay": 0.3}, {"weight_decay": 0.3, "n_kv_heads": 1}]
    assert {knob.name for knob in find_knobs(variants(*ladder))} == {"weight_decay", "n_kv_heads"}


def test_depth_takes_what_it_determines():
    runs = made({"n_layers,lr": [(12, 1e-3), (24, 7e-4)], "seed": [0, 1]})
    depth = depth_knob(runs)
    assert depth is not None and depth.fields == ("n_layers", "lr")
    assert find_knobs(runs) == []
    assert depth_knob(made({"seed": [0, 1]})) is None


def test_how_a_run_is_measured_or_logged_is_no_knob():
    assert find_knobs(made({"val_tokens": [1000, 2000], "log_every": [5, 10]})) == []


def test_a_baseline_can_be_asked_for():
    runs = made({"weight_decay": [0.0, 0.1, 0.3]})
    (knob,) = find_knobs(runs, {"weight_decay": 0.1})
    assert list(knob.settings) == ["weight_decay=0.1", "weight_decay=0", "weight_decay=0.3"]
    with pytest.raises(ValueError, match=r"weight_decay=0\.2; the runs have: 0, 0\.1, 0\.3"):
        find_knobs(runs, {"weight_decay": 0.2})
    with pytest.raises(ValueError, match="lr=1"):
        find_knobs(runs, {"lr": 1.0})


def test_labels_and_changes_of_each_run():
    runs = variants({}, {"weight_decay": 0.3}, {"n_kv_heads": 1, "weight_decay": 0.3}, {"n_kv_heads": 1})
    knobs = find_knobs(runs)
    changes = changed(runs, knobs)
    assert list(changes.map(tuple)) == [(), ("weight_decay",), ("weight_decay", "n_kv_heads"), ("n_kv_heads",)]
    assert changes.iloc[1] == {"weight_decay": "weight_decay=0.3"}
    decay = find_knob(runs, "weight_decay")
    assert decay is not None
    assert list(labels(runs, decay)) == ["weight_decay=0.1", "weight_decay=0.3", "weight_decay=0.3", "weight_decay=0.1"]
    assert find_knob(runs, "lr") is None


def test_a_joint_knob_has_the_combinations_that_were_run():
    runs = variants({}, {"weight_decay": 0.3}, {"n_kv_heads": 1, "weight_decay": 0.3})
    both = joint_knob(runs, find_knobs(runs), {"weight_decay": 0.3, "n_kv_heads": 4})
    assert next(iter(both.settings)) == "weight_decay=0.3, n_kv_heads=4"
    assert set(both.settings) == {
        "weight_decay=0.3, n_kv_heads=4",
        "weight_decay=0.1, n_kv_heads=4",
        "weight_decay=0.3, n_kv_heads=1",
    }
    with pytest.raises(ValueError, match=r"no run has weight_decay=0\.1, n_kv_heads=1"):
        joint_knob(runs, find_knobs(runs), {"weight_decay": 0.1, "n_kv_heads": 1})


def test_plain_values_and_keys():
    assert [plain(value) for value in (np.nan, None, pd.NA, np.int64(3), 2.0, 0.5, "a")] == [
        None,
        None,
        None,
        3,
        2,
        0.5,
        "a",
    ]
    assert plain("[0.1, 2]") == (0.1, 2)
    assert plain(np.array([1.0, 2.5])) == (1, 2.5)
    frame = pd.DataFrame({"a": [1.0, np.nan, 1.0], "b": ["x", "y", "x"]})
    first, second, third = keys(frame, ["a", "b"])
    assert first == third != second
