"""A layer profile: its numbers, and its page with a panel per metric and per matrix, grey where they are missing; one
matrix of several settings: means over their deepest runs, one scale."""

import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, SymLogNorm, to_rgba
from matplotlib.figure import Figure
from support.made_up_runs import make_run
from support.runs_frame import config_of, labelled_grid

from sparsedepth import quantities
from sparsedepth.plots.layer_profile import PANELS, _grid, layer_profile, layer_profile_page, profile_of
from sparsedepth.plots.matrices import MOST, TRACED, matrices, mean_matrices, page_of_matrices, pairs_that_exist
from sparsedepth.plots.page import NothingToDraw, colour_bar, lay_out
from sparsedepth.plots.runs import choose_run
from sparsedepth.plots.style import MISSING
from sparsedepth.store.connection import open_store
from sparsedepth.store.run_record import save_measured
from sparsedepth.store.subject import MeasuredModel
from sparsedepth.words.captions import DEGENERATE, profile_title, title_of_map

RUN = {"run_id": "a", "weight_eps": "[0.001, 0.01]"}
NO_PAIRS = pd.DataFrame(columns=["step", "layer", "other_layer", "metric", "value"])


def layer_frame(*rows):
    return pd.DataFrame(rows, columns=["step", "layer", "metric", "value"])


def profile(one_profile, name):
    return one_profile.profiles[one_profile.profiles["name"] == name].reset_index(drop=True)


def test_every_layer_metric_is_in_the_profile_or_left_out_on_purpose():
    drawn = {name for series in PANELS.values() for name in series}
    left_out = {quantity.name for quantity in quantities.LAYERS} - drawn
    kinds = ("query", "key", "value", "output", "gate", "up", "down")
    explained = {f"weight_sparsity{rel}_{kind}" for rel in ("", "_rel") for kind in kinds}
    errors = {f"jacobian_deviation{form}_se" for form in ("", "_averaged", "_released")}
    ends = {column.name for column in quantities.LAYERS if column.part in ("lo", "hi")}
    assert left_out == explained | errors | ends | {"trajectory_pc1", "trajectory_pc2", "state_cosine", TRACED}


@pytest.mark.parametrize(
    ("chosen", "leading"),
    [("[0.01, 0.001]", 0.01), ("[0.001, 0.01]", 0.001), (None, 0.001), (np.nan, 0.001), ("[0.5]", 0.01)],
)
def test_the_first_threshold_or_the_default_or_the_largest(chosen, leading):
    rows = layer_frame((1, 1, "weight_sparsity@0.001", 0.1), (1, 1, "weight_sparsity@0.01", 0.2))
    shown = profile(profile_of({"run_id": "a", "weight_eps": chosen}, rows, NO_PAIRS), "weight_sparsity")
    assert shown[["threshold", "value"]].to_numpy().tolist() == [[leading, {0.001: 0.1, 0.01: 0.2}[leading]]]


def test_null_is_missing_unless_no_value_can_exist():
    rows = layer_frame((1, 1, "causal_effect", None), (1, 2, "causal_effect", 0.5), (1, 3, "causal_effect", None))
    shown = profile(profile_of(RUN, rows, NO_PAIRS), "causal_effect")
    assert shown["layer"].tolist() == [1, 2]  # layer 3 is the last and has no later layer
    assert shown["value"].isna().tolist() == [True, False]


def test_matrices_have_the_later_layer_as_row():
    pairs = pd.DataFrame(
        [(1, 1, 3, "causal_effect", 0.5), (1, 2, 3, "causal_effect", None), (1, 1, 2, "permutation_effect", None)],
        columns=list(NO_PAIRS),
    )
    one_profile = profile_of(RUN, layer_frame(), pairs)
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


def test_the_default_run_is_the_best_of_the_deepest():
    rows = [("a", "ok", 2.0), ("b", "ok", 3.0), ("c", None, 2.5), ("d", "ok", None), ("e", "diverged", 1.0)]
    runs = pd.DataFrame([*rows, ("f", "ok", 1.0)], columns=["run_id", "outcome", "val_loss"])
    depths = {"a": 2, "b": 4, "c": 4, "d": 4, "e": 4}  # f has no values by layer
    assert choose_run(runs, depths, None) == "c"
    assert choose_run(runs, depths, "e") == "e"
    with pytest.raises(ValueError, match="'f' has no values by layer"):
        choose_run(runs, depths, "f")
    with pytest.raises(ValueError, match="none of the 6 runs has values by layer"):
        choose_run(runs, {"e": 4}, None)


def test_of_a_watched_training_the_default_is_the_last_step_which_the_title_tells():
    runs = pd.DataFrame({"run_id": ["a", "b", "c"], "outcome": "ok", "val_loss": [None, None, 3.0]})
    runs = runs.assign(origin=["watched", "watched", None], cluster=["mine", "mine", None], steps=[0, 150, 90])
    assert choose_run(runs, {"a": 4, "b": 4, "c": 2}, None) == "b"
    point = profile_of(runs.iloc[1].to_dict(), layer_frame((150, 4, "state_norm", 1.0)), NO_PAIRS)
    assert profile_title(point, ()) == "run b   4 layers   step 150"


def test_from_a_store(tmp_path):
    for n_layers, loss in ((2, 1.0), (3, 2.0)):
        rows = [
            {"step": 1, "layer": layer, "metric": "block_influence", "value": layer / 8, "n": 1}
            for layer in range(1, n_layers + 1)
        ]
        rows += [{"step": step, "layer": 1, "metric": "state_norm", "value": step, "n": 1} for step in (0, 1, 2)]
        make_run(tmp_path, config_of(n_layers=n_layers), {"val_loss": loss}, layers=rows)
    shallow = config_of(n_layers=2).run_id
    with open_store(tmp_path) as store:
        assert layer_profile(store).data["value"].tolist() == [1 / 8, 2 / 8, 3 / 8, 2.0]  # each at its last step
        assert layer_profile(store, shallow).data["layer"].tolist() == [1, 2, 1]
        with pytest.raises(ValueError, match=f"nearest of its 2 run ids: {shallow}"):
            layer_profile(store, shallow[:-1] + "x")


def test_values_at_initialisation_alone_are_no_profile(tmp_path):
    start = [{"step": 0, "layer": layer, "metric": "state_norm", "value": 1.0, "n": 1} for layer in range(1, 5)]
    end = [{**row, "step": 9, "layer": row["layer"] // 2} for row in start[1::2]]
    make_run(tmp_path, config_of(n_layers=4), {"val_loss": 1.0}, layers=start)
    with open_store(tmp_path) as store, pytest.raises(NothingToDraw, match="none of the 1 runs has values by layer"):
        layer_profile(store)
    make_run(tmp_path, config_of(n_layers=2), {"val_loss": 2.0}, layers=end)
    with open_store(tmp_path) as store:
        assert layer_profile(store).data["layer"].tolist() == [1, 2]


SCORED_RUN = {"run_id": "abc", "val_loss": 2.5, "usefulness": np.nan, "outcome": "ok"}


def full_profile(n_layers):
    rows, pairs = [], []
    for name in (name for series in PANELS.values() for name in series):
        threshold = "@0.1" if "sparsity" in name else ""
        rows += [(1, layer, name + threshold, 0.5 + layer / 8) for layer in range(1, n_layers + 1)]
    rows += [(1, layer, "jacobian_deviation_se", 0.1) for layer in range(1, n_layers + 1)]
    for name in quantities.BY_PAIR:
        places = zip(*np.nonzero(pairs_that_exist(name, n_layers)), strict=True)
        pairs += [(1, layer, other, name, 0.1 * other + 0.01 * layer) for other, layer in places]
    return profile_of(
        SCORED_RUN,
        pd.DataFrame(rows, columns=["step", "layer", "metric", "value"]),
        pd.DataFrame(pairs, columns=["step", "layer", "other_layer", "metric", "value"]),
    )


def axes_by_title(page):
    return {(axis.get_title() or axis.get_title()).replace("\n", " "): axis for axis in page.axes}


@pytest.mark.parametrize("n_layers", [1, 2, 48])
def test_every_score_is_drawn_at_any_depth(n_layers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = layer_profile_page(full_profile(n_layers))
        page.draw_without_rendering()
    wanted = {*PANELS} | {title_of_map(name) for name in quantities.BY_PAIR if pairs_that_exist(name, n_layers).any()}
    if n_layers == 1:
        wanted.remove("causal effect on later layers")  # there is none
    assert wanted == set(axes_by_title(page)) - {""}
    ticks = axes_by_title(page)["residual variance"].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks) and len(ticks) <= 9


def test_lines_and_heat_maps_have_the_numbers():
    axes = axes_by_title(layer_profile_page(full_profile(4)))
    lines = axes["early exit loss"].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[0.625, 0.75, 0.875, 1.0]] * 2
    legend = [text.get_text() for text in axes["weight sparsity"].get_legend().get_texts()]
    assert legend == ["|w| < 0.1", "|w| / rms < 0.1"]
    shown = axes["causal effect"].collections[1].get_array()
    assert shown[3, 2] == pytest.approx(0.32)  # of layers 3 and 2
    assert shown.mask[2, 3] and shown.mask[2, 2] and not shown.mask[3, 2]
    assert axes["residual variance"].get_yscale() == "log"
    assert axes["relative loss increase without the block"].get_yscale() == "linear"  # of less than a decade
    assert isinstance(axes["causal effect"].collections[1].norm, LogNorm)
    assert isinstance(axes["removal: relative loss increase"].collections[1].norm, SymLogNorm)


def test_the_band_is_the_95_interval():
    axis = axes_by_title(layer_profile_page(full_profile(2)))["Jacobian's deviation from identity"]
    heights = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert [heights.min(), heights.max()] == pytest.approx([0.625 - 0.196, 0.75 + 0.196], abs=1e-4)


def test_no_line_runs_through_a_legend():
    page = layer_profile_page(full_profile(6))
    lay_out(page)
    page.draw_without_rendering()
    for axes in (axes for axes in page.axes if axes.get_legend() is not None):
        below = axes.get_legend().get_window_extent().y0
        highest = max(axes.transData.transform(line.get_xydata())[:, 1].max() for line in axes.lines)
        assert highest <= below - 2, axes.get_title()  # half a marker


@pytest.mark.parametrize("n", [1, 2, 5, 17, 21])
def test_no_panel_is_alone_in_its_row(n):
    _, panels, maps = _grid(n, 4)
    rows = Counter(axis.get_subplotspec().rowspan.start for axis in panels)
    assert (min(rows.values()) > 1 or n == 1) and (len(panels), len(maps)) == (n, 4)
    assert {axis.get_subplotspec().rowspan.start for axis in maps} == {len(rows)}


def test_the_title_of_the_page_is_above_those_of_its_panels():
    page = layer_profile_page(full_profile(6))
    lay_out(page)
    page.draw_without_rendering()
    below = page._suptitle.get_window_extent().y0
    titles = [axis.title.get_window_extent().y1 for axis in page.axes if axis.get_title()]
    assert max(titles) < below and page._suptitle.get_window_extent().y1 <= page.bbox.y1


def test_a_map_ends_where_its_pairs_end():
    axes = axes_by_title(layer_profile_page(full_profile(4)))
    ends = {
        name: (axes[name].get_xlim(), axes[name].get_ylim()) for name in ("causal effect", "angular distance (rad)")
    }
    assert ends["causal effect"] == ((0.5, 3.5), (1.5, 4.5))
    assert ends["angular distance (rad)"] == ((-0.5, 3.5), (0.5, 4.5))
    assert axes["removal: relative loss increase"].get_ylim() == (0.5, 4.5)


def test_missing_values_are_grey_and_cells_without_a_pair_white():
    profile = full_profile(3)
    profile.matrices["permutation_effect"][3, 1] = np.nan
    of_lens = (profile.profiles["name"] == "lens_loss") & (profile.profiles["layer"] == 2)
    profile.profiles.loc[of_lens, "value"] = np.nan
    axes = axes_by_title(layer_profile_page(profile))
    grey = axes["permutation: relative loss increase"].collections[0]
    assert np.argwhere(~grey.get_array().mask).tolist() == [[3, 1]]
    assert tuple(grey.cmap(0)) == to_rgba(MISSING)
    (span,) = axes["early exit loss"].patches
    assert (span.get_x(), span.get_width()) == (1.5, 1.0)
    assert not axes["block influence"].patches


def test_only_what_was_measured_is_drawn():
    profile = full_profile(3)
    profile.matrices.clear()
    profile.profiles["value"] = profile.profiles["value"].where(profile.profiles["name"] == "residual_variance")
    assert list(axes_by_title(layer_profile_page(profile))) == ["residual variance"]


def test_values_hidden_by_a_logarithmic_axis_are_counted():
    profile = full_profile(2)
    profile.profiles.loc[profile.profiles["name"] == "update_norm", "value"] = 0.0
    page = layer_profile_page(profile)
    page.draw_without_rendering()
    assert "Not shown: 2 values at or below 0, on logarithmic axes." in " ".join(page.get_supxlabel().split())


def test_a_degenerate_score_is_marked_in_the_title_and_its_reasons_named():
    """Of a solved task the published usefulness is 1; a score counts only if it was measured."""
    solved = {"val_loss": 5e-7, "usefulness": 1.0, "usefulness_loss_increase": 8e5, "causal_score": 0.3}
    solved |= {"usefulness_loss_increase_largest_share": 0.7, "causal_score_largest_share": 0.2}
    page = layer_profile_page(replace(full_profile(2), run={**SCORED_RUN, **solved}))
    assert page.get_suptitle().endswith(f"val_loss 5.000e-07 nat/token   usefulness 1.000 {DEGENERATE}")
    said = " ".join(page.get_supxlabel().split())
    of_both = "it is relative to a loss below 0.1 nat/token; one block carries more than half of it"
    assert f"Degenerate, so no evidence: usefulness {DEGENERATE}, usefulness_loss_increase ({of_both})." in said


# Matrices side by side


def pairs_of(runs, value):
    pairs = [(run, other) for run in runs.itertuples() for other in range(2, run.n_layers + 1)]
    rows = [(run.run_id, 1, other, "causal_effect", value(run) + other) for run, other in pairs]
    return pd.DataFrame(rows, columns=["run_id", "layer", "other_layer", "metric", "value"])


def test_means_over_seeds_of_the_deepest():
    axes = {"n_layers": [2, 4], "weight_decay": [0.0, 0.3], "seed": [0, 1]}
    runs = labelled_grid(axes, lambda config: {"val_loss": 3.0})
    values, notes = mean_matrices(runs, pairs_of(runs, lambda run: run.seed + 100 * run.weight_decay))
    at = values.set_index(["setting", "layer", "other_layer"])["value"]
    assert at["baseline", 1, 4] == 4.5 and at["weight_decay=0.3", 1, 4] == 34.5
    assert set(values["n_runs"]) == {2} and notes == ""
    page = page_of_matrices(values)
    assert page.get_supxlabel().startswith("The deepest, 4 layers; mean over up to 2 runs each.")
    first, second = (axis.collections[1] for axis in page.axes[:2])
    assert first.norm is second.norm and first.get_array().mask[4, 2]
    assert [axis.get_title() for axis in page.axes[:2]] == ["baseline", "weight_decay=0.3"]


def traced_model(place, name, n_layers, n_positions):
    """A model whose share is restored at position `layer` and below."""
    sizes = {"n_layers": n_layers, "d_model": 8, "n_heads": 2, "n_kv_heads": 2, "n_experts": 0, "vocab_size": 40}
    facts = {"model": name, "family": "gpt2", "dtype": "float32", "weights_hash": name, "data_hash": "1", "seq_len": 8}
    rows = [
        {"step": 0, "layer": layer, "metric": f"{TRACED}@{position}", "value": float(position <= layer), "n": 8}
        for layer in range(n_layers + 1)
        for position in range(1, n_positions + 1)
    ]
    save_measured(
        place / name, MeasuredModel(**sizes, **facts, params_total=9), {"val_loss": 2.0}, {}, {"layers": rows}
    )


def test_a_causal_trace_is_a_map_of_positions_by_layers(tmp_path):
    """Of two models that differ in layers and positions, one colour scale; not a line over all positions."""
    traced_model(tmp_path, "two", 2, 12)
    traced_model(tmp_path, "three", 3, 4)
    with open_store(tmp_path) as store:
        drawing, alone = matrices(store), layer_profile(store)
    page, of_one = drawing.page(), alone.page()
    maps = {axis.get_title(): axis for axis in page.axes}
    assert {name: (axis.get_xlim(), axis.get_ylim()) for name, axis in maps.items()} == {
        "three": ((-0.5, 3.5), (0.5, 4.5)),
        "two": ((-0.5, 2.5), (0.5, 12.5)),
    }
    shown = maps["two"].collections[1]
    assert shown.get_array()[1:, 1].tolist() == [1.0] + 11 * [0.0] and shown.norm is maps["three"].collections[1].norm
    text = page.get_supxlabel().replace("\n", " ")
    assert text.startswith("Each with its own layers.")
    assert all(
        "loss with noise of 3 sd on x_0" in caption.replace("\n", " ") for caption in (text, of_one.get_supxlabel())
    )
    assert [axis.get_title() for axis in of_one.axes] == ["causal trace: share restored"]
    assert len(alone.data) == 4 * 4 and len(drawing.data) == 4 * 4 + 3 * 12


def test_more_settings_than_fit_are_counted():
    runs = labelled_grid({"weight_decay": [i / 10 for i in range(9)]}, lambda config: {"val_loss": 3.0}, n_layers=3)
    values, notes = mean_matrices(runs, pairs_of(runs, lambda run: 1.0))
    assert values["setting"].nunique() == MOST and f"Not shown: {9 - MOST} further settings" in notes


def test_a_colour_bar_of_less_than_a_decade_has_several_labels():
    figure = Figure()
    axis = figure.subplots()
    colour_bar(axis, axis.pcolormesh(np.array([[0.06, 0.7]]), norm=LogNorm(0.06, 0.7)))
    FigureCanvasAgg(figure).draw()
    (bar,) = axis.child_axes
    low, high = bar.get_ylim()
    assert len([tick for tick in bar.get_yticks() if low <= tick <= high]) >= 2
