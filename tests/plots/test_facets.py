"""Mean and interval by hand; panels with their lines, scales and ranges; a page for a screen and for a paper."""

import math
from dataclasses import replace

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from sparsedepth.plots.facets import Panel, draw_facets, intervals, lines_drawing, range_of
from sparsedepth.plots.page import lay_out
from sparsedepth.plots.style import PAPER, setting_styles

HALF = 4.302653 / math.sqrt(3)  # t(2, 0.975) / sqrt(n), of three values one apart


def test_the_interval_of_a_mean_is_over_seeds():
    rows = pd.DataFrame({"a": "x", "seed": [0, 1, 2, 2], "value": [1.0, 2.0, 2.5, 3.5]})  # one seed from two models
    (row,) = intervals(rows, ["a"]).to_dict("records")
    assert (row["mean"], row["n_seeds"]) == (2.0, 3)
    assert [row["lo"], row["hi"]] == pytest.approx([2 - HALF, 2 + HALF], abs=1e-6)
    logs = intervals(rows.assign(value=np.exp(rows["value"])[[0, 1, 1, 1]].to_numpy()), ["a"], is_log=True)
    assert logs["mean"].item() == pytest.approx(math.exp(5 / 3))


def test_two_seeds_have_no_interval_and_runs_without_a_seed_are_their_own():
    rows = pd.DataFrame({"a": ["x", "x", "y", "y", "y"], "seed": [0, 1, None, None, None], "value": [1.0, 3, 1, 2, 3]})
    found = intervals(rows, ["a"]).set_index("a")
    assert found.loc["x", ["mean", "n_seeds"]].tolist() == [2, 2] and np.isnan(found.loc["x", "lo"])
    assert found.loc["y", "lo"] == pytest.approx(2 - HALF, abs=1e-6)
    assert intervals(rows[:0], ["a"]).empty


def lines(n_points, settings=("baseline", "lns")):
    return pd.DataFrame(
        [("loss", name, 2.0**i, 1.0 + i + j, 0.5 + i, 2.5 + i, 3)
         for j, name in enumerate(settings) for i in range(n_points)],
        columns=["panel", "setting", "x", "mean", "lo", "hi", "n_seeds"],
    )  # fmt: skip


def panel(**options):
    return Panel(key="loss", x_label="x", y_label="loss (nat/token)", title="4 layers", **options)


def test_a_panel_has_a_line_a_setting_with_bars_or_bands():
    styles = setting_styles(["baseline", "lns"])
    page = draw_facets(lines(3), [panel(x="depth")], "", styles, labels={"lns": "lns, lr 0.1"})
    (axis,) = page.axes
    assert [line.get_ydata().tolist() for line in axis.get_lines()] == [[1, 2, 3], [2, 3, 4]]
    assert [len(bars.get_segments()) for bars in axis.collections] == [3, 3]
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("x", "loss (nat/token)", "4 layers")
    first, second = (line.get_xdata()[0] for line in axis.get_lines())
    assert first < 1 < second and second / first < 1.1  # side by side, near their depth
    assert [text.get_text() for text in page.legends[0].get_texts()] == ["baseline", "lns, lr\u00a00.1"]
    (axis,) = draw_facets(lines(20), [panel(x="share")], "", styles).axes
    assert all(type(band).__name__ == "FillBetweenPolyCollection" for band in axis.collections)


def test_intervals_down_to_0_are_bars_and_leave_an_axis_by_layer_to_the_means():
    rows = lines(10).assign(x=[*range(1, 11)] * 2, mean=[10.0 ** -(i % 4) for i in range(20)], lo=-0.5, hi=2.0)
    page = draw_facets(rows, [panel(scale="symlog")])
    (axis,) = page.axes
    assert axis.get_yscale() == "log" and 5e-4 < axis.get_ylim()[0] < 1e-3 and 1 < axis.get_ylim()[1] < 2
    assert [len(bars.get_segments()) for bars in axis.collections] == [10, 10]
    assert "side by side. Intervals are cut where the axis ends." in " ".join(page.get_supxlabel().split())
    whole = draw_facets(rows.assign(mean=1.0 + rows["x"] / 10), [panel(scale="symlog")])
    assert whole.axes[0].get_ylim()[0] < -0.5 and "cut" not in whole.get_supxlabel()


def test_what_decorates_a_panel_does_not_change_its_range():
    rows = lines(3)
    assert range_of(rows) == pytest.approx((0.3, 4.7)) and range_of(rows[:0]) is None  # 5% more than .5 to 4.5
    decorated = panel(range=(0, 3), decorate=lambda axis, rows: axis.axhline(100))
    (axis,) = draw_facets(rows, [decorated]).axes
    assert axis.get_ylim() == (0, 3)


def test_a_paper_has_one_column_of_panels():
    with matplotlib.rc_context(PAPER):
        page = draw_facets(lines(3), [panel(x="depth")] * 3)
        lay_out(page)
    assert page.get_size_inches()[0] == pytest.approx(3.35)
    assert len({round(axis.get_position().x0, 3) for axis in page.axes}) == 1


def test_the_last_of_many_layers_has_its_marker_and_interval():
    rows = lines(32).assign(x=[1.0 + i for i in range(32)] * 2)
    axis = draw_facets(pd.concat([rows.assign(setting=rows["setting"] + n) for n in "abc"]), [panel(x="share")]).axes[0]
    assert [bars.get_segments()[-1][0][0] for bars in axis.collections] == [32.0] * 6
    assert len(axis.collections[0].get_segments()) == 16


MANY = ("baseline", "lns", "n_experts=8", "n_kv_heads=1", "weight_decay=1", "weight_decay=2")


def crossing(n_points, settings):
    """In the reverse order at the last point."""
    rows = lines(n_points, settings)
    last = rows["x"] == rows["x"].max()
    return rows.assign(mean=rows["mean"].where(~last, 10.0 - rows["mean"]))


@pytest.mark.parametrize(("kind", "n_points", "n_apart"), [("depth", 4, 6), ("log", 4, 6), ("tokens", 20, 4)])
def test_where_many_lines_cross_each_stands_beside_the_first_on_one_range(kind, n_points, n_apart):
    """More than four lines over depths, or two bands over tokens; lines that do not cross are together."""
    rows = crossing(n_points, MANY[:n_apart])
    page = draw_facets(rows, [panel(x=kind)], labels={"lns": "lns, lr 0.1"})
    titles = [axis.get_title() for axis in page.axes]
    assert titles == ["4 layers, lns, lr 0.1", *(f"4 layers, {name}" for name in MANY[2:n_apart])]
    assert len({axis.get_ylim() for axis in page.axes}) == 1 and not page.legends
    for axis, name in zip(page.axes, MANY[1:], strict=False):
        assert {*axis.marks["group"]} == {"baseline", name}
        *own, pale = axis.get_lines()
        assert len(own) == 2 and np.isnan(pale.get_ydata()).sum() == n_apart - 3  # gaps between the others
    assert "beside baseline (black); pale: the others" in " ".join(page.get_supxlabel().split())
    at_other_points = rows["x"].where(rows["setting"] != MANY[1], 1.01 * rows["x"])
    assert len(draw_facets(rows.assign(x=at_other_points), [panel(x=kind)]).axes) == n_apart - 1
    for together in (crossing(n_points, MANY[: n_apart - 2]), lines(n_points, MANY[:n_apart])):
        page = draw_facets(together, [panel(x=kind)])
        assert len(page.axes) == 1 and page.legends


def test_labels_of_low_panels_stay_below_the_legend():
    """A panel with one legend, and low ones of settings apart: a label of 31 characters is as high as two of them."""
    label = "residual variance (activation²)"
    kinds = [replace(panel(x="depth"), key=key, y_label=label) for key in ("together", "loss")]
    together = lines(4, MANY).assign(panel="together")
    page = draw_facets(pd.concat([together, crossing(4, MANY)]), kinds)
    lay_out(page)
    renderer = FigureCanvasAgg(page).get_renderer()
    legend = page.legends[0].get_window_extent(renderer)
    assert all(axis.yaxis.label.get_window_extent(renderer).y1 < legend.y0 for axis in page.axes)
    assert {axis.get_ylabel() for axis in page.axes} == {"residual variance\n(activation²)"}


def test_the_values_of_single_seeds_are_small_points():
    """Beside means at few places, also on a logarithmic axis, whose mean is geometric; not along a training."""
    rows = pd.DataFrame({"setting": "lns", "x": [4, 4, 4, 8], "seed": [0, 1, 1, 0], "value": [1.0, 4.0, 16.0, 5.0]})
    points = intervals(rows, ["setting", "x"], is_log=True).assign(panel="loss")
    assert points["seeds"].map(np.round).map(list).tolist() == [[1.0, 8.0], [5.0]]
    page = lines_drawing(points, [panel(x="depth", scale="log")]).page()
    (dots,) = page.axes[0].collections
    assert dots.get_offsets()[:, 1].tolist() == pytest.approx([1, 8, 5])
    assert "Small points: single seeds." in page.get_supxlabel()
    along = pd.concat([rows.assign(x=x) for x in range(9)])
    drawing = lines_drawing(intervals(along, ["setting", "x"]).assign(panel="loss"), [panel(x="tokens")])
    page = drawing.page()
    assert not page.axes[0].collections and "Small points" not in page.get_supxlabel() and "seeds" not in drawing.data


def test_settings_of_which_more_than_two_cross_in_more_than_16_layers_are_a_heat_map():
    rows = crossing(17, MANY[:4]).assign(x=[*range(1, 18)] * 4)
    page = draw_facets(rows, [panel()], labels={"lns": "lns, lr 0.1"})
    axis = page.axes[0]
    (image,) = axis.collections
    assert image.get_array().tolist() == rows["mean"].to_numpy().reshape(4, 17).tolist()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["baseline", "lns, lr\u00a00.1", *MANY[2:4]]
    middles = [(x + 0.5, y + 0.5) for y in range(4) for x in range(17)]
    assert not page.legends and [*axis.marks[["x", "y"]].itertuples(index=False, name=None)] == middles
    assert "Heat maps show means; their intervals are in the CSV" in " ".join(page.get_supxlabel().split())
    apart = rows.assign(mean=lines(17, MANY[:4])["mean"])
    for fewer in (rows[rows["x"] < 17], rows[rows["setting"] != "lns"], apart):
        assert draw_facets(fewer, [panel()]).axes[0].get_lines()


def test_a_panel_without_spread_is_left_out_and_told():
    rows = lines(3)
    even = rows.assign(panel="solved", mean=7.0, lo=7.0, hi=7.0)
    kinds = [panel(), Panel(key="solved", x_label="x", y_label="solved\ndifficulty")]
    page = draw_facets(pd.concat([rows, even]), kinds)
    assert len(page.axes) == 1 and "the same everywhere: solved difficulty." in " ".join(page.get_supxlabel().split())
    assert len(draw_facets(even, kinds[1:]).axes) == 1  # alone it is drawn
