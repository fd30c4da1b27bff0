"""Mean and interval by hand; panels with their lines, scales and ranges; a page for a screen and for a paper."""

import math

import matplotlib
import numpy as np
import pandas as pd
import pytest

from sparsedepth.plots.facets import Panel, draw_facets, intervals, range_of
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
