"""Points from a CSV or a folder: what is read, what is left out, and what is refused by name."""

import pytest
from support.depth_law_points import grid, planted
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.scaling.points import COLUMNS, exclude_highest, other_differences, read_points


def write(folder, points, name="points.csv"):
    path = folder / name
    points.to_csv(path, index=False)
    return path


def test_a_csv_comes_back(tmp_path):
    points = planted(grid(), noise=0.01)
    back = read_points(write(tmp_path, points.assign(FLOP=1.0)))
    assert list(back.columns) == list(COLUMNS)
    assert back["loss"].to_numpy() == pytest.approx(points["loss"].to_numpy(), abs=0)


def test_the_size_may_be_missing_and_nothing_else(tmp_path):
    assert read_points(write(tmp_path, planted(grid()).drop(columns="model_size")))["model_size"].isna().all()
    points = planted(grid())
    some = read_points(write(tmp_path, points.assign(model_size=points["model_size"].where(points["n_layers"] > 12))))
    assert 0 < some["model_size"].isna().sum() < len(some)
    with pytest.raises(ValueError, match=r"has no column n_layers; its columns are d_model"):
        read_points(write(tmp_path, planted(grid()).drop(columns="n_layers")))


def test_a_cluster_may_be_named_na_and_a_size_is_missing_as_na(tmp_path):
    table = tmp_path / "points.csv"
    rows = ("8,2,10,3,NA,NA", "8,2,20,2,NA,None", "8,4,20,2.5,NA,NA", "8,4,30,2,NA,")
    table.write_text("\n".join(("d_model,n_layers,num_tokens,loss,model_size,run", *rows)))
    points = read_points(table, cluster="run")
    assert points["cluster"].tolist() == ["NA", "None", "NA", "row 4"] and points["model_size"].isna().all()


@pytest.mark.parametrize("bad", [-1.0, 0.0, None, float("inf"), "many"])
def test_a_value_that_is_no_positive_number_is_named_with_its_row(tmp_path, bad):
    points = planted(grid()).astype({"loss": object})
    points.loc[6, "loss"] = bad
    with pytest.raises(ValueError, match=r"loss is .* in row 7 .line 8., the first of 1 such of 80; a positive number"):
        read_points(write(tmp_path, points))


def test_what_is_no_table_of_points_is_refused(tmp_path):
    (tmp_path / "ragged.csv").write_text("n_layers,loss\n4,3\n4,3,2,1\n")
    for path, words in (
        (tmp_path / "none.csv", "does not exist"),
        (tmp_path / "ragged.csv", "has no column num_tokens, d_model; its columns are n_layers, loss"),
        (write(tmp_path, grid()[:0]), "holds no points"),
    ):
        with pytest.raises(ValueError, match=words):
            read_points(path)
    with pytest.raises(ValueError, match="is not a results folder"):
        read_points(write(tmp_path, grid()), where="seed = 0")


def test_the_highest_losses_and_their_ties_go():
    points = grid()[:6].assign(loss=[1.0, 5.0, 4.0, 4.0, 2.0, 3.0])
    assert list(exclude_highest(points, 1)["loss"]) == [1.0, 4.0, 4.0, 2.0, 3.0]
    assert list(exclude_highest(points, 2)["loss"]) == [1.0, 2.0, 3.0]  # the second and third highest are equal
    assert exclude_highest(points, 0) is points
    for tied, n_excluded in ((points, 6), (points.assign(loss=3.0), 1)):
        with pytest.raises(ValueError, match=f"cannot exclude the {n_excluded} highest of 6 losses and their ties"):
            exclude_highest(tied, n_excluded)


def test_shared_keys_are_no_size(tmp_path):
    """n_kv_heads may follow n_heads; its ratio to n_heads is a knob, which the law ignores."""
    for n_heads, n_kv_heads in ((2, 2), (4, 4)):
        config = config_of(n_heads=n_heads, n_kv_heads=n_kv_heads)
        make_run(tmp_path, config, {"val_loss": 3.0, "outcome": "ok"})
    assert other_differences(tmp_path) == []
    make_run(tmp_path, config_of(n_heads=4, n_kv_heads=1), {"val_loss": 3.0, "outcome": "ok"})
    assert other_differences(tmp_path) == ["n_kv_heads"]


def test_branches_of_a_trunk_are_one_run(tmp_path):
    for seed in (0, 1):
        for tokens in (81920, 163840):
            config = config_of(schedule="wsd", warmup_tokens=8192, train_tokens=tokens, seed=seed)
            make_run(tmp_path, config, {"val_loss": 3.0, "tokens_trained": tokens, "params_total": 5000})
    points = read_points(tmp_path)
    assert sorted(points.groupby("cluster")["num_tokens"].agg(list).map(sorted)) == [[81920, 163840]] * 2


def test_a_folder_gives_its_finished_trained_runs(tmp_path):
    for n_layers, outcome in ((2, "ok"), (4, "ok"), (8, "diverged")):
        for scale in ("none", "lns"):
            config = config_of(n_layers=n_layers, depth_scale=scale)
            summary = {"val_loss": 3.0 - n_layers / 10, "tokens_trained": 1000, "params_total": 5000}
            make_run(tmp_path, config, {**summary, "outcome": outcome})
    points = read_points(tmp_path)
    assert sorted(points["n_layers"]) == [2, 2, 4, 4]
    assert set(points["num_tokens"]) == {1000} and set(points["model_size"]) == {5000}
    assert other_differences(tmp_path) == ["depth_scale"]
    assert other_differences(tmp_path, "depth_scale = 'lns'") == []
    assert len(read_points(tmp_path, "depth_scale = 'lns'")) == 2
    with pytest.raises(ValueError, match="holds no trained run that meets 'n_layers = 8'"):
        read_points(tmp_path, "n_layers = 8")
    with pytest.raises(ValueError, match=r"where 'false\) OR \(true': syntax error"):
        read_points(tmp_path, "false) OR (true")
