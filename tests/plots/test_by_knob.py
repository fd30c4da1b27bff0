"""Lines by knob: runs that changed nothing else, means over seeds, the last step, tokens during training."""

import pandas as pd
import pytest
from support.runs_frame import grid

from sparsedepth.plots.by_knob import ALL_RUNS, GRADIENTS, lines, one_knob_runs, page_of_lines, shown_knobs
from sparsedepth.plots.runs import to_measure

AXES = {"n_layers": [2, 4, 8], "weight_decay": [0.0, 0.3], "n_kv_heads": [4, 1], "seed": [0, 1]}


def rows_of(runs, steps=(0, 10)):
    """Variance = layer x step + seed; doubled by weight decay."""
    return pd.DataFrame(
        [
            (
                run.run_id,
                step,
                layer,
                "residual_variance",
                (layer * (1 + step) + run.seed) * (1 + (run.weight_decay > 0)),
            )
            for run in runs.itertuples()
            for step in steps
            for layer in range(1, run.n_layers + 1)
        ],
        columns=["run_id", "step", "layer", "metric", "value"],
    )


@pytest.fixture(scope="module")
def runs():
    return grid(AXES, lambda config: {"val_loss": 3.0}, batch_tokens=1024)


def test_one_knob_runs_changed_no_other_knob(runs):
    selected = one_knob_runs(runs).merge(runs, on="run_id", suffixes=("", "_run"))
    assert set(selected["knob"]) == {"weight_decay", "n_kv_heads"}
    assert set(selected.loc[selected["knob"] == "weight_decay", "n_kv_heads"]) == {4}
    assert set(selected.loc[selected["knob"] == "n_kv_heads", "weight_decay"]) == {0.0}
    assert len(selected) == 2 * 2 * 3 * 2


def test_a_setting_in_two_folders_is_two_lines(runs):
    folders = runs["seed"].map("/x/sweep{}/runs/a".format)
    selected = one_knob_runs(runs.assign(folder=folders))
    settings = set(selected.loc[selected["knob"] == "weight_decay", "setting"])
    assert settings == {f"weight_decay={value} in sweep{seed}" for value in ("0", "0.3") for seed in (0, 1)}


def test_means_and_ranges_over_seeds_at_the_shallowest_and_deepest_depth(runs):
    by_setting = lines(runs, rows_of(runs), over_training=True)
    assert set(by_setting.rows["n_layers"]) == {2, 8}
    rows_shown = by_setting.rows[(by_setting.rows["knob"] == "weight_decay") & (by_setting.rows["n_layers"] == 8)]
    top = rows_shown[(rows_shown["panel"] == "residual_variance") & (rows_shown["x"] == 8)].set_index("setting")
    assert top.loc["weight_decay=0", ["mean", "low", "high", "n_runs"]].tolist() == [88.5, 88, 89, 2]
    assert top.loc["weight_decay=0.3", "mean"] == 177
    training = rows_shown[(rows_shown["panel"] == "training") & (rows_shown["setting"] == "weight_decay=0")]
    assert training[["x", "mean"]].to_numpy().tolist() == [[0, 8.5], [10 * 1024, 88.5]]
    assert by_setting.settings["weight_decay"] == ("weight_decay=0", "weight_decay=0.3")


def test_the_page_has_a_row_per_knob_and_a_column_per_panel(runs):
    page = page_of_lines(lines(runs, rows_of(runs), over_training=True))
    assert len(page.axes) == 4
    assert [len(axis.get_lines()) for axis in page.axes] == [4] * 4  # two settings at two depths
    legend = page.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["weight_decay=0", "weight_decay=0.3"]


def test_one_run_and_no_knob():
    single = grid({"seed": [0]}, lambda config: {"val_loss": 3.0}, n_layers=4)
    by_setting = lines(single, rows_of(single), over_training=True)
    assert list(by_setting.settings) == [ALL_RUNS]
    assert "One run each. 4 layers." in page_of_lines(by_setting).get_supxlabel()


def test_nulls_and_values_that_a_log_axis_cannot_show_are_left_out(runs):
    rows = rows_of(runs, steps=(5,))
    rows.loc[rows["layer"] == 1, "value"] = None
    rows.loc[rows["layer"] == 2, "value"] = 0.0
    assert lines(runs, rows).rows["x"].min() == 3


def test_the_knobs_with_the_most_different_settings_are_shown():
    """Two panels leave room for four knobs of five; the one that doubles nothing is left out, and named."""
    axes = {"weight_decay": [0.0, 0.3], "n_kv_heads": [4, 1], "depth_scale": ["none", "lns"], "beta1": [0.9, 0.8]}
    runs = grid({**axes, "beta2": [0.95, 0.9]}, lambda config: {"val_loss": 3.0}, n_layers=2, batch_tokens=1024)
    factor = (1 + (runs["weight_decay"] > 0)) * (1 + (runs["n_kv_heads"] == 1)) * (1 + (runs["beta1"] < 0.9))
    factor *= 1 + (runs["depth_scale"] == "lns")
    sizes = dict(zip(runs["run_id"], factor, strict=True))
    rows = pd.DataFrame(
        [(run, step, layer, "residual_variance", size * layer) for run, size in sizes.items() for step in (0, 10)
         for layer in (1, 2)],
        columns=["run_id", "step", "layer", "metric", "value"],
    )  # fmt: skip
    by_setting = lines(runs, rows, over_training=True)
    assert shown_knobs(by_setting, 4) == [knob for knob in by_setting.settings if knob != "beta2"]
    page = page_of_lines(by_setting)
    assert len(page.axes) == 8 and "differ less: beta2." in page.get_supxlabel()


def test_each_line_names_its_lr_if_tuning_chose_different_ones(runs):
    """lr moves the variance as well, so a reader must see whether it is the same."""
    by_setting = lines(runs.assign(lr=0.003), rows_of(runs))
    assert set(by_setting.rows["lr"]) == {0.003}
    page = page_of_lines(by_setting)
    caption = " ".join(page.get_supxlabel().split())
    assert "Dark: 8 layers; pale: 2; not drawn: 4. lr 0.003 throughout." in caption and "lr" not in legend_of(page)
    tuned = runs.assign(lr=[0.001 if decay else 0.003 for decay in runs["weight_decay"]])
    tuned["tuned_fields"] = "lr"
    page = page_of_lines(lines(tuned, rows_of(runs)))
    assert legend_of(page).startswith("weight_decay=0, lr 0.003|weight_decay=0.3, lr 0.001|n_kv_heads=4, lr 0.003")
    assert "which also changes residual variance" in " ".join(page.get_supxlabel().split())


def test_the_shallow_depth_is_one_that_compares_settings(runs):
    """At 2 layers only the baseline was run."""
    is_compared = (runs["n_layers"] > 2) | ((runs["weight_decay"] == 0) & (runs["n_kv_heads"] == 4))
    by_setting = lines(runs[is_compared], rows_of(runs[is_compared]))
    assert set(by_setting.rows["n_layers"]) == {4, 8} and by_setting.other_depths == (2,)


def legend_of(page):
    legends = [axis.get_legend() for axis in page.axes if axis.get_legend()]
    return "|".join(text.get_text() for legend in legends for text in legend.get_texts())


def test_scores_relative_to_a_tiny_loss_are_replaced_or_marked(runs):
    rows = rows_of(runs).query("step == 10")
    metrics = ("affine_loss_increase", "affine_loss_added", "skip_loss_increase")
    layers = pd.concat([rows.assign(metric=metric) for metric in metrics])
    assert lines(runs, layers).panels == ("affine_loss_increase", "skip_loss_increase")
    solved = lines(runs.assign(val_loss=0.001), layers)
    assert solved.panels == ("affine_loss_added", "skip_loss_increase")
    assert "No evidence (it is relative to a loss below 0.1 nat/token): skip_loss_increase." in solved.degenerate
    assert solved.degenerate.count("skip_loss_increase") == 1
    carried = runs.assign(val_loss=0.001, affine_loss_added=runs["seed"], affine_loss_added_largest_share=0.9)
    assert "affine_loss_added (one block carries more than half of it)" in lines(carried, layers).degenerate


def test_missing_numbers_name_the_measures_that_give_them():
    """`gradient_norm` is recorded in training."""
    assert to_measure(GRADIENTS) == "add to measures: gradients"
    assert to_measure(("causal_effect", "permutation_effect")) == "add to measures: causal or permutation"
