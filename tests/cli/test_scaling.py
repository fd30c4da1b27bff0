"""`sparsedepth scaling` as a user meets it."""

import csv
import io
import json

import pytest
from support.depth_law_points import grid, planted
from support.made_up_runs import make_run
from support.runs_frame import config_of
from support.tiny_sweep import sparsedepth

import sparsedepth as sd


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    path = tmp_path_factory.mktemp("points") / "points.csv"
    planted(grid(), noise=0.003).to_csv(path, index=False)
    return path


def test_fit_prints_the_law_with_every_interval(points):
    out, _ = sparsedepth("scaling", "fit", points, "--bootstrap", 100, "--exclude-highest", 5)
    assert out.startswith("L = c_m m^-a_m + c_l l^-a_l + c_D D^-a_D + E   [m: d_model, l: n_layers x 100, D: million")
    for said in ("75 points of", "starts reached it", "stderr", "bootstrap_hi"):
        assert said in out, said
    assert "correlation of log width and log depth: " in out
    assert "bootstrap over points: 100 refits" in out


def test_fit_for_programs(points):
    options = ("--bootstrap", 0, "--fix", "a_l=1", "--without", "data")
    found = json.loads(sparsedepth("scaling", "fit", points, *options, "--format", "json")[0])
    assert found["law"] == "L = c_m m^-a_m + c_l l^-a_l + E, with a_l = 1"
    values = {one["name"]: one for one in found["parameters"]}
    assert values["a_l"]["value"] == 1 and values["a_l"]["stderr"] is None
    assert values["a_m"]["lo"] < values["a_m"]["value"] < values["a_m"]["hi"]
    assert found["convergence"]["n_reached"] > 1
    out, err = sparsedepth("scaling", "fit", points, *options, "--format", "csv")
    assert next(csv.DictReader(io.StringIO(out)))["name"] == "c_m"
    assert "80 points" in err


def test_the_law_as_a_frame_has_a_row_for_each_parameter(points):
    found = sd.scaling(points, bootstrap=0)
    frame = found.frame().set_index("name")
    assert frame.loc["E", "value"] == found.fit.parameters["E"].value and set(frame.index) == set(found.fit.parameters)


def test_scaling_plot_writes_a_figure_and_its_data(points, tmp_path):
    out, _ = sparsedepth("scaling", "plot", points, "-o", tmp_path / "law.png", "--bootstrap", 50)
    assert (tmp_path / "law.png").stat().st_size > 20_000 and "law.csv" in out


def test_a_folder_of_runs_is_a_source(tmp_path):
    for n_layers in (2, 4, 8, 16):
        for scale in ("none", "lns"):
            summary = {"val_loss": 2 + 1 / n_layers, "tokens_trained": 1000, "params_total": 5000}
            make_run(tmp_path, config_of(n_layers=n_layers, depth_scale=scale), summary)
    out, _ = sparsedepth("scaling", "fit", tmp_path, "--bootstrap", 0)
    assert out.startswith("L = c_l l^-a_l + E")
    assert "warning: d_model is " in out and "all 8 points: the width term cannot be distinguished from E" in out
    assert "warning: runs also differ in depth_scale" in out
    out, _ = sparsedepth("scaling", "fit", tmp_path, "--bootstrap", 0, "--where", "depth_scale = 'lns'")
    assert "4 points" in out and "depth_scale" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fix", "a_l"], "--fix 'a_l' must be an exponent and its value"),
        (["--without", "height"], "--without 'height' is not a term"),
    ],
)
def test_a_mistake_is_one_line(points, options, message):
    _, err = sparsedepth("scaling", "fit", points, *options, code=2)
    assert err.startswith("sparsedepth: error: ") and err.count("\n") == 1 and message in err
