"""A ladder of shapes read from a folder: the best depth per width by both doors, optima of grids, what is no ladder."""

import json

import numpy as np
import pandas as pd
import pytest
from support.shape_ladders import shapes

from sparsedepth.scaling.shapes import shapes_answer
from sparsedepth.store.connection import open_store

FIELDS = {"n_layers": "n_layers", "d_model": "d_model", "train_tokens": "tokens", "val_loss": "loss"}


def imported(command, folder, frame, **fields):
    frame.to_csv(folder / "runs.csv", index=False)
    given = {"source": "planted", "tuned": fields.pop("tuned", []), "fields": FIELDS | fields}
    (folder / "map.yaml").write_text(json.dumps(given))
    command("import", folder / "runs.csv", "--map", folder / "map.yaml", "-o", folder / "results")
    return folder / "results"


def test_both_doors_give_the_planted_best_aspect(command, tmp_path):
    """Best at 0.71, 1 and 1.41 layers per 64 of width."""
    frame = shapes(np.random.default_rng(2), (-0.5, 0.0, 0.5))
    folder = imported(command, tmp_path, frame, train_flops="flops")
    out, _ = command("scaling", "depth", folder)
    assert "best aspect: 0.7" in out and "it moves with the budget" in out and "twice the layers per width" in out
    asked, _ = command("query", folder, "--ask", "depth")
    assert asked.startswith("best aspect: 0.7") and "clustered by shape" in " ".join(asked.split())
    rows = json.loads(command("query", folder, "--ask", "depth", "--format", "json")[0])
    assert rows == json.loads(command("scaling", "depth", folder, "--format", "json")[0])
    for row, truth in zip(rows, (-0.5, 0.0, 0.5), strict=True):
        assert row["lo"] < 2**truth < row["hi"] and row["is_within"]


def test_flops_that_are_not_known_are_six_per_parameter_and_token(command, tmp_path):
    frame = shapes(np.random.default_rng(2), (-0.5, 0.0, 0.5))
    frame["params"] = frame["flops"] // (6 * frame["tokens"])
    folder = imported(command, tmp_path, frame, params_total="params")
    assert "FLOPs taken as 6 x parameters x tokens" in " ".join(command("scaling", "depth", folder)[0].split())
    with open_store(folder) as store:
        found = shapes_answer(store)
    assert [one.flops for one in found.best] == pytest.approx([2e17, 8e17, 3.2e18], rel=1e-6)


def test_the_optimum_of_a_grid_of_lr_and_batch_takes_its_place(command, tmp_path):
    """A bowl about lr .003 and batch 2^18, between the values tried: its bottom is the loss of the shape."""
    frame = shapes(np.random.default_rng(2), (-0.5, 0.0, 0.5))
    grid = pd.DataFrame([(lr, 2**b) for lr in (1e-3, 2e-3, 4e-3, 8e-3) for b in (16, 17, 18, 19)], columns=["lr", "b"])
    bowl = 0.02 * np.log(grid["lr"] / 0.003) ** 2 + 0.01 * np.log(grid["b"] / 2**18) ** 2
    whole = frame.merge(grid.assign(bowl=bowl), how="cross")
    whole["loss"] += whole["bowl"]
    folder = imported(command, tmp_path, whole, train_flops="flops", lr="lr", batch_tokens="b")
    plain = tmp_path / "plain"
    plain.mkdir()
    with open_store(folder) as store, open_store(imported(command, plain, frame, train_flops="flops")) as without:
        found, wanted = shapes_answer(store), shapes_answer(without)
    assert found.n_optima == len(frame) and wanted.n_optima == 0
    assert [one.estimate for one in found.best] == pytest.approx([one.estimate for one in wanted.best], abs=1e-3)


def best_aspects(command, folder, frame, **given):
    folder.mkdir()
    with open_store(imported(command, folder, frame, train_flops="flops", **given)) as store:
        found = shapes_answer(store)
    return found, [one.estimate for one in found.best]


@pytest.mark.parametrize("lrs", [(0.003,), (0.003, 0.006)])
def test_each_shape_has_its_tuned_value_of_a_field_that_is_no_grid(command, tmp_path, lrs):
    """The best weight decay falls with depth, and a wrong one costs .3: its mean over values would tell of these."""
    frame = shapes(np.random.default_rng(2), (-0.5, 0.0, 0.5))
    grid = pd.DataFrame([(lr, decay) for lr in lrs for decay in (0.05, 0.1, 0.2)], columns=["lr", "decay"])
    whole = frame.merge(grid, how="cross")
    best = np.where(whole["n_layers"] < 12, 0.2, np.where(whole["n_layers"] < 24, 0.1, 0.05))
    whole["loss"] += 0.3 * np.log2(whole["decay"] / best).abs() + 0.1 * (whole["lr"] != 0.003)
    fields = {"lr": "lr", "weight_decay": "decay", "tuned": ["lr", "weight_decay"]}
    found, aspects = best_aspects(command, tmp_path / "whole", whole, **fields)
    wanted, truth = best_aspects(command, tmp_path / "plain", frame)
    assert aspects == pytest.approx(truth, abs=1e-6) and found.n_left_out == wanted.n_left_out == 0


def test_a_curve_in_lr_is_that_of_the_best_batch(command, tmp_path):
    """Of two batches the larger loses .2 at half of the shapes: no bottom of lr is between both."""
    frame = shapes(np.random.default_rng(2), (-0.5, 0.0, 0.5))
    grid = pd.DataFrame([(lr, 2**b) for lr in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3) for b in (16, 17)], columns=["lr", "b"])
    whole = frame.merge(grid, how="cross")
    whole["loss"] += 0.02 * np.log(whole["lr"] / 0.003) ** 2 + 0.2 * ((whole["b"] > 2**16) & (whole["n_layers"] > 10))
    found, aspects = best_aspects(command, tmp_path / "whole", whole, lr="lr", batch_tokens="b")
    _, truth = best_aspects(command, tmp_path / "plain", frame)
    assert aspects == pytest.approx(truth, abs=1e-3) and found.n_optima == len(frame)


@pytest.mark.parametrize(
    ("field", "values"), [("depth_scale", ("none", "lns")), ("tie_embeddings", (False, True)), ("n_kv_heads", (4, 1))]
)
def test_of_two_settings_with_as_many_runs_the_baseline_is_told(command, tmp_path, field, values):
    """Whatever their names; fewer heads of keys are a setting, too, and no size."""
    rng = np.random.default_rng(2)
    baseline, other = shapes(rng, (-0.5, 0.0, 0.5)), shapes(rng, (0.5, 0.5, 0.5))
    _, truth = best_aspects(command, tmp_path / "plain", baseline)
    sides = [side.assign(knob=value, heads=4) for side, value in zip((baseline, other), values, strict=True)]
    found, aspects = best_aspects(command, tmp_path / "both", pd.concat(sides), n_heads="heads", **{field: "knob"})
    assert aspects == pytest.approx(truth, abs=1e-6) and found.n_left_out == len(other)


def test_what_is_no_ladder_of_shapes_says_why(command, tmp_path):
    frame = shapes(np.random.default_rng(2), (-0.5, 0.0, 0.5))
    narrow = frame.assign(d_model=frame["n_layers"] * 64).drop_duplicates(["n_layers", "tokens"])
    folder = imported(command, tmp_path, narrow, train_flops="flops")
    assert "depth per width: not known (1 aspects" in command("scaling", "depth", folder)[0]
    rising = tmp_path / "rising"
    rising.mkdir()
    folder = imported(command, rising, frame.assign(loss=9 - frame["loss"]), train_flops="flops")
    assert "the loss does not fall with FLOPs" in command("scaling", "depth", folder)[0]
