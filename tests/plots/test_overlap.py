"""Texts of a figure: none over another, none cut, none half a name."""

import warnings

import matplotlib
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from support import report_pages

from sparsedepth.plots.by_setting import by_depth
from sparsedepth.plots.draw import FIGURES, drawable
from sparsedepth.plots.matrices import page_of_matrices
from sparsedepth.plots.page import NothingToDraw, depth_legend, lay_out
from sparsedepth.plots.style import COLUMNS, PAPER, RC, TALLEST
from sparsedepth.store.connection import open_store
from sparsedepth.words.captions import by_layer_caption, folded

COLUMN = PAPER | {"figure.figsize": (COLUMNS[1], TALLEST)}


def texts_of(page):
    """Every text that is drawn, with its box."""
    found = [*filter(None, (page._supxlabel, page._suptitle))]
    for axis in page.axes:
        found += [axis._left_title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
        for which in (axis.xaxis, axis.yaxis):
            low, high = sorted(which.get_view_interval())
            found += [tick.label1 for tick in which.get_major_ticks() if low <= tick.get_loc() <= high]
    for legend in filter(None, (*page.legends, *(axis.get_legend() for axis in page.axes))):
        found += legend.get_texts()
    canvas = FigureCanvasAgg(page)
    canvas.draw()
    shown = [text for text in found if text.get_text() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in shown]


def overlaps(drawing, columns):
    """Pairs of texts that lie over one another, and those that leave the page."""
    with matplotlib.rc_context(PAPER | {"figure.figsize": (COLUMNS[columns], TALLEST)} if columns else RC):
        page = drawing.page()
        if columns:
            page.supxlabel("")
        lay_out(page)
        texts = texts_of(page)
    width, height = page.bbox.width, page.bbox.height
    outside = [
        (text,) for text, box in texts if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    return outside + [
        (one, other)
        for i, (one, a) in enumerate(texts)
        for other, b in texts[i + 1 :]
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1.5
    ]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("kind", ["results/quickstart", *report_pages.KINDS])
def test_no_text_lies_over_another(kind, columns, tmp_path):
    folders = [kind] if isinstance(kind, str) else kind(tmp_path / "results")
    with open_store(*folders) as store, warnings.catch_warnings():
        warnings.simplefilter("error")  # of a layout that has no room
        for name, found in drawable(store, FIGURES):
            assert isinstance(found, NothingToDraw) or not overlaps(found, columns), name


def test_the_axes_of_a_search_have_room_in_a_column(tmp_path):
    with open_store(*report_pages.search(tmp_path / "results")) as store:
        drawing = FIGURES["parallel"].drawing(store)
    assert overlaps(drawing, 1) == overlaps(drawing, 2) == []
    with matplotlib.rc_context(COLUMN):
        (axis,) = drawing.page().axes
    assert "residual_variance_last" in [label.get_text() for label in axis.get_xticklabels()]


def test_equal_values_have_an_axis_of_ratios_around_1(tmp_path):
    with open_store(*report_pages.series(tmp_path / "results")) as store:
        *_, axis = FIGURES["effects"].drawing(store).page().axes
    low, high = axis.get_xlim()
    assert axis.get_xscale() == "log" and 0.5 < low <= 0.95 and 1.05 <= high < 2


def test_the_number_in_a_name_is_never_cut():
    assert folded("n_heads=8, train_tokens=1000000000", 20) == "n_heads=8,\ntrain_tokens=1000000000"
    assert folded("x" * 70, 20) == "\n".join(["x" * 30, "x" * 30, "x" * 10])


def test_matrices_have_whole_names_and_of_a_paper_a_colour_bar_each():
    name = "depth_scale=lns, n_kv_heads=1, weight_decay=0.3"
    rows = [(of, 1, later, 0.1 * later) for of in ("baseline", name) for later in (2, 3)]
    values = pd.DataFrame(rows, columns=["setting", "layer", "other_layer", "value"])
    values = values.assign(metric="causal_effect", n_layers=3, n_runs=1)
    bars = []
    for style in (RC, COLUMN):
        with matplotlib.rc_context(style):
            axes = page_of_matrices(values).axes
        bars.append([len(axis.child_axes) for axis in axes])
        assert axes[1].get_title(loc="left").replace("\n", " ") == name
    assert bars == [[0, 1], [1, 1]]


def test_a_legend_has_the_columns_that_fit_and_no_shape_of_a_single_kind():
    with matplotlib.rc_context(COLUMN):
        page = Figure(figsize=(COLUMNS[1], 4))
        depth_legend(page, {4: "#111111"}, {"baseline": "o", "depth_scale=lns": "s"})
        assert page.legends[0]._ncols == 2
        depth_legend(page, {4: "#111111"}, {"proposal": "o"})
        assert [text.get_text() for text in page.legends[1].get_texts()] == ["4 layers"]


def test_lines_of_models_differ_in_colour_and_marker():
    """Their names have no order, so shades of one would say what is not there."""
    names = ["pythia-70m", "pythia-160m", "gpt2"]
    runs = pd.DataFrame({"run_id": names, "name": names, "n_layers": [6, 12, 12], "setting": "baseline"})
    runs = runs.assign(outcome="ok", seed=None, lr=None, val_loss=3.0)
    values = pd.DataFrame({"run_id": names * 2, "layer": [1] * 3 + [2] * 3, "metric": "residual_variance"})
    lines = by_depth(runs, values.assign(value=1.0 + values.index), "", line="name").page().axes[0].lines
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 3


def test_the_layers_of_a_single_depth_are_told():
    points = pd.DataFrame({"panel": ["residual_variance"], "n_layers": 32, "lr": 0.1})
    assert by_layer_caption(points, is_search=False).startswith(" At 32 layers, by layer: the baseline")
    points = pd.concat([points, points.assign(n_layers=4)])
    assert by_layer_caption(points, is_search=False).startswith(" By layer: the baseline")
