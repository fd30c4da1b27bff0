"""Lines by setting: means over seeds at two depths, the last step, tokens during training; by layer, one per depth."""

from pathlib import Path

import pandas as pd
import pytest
from support import report_pages
from support.made_up_runs import make_run
from support.runs_frame import config_of, labelled_grid

from sparsedepth.plots.by_setting import by_depth, by_setting, variance
from sparsedepth.plots.draw import FIGURES
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.plots.runs import cells_of_store, compared_runs
from sparsedepth.store.connection import open_store
from sparsedepth.store.tuning_roles import result_rows
from sparsedepth.words.captions import to_measure

AXES = {"n_layers": [2, 4, 8], "depth_scale": ["none", "lns"], "seed": [0, 1, 2]}


@pytest.fixture(scope="module")
def runs():
    return labelled_grid(AXES, lambda config: {"val_loss": 3.0}, batch_tokens=1024)


def rows_of(runs, metric="residual_variance"):
    """2^(layer + seed), a tenth of it with LNS."""
    found = [
        (run.run_id, metric, layer, 2.0 ** (layer + run.seed) / (10 if run.depth_scale == "lns" else 1))
        for run in runs.itertuples()
        for layer in range(1, run.n_layers + 1)
    ]
    return pd.DataFrame(found, columns=["run_id", "metric", "x", "value"])


def test_geometric_means_over_seeds_at_the_shallowest_and_deepest_depth(runs):
    drawing = by_setting(runs, rows_of(runs))
    points, page = drawing.data, drawing.page()
    assert set(points["n_layers"]) == {2, 8} and "Not drawn: 4 layers." in caption(page)
    top = points[(points["n_layers"] == 8) & (points["x"] == 8)].set_index("setting")
    assert top.loc["baseline", ["mean", "n_seeds"]].tolist() == pytest.approx([512, 3])
    assert top.loc["depth_scale=lns", "mean"] == pytest.approx(51.2) and (top["lo"] < top["mean"]).all()
    assert [axis.get_title() for axis in page.axes] == ["8 layers", "2 layers"]
    assert [len(axis.get_lines()) for axis in page.axes] == [2, 2] and page.axes[0].get_yscale() == "log"


def test_of_several_budgets_the_one_that_effects_compare_is_drawn_under_the_settings_own_name():
    """Branches, at FLOPs equal across depths: other train_tokens at each depth and setting."""
    folders = [Path(__file__).parents[2] / "results" / name for name in ("text_flops", "text_flops_heads")]
    with open_store(*folders) as store:
        runs = compared_runs(store)
        compared = result_rows(cells_of_store(store).rows)
        points = FIGURES["depth"].drawing(store).data
    assert {*runs["run_id"]} == {*compared["run_id"]} and {*runs["setting"]} == {"baseline", "n_kv_heads=1"}
    assert runs.groupby("n_layers")["train_flops"].agg(lambda flops: flops.max() / flops.min() < 1.01).all()
    losses = points[points["panel"] == "val_loss"]
    assert losses["x"].tolist() == [6, 12, 24] and losses["setting"].unique().tolist() == ["baseline"]


def test_the_shallow_depth_is_one_that_compares_settings(runs):
    compared = runs[(runs["n_layers"] > 2) | (runs["setting"] == "baseline")]
    assert set(by_setting(compared, rows_of(compared)).data["n_layers"]) == {4, 8}


def test_each_line_names_its_lr_if_tuning_chose_different_ones(runs):
    page = by_setting(runs.assign(lr=0.003), rows_of(runs)).page()
    assert "lr is 0.003 throughout" in page.get_supxlabel() and "lr" not in legend_of(page)
    tuned = runs.assign(lr=[0.001 if scale == "lns" else 0.003 for scale in runs["depth_scale"]])
    page = by_setting(tuned, rows_of(runs)).page()
    assert legend_of(page) == ["baseline, lr 0.003", "depth_scale=lns, lr 0.001"]
    assert "which also changes residual variance" in caption(page)


def caption(page):
    return " ".join(page.get_supxlabel().split())


def legend_of(page):
    return [text.get_text().replace("\u00a0", " ") for legend in page.legends for text in legend.get_texts()]


def test_a_lone_setting_has_its_name_and_a_lone_baseline_none(runs):
    for setting, legend in (("depth_scale=lns", ["depth_scale=lns"]), ("baseline", [])):
        alone = runs[runs["setting"] == setting]
        page = by_setting(alone, rows_of(alone)).page()
        assert (legend_of(page) if page.legends else []) == legend


def test_of_many_settings_those_of_the_fewest_fields_are_drawn():
    axes = {"weight_decay": [0.0, 0.1, 0.3], "n_kv_heads": [4, 1], "depth_scale": ["none", "lns"]}
    runs = labelled_grid(axes, lambda config: {"val_loss": 3.0}, n_layers=2)
    drawing = by_setting(runs, rows_of(runs))
    assert all(name.count(",") == 0 for name in set(drawing.data["setting"]))
    assert "Not shown: 7 further settings" in caption(drawing.page())


def test_the_axis_of_the_loss_is_that_of_late_training(runs):
    """It falls from 6 to 2.5 at once, and from there to 2."""
    fall = [(100.0 * i, 2.5 - 0.05 * i if i else 6.0) for i in range(11)]
    curve = [(run, "train_loss", *point) for run in runs["run_id"] for point in fall]
    page = by_setting(runs, pd.DataFrame(curve, columns=["run_id", "metric", "x", "value"])).page()
    low, high = page.axes[0].get_ylim()
    assert 1.9 < low < 2 and 2.4 <= high < 2.5


def values_of(runs):
    rows = [
        (run.run_id, 20, layer, metric, None if metric == "causal_effect" and layer == run.n_layers else 1.0 + layer)
        for run in runs.itertuples()
        for metric in ("residual_variance", "causal_effect")
        for layer in range(1, run.n_layers + 1)
    ]
    return pd.DataFrame(rows, columns=["run_id", "step", "layer", "metric", "value"]).dropna()


def test_nothing_by_layer_to_draw_is_told_with_its_reason(runs):
    none = values_of(runs).iloc[:0]
    with pytest.raises(NothingToDraw, match=r"^no finished run has residual_variance or "):
        by_depth(runs, none, "")
    with pytest.raises(NothingToDraw, match=r"^Degenerate, so not drawn: "):
        by_depth(runs, none, " Degenerate, so not drawn: causal_effect (why).")


def test_by_layer_has_a_line_per_depth_at_the_baseline(runs):
    drawing = by_depth(runs, values_of(runs), "")
    points, page = drawing.data, drawing.page()
    variance = points[(points["panel"] == "residual_variance") & (points["n_layers"] == 4)]
    assert variance[["layer", "x", "n_seeds"]].to_numpy().tolist() == [[i, i / 4, 3] for i in range(1, 5)]
    assert variance["mean"].tolist() == pytest.approx([2, 3, 4, 5])
    effect = points[(points["panel"] == "causal_effect") & (points["n_layers"] == 4)]
    assert effect["layer"].tolist() == [1, 2, 3]  # the last layer has no later one
    assert len(page.axes) == 2 and legend_of(page) == ["2 layers", "4 layers", "8 layers"]
    without = runs[(runs["setting"] != "baseline") | (runs["n_layers"] < 8)]  # the baseline was not run at 8
    assert set(by_depth(without, values_of(without), "").data["n_layers"]) == {2, 4, 8}
    best = by_depth(runs.assign(val_loss=range(len(runs), 0, -1)), values_of(runs), "", is_search=True).data
    assert set(best["n_seeds"]) == {1}


def test_figures_of_a_store_and_what_is_missing(tmp_path):
    layers = [
        {"step": step, "layer": layer, "metric": "residual_variance", "value": float(layer * (1 + step)), "n": 10}
        for step in (0, 10)
        for layer in (1, 2)
    ]
    curves = [{"step": step, "tokens": 512 * step, "train_loss": 3.0 - 0.1 * step} for step in range(1, 11)]
    make_run(tmp_path, config_of(n_layers=2, batch_tokens=512), {"val_loss": 3.0}, layers=layers, curves=curves)
    untrained = [row for row in layers if row["step"] == 0]
    make_run(tmp_path / "other", config_of(n_layers=2, batch_tokens=512), {"val_loss": 3.0}, layers=untrained)
    with open_store(tmp_path / "other") as store, pytest.raises(NothingToDraw, match="add to measures: variance"):
        FIGURES["variance"].drawing(store)  # values of the untrained model are not those of the trained one
    with open_store(tmp_path) as store:
        variance = FIGURES["variance"].drawing(store).data
        last = variance[variance["metric"] == "residual_variance"]
        assert last[["x", "mean"]].to_numpy().tolist() == [[1, pytest.approx(11)], [2, pytest.approx(22)]]
        training = variance[variance["metric"] == "training"]
        assert training["x"].tolist() == [0, 5120] and training["mean"].tolist() == pytest.approx([2, 22])
        loss = FIGURES["curves"].drawing(store).data
        assert loss["mean"].iloc[-1] == pytest.approx(2.0) and len(FIGURES["curves"].drawing(store).page().axes) == 1
        with pytest.raises(NothingToDraw, match="add to measures: gradients"):
            FIGURES["gradients"].drawing(store)
    ends = [{"step": step, "tokens": 512 * step, "train_loss": 3.0} for step in (56, 57)]  # 29184 / (29184 / 50) > 50
    make_run(tmp_path / "end", config_of(n_layers=2, batch_tokens=512), {"val_loss": 3.0}, curves=ends)
    with open_store(tmp_path / "end") as store:
        assert FIGURES["curves"].drawing(store).data["x"].tolist() == [512 * 56.5]
    noisy = [{"step": step, "tokens": step, "train_loss": 5 - step / 50 + 0.5 * (-1) ** step} for step in range(1, 121)]
    make_run(tmp_path / "noisy", config_of(n_layers=2), {"val_loss": 3.0}, curves=noisy)
    with open_store(tmp_path / "noisy") as store:  # means of five: the noise is a fifth, the slope as it was
        drawing = FIGURES["curves"].drawing(store)
        points = drawing.data
        assert "A point is a mean over neighbouring steps." in caption(drawing.page())
        assert len(points) == 24 and (points["mean"] - (5 - points["x"] / 50)).abs().max() == pytest.approx(0.1)
    score, layers = {"causal_score": 0.4, "causal_score_largest_share": 0.9}, [layers[2] | {"metric": "causal_effect"}]
    make_run(tmp_path / "one", config_of(n_layers=2), {"val_loss": 3.0} | score, layers=layers)
    with open_store(tmp_path / "one") as store, pytest.raises(NothingToDraw, match=r"^Degenerate, .* causal_effect \("):
        FIGURES["scores"].drawing(store)  # it is measured
    assert to_measure(("causal_effect", "permutation_effect")) == "add to measures: causal or permutation"


def test_a_course_of_one_step_is_none(tmp_path):
    """A panel of single points would show nothing during training."""
    (folder,) = report_pages.grid(tmp_path / "results")
    with open_store(folder) as store:
        assert {*variance(store).data["metric"]} == {"residual_variance"}
