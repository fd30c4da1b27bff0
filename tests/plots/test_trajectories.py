"""The trajectories figure: numbers of the rows, each half alone, an error if there is nothing to draw; the law."""

import math

import numpy as np
import pandas as pd
import pytest
from support.labelled_runs import labelled_grid as grid
from support.made_up_runs import make_run
from support.runs_frame import config_of

from sparsedepth.plots.draw import draw
from sparsedepth.plots.trajectories import angles_by_depth, load_trajectories, page_of_trajectories, turn_law
from sparsedepth.store.connection import open_store

MEAN = {4: [1.5, 0.4, 0.2, 1.5], 8: [1.5, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 1.5]}


def layers_of(n_layers):
    values = {
        "trajectory_mean": MEAN[n_layers],
        "trajectory_pc1": [0.0, 1.0] + [0.0] * (n_layers - 2),
        "trajectory_pc2": [0.0, 0.0, 1.0] + [0.0] * (n_layers - 3),
        "early_stop_ideal": [math.pi / 2, 0.3] + [0.0] * (n_layers - 3) + [math.pi / 2],
        "even_ideal": [math.pi / 2] + [0.3] * (n_layers - 2) + [math.pi / 2],
    }
    for metric, by_layer in values.items():
        for layer, value in enumerate(by_layer, start=1):
            yield {"step": 5, "layer": layer, "metric": metric, "value": value, "n": 10}


def tokens_of(n):
    for i in range(n):
        places = {"step": 5, "sequence": 0, "position": i, "token_id": i % 7, "document_position": None}
        nearest = ("even", "early stop", "neither")[i % 3]
        yield {**places, "nearest": nearest, "to_early_stop": 0.5, "to_even": 0.5, "pc1": 0.01 * i, "pc2": -0.01 * i}


def fill(results, depths=(4, 8), with_tokens=True, angle: float | None = 2.0):
    shares = {"early_stop_share": 0.25, "even_share": 0.5, "trajectory_pc1_share": 0.6, "trajectory_pc2_share": 0.2}
    for seed in (0, 1):
        for n_layers in depths:
            summary = {"val_loss": 3.0 + 0.1 * seed, "angular_distance_middle": angle and angle / n_layers}
            make_run(
                results,
                config_of(n_layers=n_layers, seed=seed),
                summary | (shares if with_tokens else {}),
                layers=layers_of(n_layers) if with_tokens else (),
                tokens=tokens_of(30) if with_tokens else (),
            )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    fill(results)
    with open_store(results) as opened:
        yield opened


def test_the_numbers_of_the_best_deepest_run(store):
    loaded = load_trajectories(store)
    assert loaded.run is not None
    assert loaded.run.run_id == config_of(n_layers=8, seed=0).run_id
    assert loaded.run.vectors["trajectory_mean"].tolist() == MEAN[8]
    assert loaded.run.ideals["even"] == pytest.approx((0.1, 0.1))  # 0.3 - 0.2 in layers 2 and 3
    assert loaded.run.ideals["early stop"] == pytest.approx((0.1, -0.2))
    assert loaded.run.shares["neither"] == pytest.approx(0.25)
    assert loaded.laws["baseline"].b == pytest.approx(1)
    other = config_of(n_layers=4, seed=1).run_id
    chosen = load_trajectories(store, other).run
    assert chosen is not None and chosen.run_id == other and len(chosen.vectors) == 4


def test_it_is_drawn_with_its_numbers_and_the_same_twice(store, tmp_path):
    for name in ("a", "b"):
        draw(store, "trajectories", tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    for wanted in ("pc1 (rad), 60% of variance", "early stop: 25.0%", "b\u00a0=\u00a01.00", "n_layers"):
        assert wanted in text, wanted
    data = pd.read_csv(tmp_path / "a.csv")
    assert data.groupby("panel").size().to_dict() == {"layers": 24, "tokens": 30, "ideals": 2, "depth": 4, "fit": 2}
    fit = data[data["panel"] == "fit"]
    assert np.allclose(fit["y"], 2 / fit["x"])


@pytest.mark.parametrize(
    ("fields", "panels"),
    [({"depths": (8,)}, {"layers", "tokens", "ideals"}), ({"with_tokens": False}, {"depth", "fit"})],
)
def test_each_half_can_be_drawn_alone(tmp_path, fields, panels):
    fill(tmp_path, **fields)
    with open_store(tmp_path) as store:
        draw(store, "trajectories", tmp_path / "a.png")
    assert set(pd.read_csv(tmp_path / "a.csv")["panel"]) == panels


def test_nothing_to_draw_is_an_error(tmp_path):
    fill(tmp_path, with_tokens=False, angle=None)
    with open_store(tmp_path) as store:
        with pytest.raises(ValueError, match="measure 'trajectories', or 'geometry' at two depths"):
            draw(store, "trajectories", tmp_path / "a.png")
        with pytest.raises(ValueError, match="has no values by layer"):
            draw(store, "trajectories", tmp_path / "a.png", run=config_of(n_layers=4, seed=0).run_id)
    assert not list(tmp_path.glob("a.*"))


def test_a_setting_with_an_angle_at_one_depth_has_no_line_and_no_points(tmp_path):
    """A model of two layers has no middle ones."""
    for n_layers, angle in ((2, {}), (8, {"angular_distance_middle": 0.2})):
        make_run(tmp_path, config_of(n_layers=n_layers), {"val_loss": 3.0, **angle})
    with open_store(tmp_path) as store, pytest.raises(ValueError, match="'geometry' at two depths"):
        load_trajectories(store)


def test_lines_are_named_by_their_settings(tmp_path):
    """Not by every field that two folders differ in."""
    for folder, fields in (("a", {}), ("b", {"depth_scale": "lns", "batch_tokens": 16384})):
        for n_layers in (4, 8):
            config = config_of(n_layers=n_layers, **fields)
            make_run(tmp_path / folder, config, {"val_loss": 3.0, "angular_distance_middle": 2 / n_layers})
    with open_store(tmp_path / "a", tmp_path / "b") as store:
        loaded = load_trajectories(store)
        assert {*loaded.laws} == {*loaded.angles["setting"]} == {"baseline", "depth_scale=lns, batch_tokens=16384"}
        (axis,) = page_of_trajectories(loaded).axes
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert [label.partition(":")[0] for label in labels] == ["baseline", "depth_scale=lns, batch_tokens=16384"]


def test_the_exponent_and_its_interval_by_hand():
    """log2 angle at log2 L = 1, 2, 3: 0, -1, -2.3 and the same 0.1 higher."""
    runs = grid({"n_layers": [2, 4, 8], "seed": [0, 1]}, lambda config: {"val_loss": 3.0})
    at = {(2, 0): 0.0, (4, 0): -1.0, (8, 0): -2.3, (2, 1): 0.1, (4, 1): -0.9, (8, 1): -2.2}
    angles = [math.exp(math.log(2) * at[n, s]) for n, s in zip(runs["n_layers"], runs["seed"], strict=True)]
    law = turn_law(angles_by_depth(runs.assign(angular_distance_middle=angles)))
    assert law is not None and law.lo is not None
    assert law.b == pytest.approx(1.15)
    # Sxx = 4 (in log2); the means lie -1/20, 1/10, -1/20 off the line: s^2 = 0.015 with one degree of freedom
    assert law.b - law.lo == pytest.approx(12.7062 * math.sqrt(0.015 / 2), rel=1e-4)
    assert law(np.array([4.0]))[0] == pytest.approx(2**-1.05)  # the mean, at the middle


def test_the_interval_covers_as_often_as_it_says():
    rng, covered = np.random.default_rng(0), 0
    known = {"val_loss": 3.0, "angular_distance_middle": 0.2}
    runs = angles_by_depth(grid({"n_layers": [6, 12, 24, 48], "seed": [0, 1, 2]}, lambda config: known))
    for _ in range(200):
        noisy = runs.assign(angular_distance_middle=5 / runs["n_layers"] * np.exp(rng.normal(0, 0.1, len(runs))))
        law = turn_law(noisy)
        assert law is not None and law.lo is not None and law.hi is not None
        covered += law.lo <= 1 <= law.hi
    assert 0.90 <= covered / 200 <= 0.99


def test_only_finished_trained_runs_have_an_angle():
    runs = grid({"n_layers": [6, 12, 24], "seed": [0, 1]}, lambda c: {"val_loss": 3.0, "angular_distance_middle": 0.2})
    runs.loc[runs["n_layers"] == 24, "outcome"] = "diverged"
    assert set(angles_by_depth(runs)["n_layers"]) == {6, 12}
    assert angles_by_depth(runs[runs["n_layers"] == 6]).empty
    assert angles_by_depth(runs.assign(model="hub:somebody/model")).empty
