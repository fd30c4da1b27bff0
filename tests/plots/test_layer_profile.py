"""The numbers of a layer profile: the run, the last step, the first threshold, errors, and existing pairs."""

import numpy as np
import pandas as pd
import pytest
from frames import config_of
from synthetic import make_run

from sparsedepth import quantities
from sparsedepth.plots.layer_profile import HEAT_MAPS, PANELS, layer_profile, load_layer_profile, pairs_that_exist
from sparsedepth.plots.runs import choose_run
from sparsedepth.plots.trajectories import VECTORS
from sparsedepth.store.connection import open_store

RUN = {"run_id": "a", "weight_eps": "[0.001, 0.01]"}
NO_PAIRS = pd.DataFrame(columns=["step", "layer", "other_layer", "metric", "value"])


def layer_frame(*rows):
    return pd.DataFrame(rows, columns=["step", "layer", "metric", "value"])


def profile(one_profile, name):
    return one_profile.profiles[one_profile.profiles["name"] == name].reset_index(drop=True)


def test_every_layer_metric_is_in_the_profile_or_left_out_on_purpose():
    drawn = {name for panel in PANELS for name in panel.series}
    left_out = {quantity.name for quantity in quantities.LAYERS} - drawn
    kinds = ("query", "key", "value", "output", "gate", "up", "down")
    explained = {f"weight_sparsity{rel}_{kind}" for rel in ("", "_rel") for kind in kinds}
    errors = {f"jacobian_deviation{form}_se" for form in ("", "_averaged", "_released")}
    ends = {column.name for column in quantities.LAYERS if column.part in ("lo", "hi")}
    assert left_out == explained | errors | ends | set(VECTORS) | {"state_cosine"}  # VECTORS: a figure of their own
    assert set(HEAT_MAPS) == {quantity.name for quantity in quantities.PAIRS}


def test_the_last_step_of_each_metric():
    rows = layer_frame(
        (1, 1, "residual_variance", 5.0),
        (9, 1, "residual_variance", 6.0),
        (9, 2, "residual_variance", 7.0),
        (4, 2, "block_influence", 0.5),
    )
    one_profile = layer_profile(RUN, rows, NO_PAIRS)
    assert one_profile.n_layers == 2
    assert list(profile(one_profile, "residual_variance")["value"]) == [6.0, 7.0]
    assert list(profile(one_profile, "block_influence")["value"]) == [0.5]


@pytest.mark.parametrize(
    ("chosen", "leading"),
    [("[0.01, 0.001]", 0.01), ("[0.001, 0.01]", 0.001), (None, 0.001), (np.nan, 0.001), ("[0.5]", 0.01)],
)
def test_the_first_threshold_or_the_default_or_the_largest(chosen, leading):
    rows = layer_frame((1, 1, "weight_sparsity@0.001", 0.1), (1, 1, "weight_sparsity@0.01", 0.2))
    shown = profile(layer_profile({"run_id": "a", "weight_eps": chosen}, rows, NO_PAIRS), "weight_sparsity")
    assert shown[["threshold", "value"]].to_numpy().tolist() == [[leading, {0.001: 0.1, 0.01: 0.2}[leading]]]


def test_standard_errors_are_joined_to_their_values():
    rows = layer_frame(
        (1, 1, "jacobian_deviation", 4.0), (1, 2, "jacobian_deviation", 5.0), (1, 1, "jacobian_deviation_se", 0.5)
    )
    one_profile = layer_profile(RUN, rows, NO_PAIRS)
    assert profile(one_profile, "jacobian_deviation")["se"].fillna(-1).tolist() == [0.5, -1]
    assert set(one_profile.profiles["name"]) == {"jacobian_deviation"}


def test_null_is_missing_unless_no_value_can_exist():
    rows = layer_frame((1, 1, "causal_effect", None), (1, 2, "causal_effect", 0.5), (1, 3, "causal_effect", None))
    shown = profile(layer_profile(RUN, rows, NO_PAIRS), "causal_effect")
    assert shown["layer"].tolist() == [1, 2]  # layer 3 is the last and has no later layer
    assert shown["value"].isna().tolist() == [True, False]


def test_matrices_have_the_later_layer_as_row():
    pairs = pd.DataFrame(
        [(1, 1, 3, "causal_effect", 0.5), (1, 2, 3, "causal_effect", None), (1, 1, 2, "permutation_effect", None)],
        columns=list(NO_PAIRS),
    )
    one_profile = layer_profile(RUN, layer_frame(), pairs)
    assert one_profile.n_layers == 3
    assert list(one_profile.matrices) == ["causal_effect"]  # of the other there is no value at all
    assert one_profile.matrices["causal_effect"][3, 1] == 0.5
    assert np.isfinite(one_profile.matrices["causal_effect"]).sum() == 1


@pytest.mark.parametrize(("name", "n"), [("causal_effect", 6), ("removal_drop", 10), ("angular_distance", 10)])
def test_the_pairs_of_four_layers(name, n):
    exists = pairs_that_exist(name, 4)
    assert exists.sum() == n
    assert not np.triu(exists, 1).any()
    assert exists[:, 0].any() == (name == "angular_distance")  # the embedding's output is a state, not a block


def runs_frame(*rows):
    return pd.DataFrame(rows, columns=["run_id", "outcome", "val_loss"])


def test_the_default_run_is_the_best_of_the_deepest():
    runs = runs_frame(
        ("a", "ok", 2.0),
        ("b", "ok", 3.0),
        ("c", None, 2.5),
        ("d", "ok", None),
        ("e", "diverged", 1.0),
        ("f", "ok", 1.0),
    )
    depths = {"a": 2, "b": 4, "c": 4, "d": 4, "e": 4}  # f has no values by layer
    assert choose_run(runs, depths, None) == "c"
    assert choose_run(runs, depths, "e") == "e"
    with pytest.raises(ValueError, match="'f' has no values by layer"):
        choose_run(runs, depths, "f")
    with pytest.raises(ValueError, match="none of the 6 runs has values by layer"):
        choose_run(runs, {"e": 4}, None)


def test_an_unknown_run_is_refused_with_close_matches():
    runs = runs_frame(("abc123", "ok", 2.0), ("abd123", "ok", 2.0), ("ffffff", "ok", 2.0))
    with pytest.raises(ValueError, match=r"run 'abc124' is not in this store; .* 3 run ids: abc123, abd123"):
        choose_run(runs, {}, "abc124")


def test_from_a_store(tmp_path):
    for n_layers, loss in ((2, 1.0), (3, 2.0)):
        rows = [
            {"step": 1, "layer": layer, "metric": "block_influence", "value": layer / 8, "n": 1}
            for layer in range(1, n_layers + 1)
        ]
        make_run(tmp_path, config_of(n_layers=n_layers), {"val_loss": loss}, layers=rows)
    shallow = config_of(n_layers=2).run_id
    with open_store(tmp_path) as store:
        assert profile(load_layer_profile(store), "block_influence")["value"].tolist() == [1 / 8, 2 / 8, 3 / 8]
        assert load_layer_profile(store, shallow).n_layers == 2
        with pytest.raises(ValueError, match=f"nearest of its 2 run ids: {shallow}"):
            load_layer_profile(store, shallow[:-1] + "x")
