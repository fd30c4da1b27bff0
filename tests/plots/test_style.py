"""Colours are ordered and distinct in grey; shapes are distinct; logarithmic axes are labelled sparsely."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from sparsedepth.plots.page import NARROW, WIDEST, legend_above, line_handle
from sparsedepth.plots.runs import settings_in_order
from sparsedepth.plots.style import (
    BASELINE,
    GREY,
    SERIES,
    SETTINGS,
    axis_of_points,
    depth_colours,
    kind_markers,
    linear_below,
    log_scale,
    set_layer_scale,
    set_scale,
    setting_styles,
)
from sparsedepth.words.captions import shortened


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_deeper_is_darker_and_distinct_in_grey(n):
    colours = depth_colours(range(12, 12 + n))
    grey = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in map(to_rgb, colours.values())]
    assert grey == sorted(grey, reverse=True)
    assert min(a - b for a, b in itertools.pairwise(grey)) > 0.4 / n


def contrast_to_white(colour):
    """(1 + .05) / (L + .05), L the relative luminance of WCAG 2.2."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


def test_every_line_and_note_has_a_contrast_of_three():
    assert contrast_to_white("white") == 1 and contrast_to_white("black") == 21
    lines = [colour for colour, *_ in (BASELINE, *SETTINGS, *SERIES)]
    assert min(map(contrast_to_white, [*lines, *depth_colours(range(8)).values(), *depth_colours([12]).values()])) >= 3
    assert contrast_to_white(GREY) >= 4.5  # text


def test_shapes_are_distinct():
    names = ["baseline", "weight_decay", "seq_len", "n_kv_heads", "n_experts", "depth_scale", "init", "lr"]
    names.append("several fields")
    assert len(set(kind_markers(names).values())) == len(names)


def test_the_first_layer_does_not_hide_the_others():
    """One value a thousand times the others, which differ: logarithmic, or where some are negative linear below the
    decade of nine tenths of these; values of one size stay linear."""
    axis = Figure().subplots()
    set_layer_scale(axis, "linear", [1.0, 1e-2, 1e-2, 2e-2])
    labels = [axis.yaxis.get_major_formatter()(tick) for tick in (0.01, 1.0)]
    assert axis.get_yscale() == "log" and labels == ["0.01", "1"]  # as on other logarithmic axes
    values = [1.0, 2e-5, 3e-5, -2e-3, -3e-3, 1e-5]
    assert linear_below(values) == 1e-3
    axis = Figure().subplots()
    axis.plot(values)
    set_layer_scale(axis, "symlog", values)
    low, deep, first = axis.transData.transform([(0, 0.0), (0, 1e-3), (0, 1.0)])[:, 1]
    assert axis.get_yscale() == "symlog" and deep - low > (first - low) / 10
    assert linear_below([1.0, 0.5, 0.2]) is None and linear_below([]) is None
    for values, scale in (([0.02, 0.4, 0.5], "log"), ([-0.02, 0.4, 0.5], "symlog"), ([0.2, 0.4, 0.5], "linear")):
        axis = Figure().subplots()
        set_layer_scale(axis, "symlog", values)
        assert axis.get_yscale() == scale, values  # without a decade a symlog axis would have no ticks


@pytest.mark.parametrize("n", [2, 8, 10])
def test_settings_have_distinct_colours(n):
    styles = setting_styles([*map(str, range(n))]).values()
    assert len({style[0] for style in styles}) == n
    assert len({style[1] for style in styles}) == n


@pytest.mark.parametrize("width", [4.8, 6.8, 11.4])
def test_a_legend_fits_into_a_narrow_window(width):
    """Whatever the names: in fewer columns."""
    page = Figure(figsize=(width, 3))
    names = ["baseline", "n_experts=8, weight_decay=0.1", "depth_scale=lns", "n_kv_heads=1, norm=sandwich"]
    names += ["n_kv_heads=1", "z"]
    legend_above(page, [line_handle(name, BASELINE) for name in names])
    (legend,) = page.legends
    shown = legend.get_window_extent(FigureCanvasAgg(page).get_renderer()).width / page.bbox.width
    assert shown * min(96 * width, WIDEST) <= NARROW and len(legend.get_texts()) == len(names)


def test_a_long_name_keeps_whole_fields_and_counts_the_rest():
    assert shortened("task_group=A5, seq_len=8, vocab_size=62, tracked=element") == "task_group=A5, seq_len=8, 2 more"
    assert shortened("n_experts=8, top_k=2") == "n_experts=8, top_k=2"
    assert shortened("corpus=" + "a" * 40) == "corpus=" + "a" * 22 + "…"


@pytest.mark.parametrize("values", [[4e-4, 0.024], [7.5e-4, 0.012], [1e-4, 1.0], [0.001, 0.003]])
def test_logarithmic_labels_of_a_narrow_panel_do_not_overlap(values):
    page = Figure(figsize=(2.7, 2.7), layout="constrained")
    axes = page.subplots()
    axes.plot(values, [1, 2])
    log_scale(axes, "x", values)
    page.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    boxes = sorted((box.x0, box.x1) for box in boxes if axes.bbox.x0 - 1 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1 + 1)
    assert len(boxes) >= 2 and all(left[1] + 2 < right[0] for left, right in itertools.pairwise(boxes))


def test_no_decade_is_labelled_inside_the_linear_part_of_an_axis():
    axis = Figure().subplots()
    values = [0.0, -5.0, *[3e3] * 9, 1e7]
    axis.plot(values)
    set_layer_scale(axis, "symlog", values)
    axis.figure.draw_without_rendering()
    assert linear_below(values) == 1e3
    labels = {tick: axis.yaxis.get_major_formatter()(tick) for tick in axis.get_yticks()}
    assert {label for tick, label in labels.items() if 0 < abs(tick) < 1e3} <= {""}
    assert (labels[0.0], labels[1e3], labels[1e6]) == ("0", "10³", "10⁶")


def test_an_axis_of_points_labels_values_that_exist_where_there_is_room():
    page = Figure()
    few, many = page.subplots(1, 2)
    axis_of_points(few, [0.003, 0.006, 0.012])
    assert [label.get_text() for label in few.get_xticklabels()] == ["0.003", "0.006", "0.012"]
    axis_of_points(many, [0.00075 * 2**i for i in range(9)])
    shown = many.get_xticks()
    assert shown[-1] == 0.192 and len(shown) < 9 and {*shown} <= {0.00075 * 2**i for i in range(9)}
    long = Figure().subplots()
    axis_of_points(long, [0.0015, 0.00212, 0.003, 0.00424, 0.006, 0.00849057, 0.0120151])  # of extensions
    assert [tick.get_text() for tick in long.get_xticklabels()] == ["0.0015", "0.003", "0.006", "0.012"]
    two = Figure().subplots()
    axis_of_points(two, [0.0015, 0.006, 0.00849057])
    assert [tick.get_text() for tick in two.get_xticklabels()] == ["0.0015", "0.00849"]


def test_settings_are_in_order_of_their_numbers():
    names = ["weight_decay=1", "train_tokens=20000", "train_tokens=3000", "baseline", "n_kv_heads=1, lr=0.3", "lr=1e-5"]
    ordered = [
        "baseline",
        "lr=1e-5",
        "train_tokens=3000",
        "train_tokens=20000",
        "weight_decay=1",
        "n_kv_heads=1, lr=0.3",
    ]
    assert settings_in_order(names) == ordered


@pytest.mark.parametrize(("values", "scale"), [([0.03, 0.7], "log"), ([0.005, 0.7], "symlog"), ([0.3, 0.7], "linear")])
def test_increases_above_the_linear_part_have_the_labels_of_a_logarithmic_axis(values, scale):
    """A symlog axis labels decades alone: of 0.03 to 0.7 one."""
    axis = Figure().subplots()
    set_scale(axis, "y", "symlog", values)
    assert axis.get_yscale() == scale
