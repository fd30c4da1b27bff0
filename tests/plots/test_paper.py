"""Figures for a paper: within their page at any number of runs, all of their texts inside."""

import matplotlib
import pandas as pd
import pytest
from support import report_pages

from sparsedepth.plots import page as of_page
from sparsedepth.plots.draw import FIGURES, draw, drawable
from sparsedepth.plots.facets import lines_drawing, panel_of
from sparsedepth.plots.page import NothingToDraw, render
from sparsedepth.plots.runs import Selection
from sparsedepth.plots.style import COLUMNS, TALLEST
from sparsedepth.store.connection import open_store


def parts_of(drawing, columns, monkeypatch):
    """(height in inches, the texts that leave the page) of each page that is written."""
    found = []

    def parts(page):
        for part in of_parts(page):
            renderer = page.canvas.get_renderer()
            shown = [axis for axis in page.axes if axis.get_visible()]
            legends = [*filter(None, (*page.legends, *(axis.get_legend() for axis in shown)))]
            for legend in legends:
                legend.draw(renderer)  # it has its place once it is drawn
            boxes = {axis.get_title() or axis.get_ylabel(): axis.get_tightbbox(renderer) for axis in shown}
            boxes |= {legend.get_texts()[0].get_text(): legend.get_window_extent(renderer) for legend in legends}
            dpi = page.dpi
            found.append(
                (
                    part.height,
                    [
                        name
                        for name, box in boxes.items()
                        if box.x0 < -1 or box.x1 > part.x1 * dpi + 1 or box.y0 < part.y0 * dpi - 2 or
                        box.y1 > part.y1 * dpi + 2
                    ],
                )
            )  # fmt: skip
            yield part

    of_parts = of_page._parts
    with monkeypatch.context() as patch, matplotlib.rc_context():
        patch.setattr(of_page, "_parts", parts)
        render(drawing.page, ".png", columns=columns)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(
    "kind", [report_pages.single_run, report_pages.grid, report_pages.many_runs, report_pages.search]
)
def test_every_figure_keeps_to_its_page(kind, columns, tmp_path, monkeypatch):
    n_drawn = 0
    with open_store(*kind(tmp_path / "results")) as store:
        for name, found in drawable(store, FIGURES):
            if isinstance(found, NothingToDraw):
                continue
            n_drawn += 1
            for height, outside in parts_of(found, columns, monkeypatch):
                assert height <= TALLEST + 0.1 and not outside, name
    assert n_drawn


def test_chosen_depths_and_settings_alone_are_drawn(tmp_path):
    """Others are named by an error; their numbers are those of all."""
    (folder,) = report_pages.grid(tmp_path / "results")
    with open_store(folder) as store:
        every = draw(store, "effects").drawings["effects"].data
    with open_store(folder) as store:
        only = Selection((4,), ("baseline", "depth_scale=lns"))
        some = draw(store, "effects", only=only).drawings["effects"].data
    assert {*some["n_layers"]} == {4} and {*every["n_layers"]} == {2, 4}
    assert some["lo"].tolist() == every.loc[every["n_layers"] == 4, "lo"].tolist()
    with open_store(folder) as store, pytest.raises(ValueError, match=r"n_layers 3 is not among .* drawn: 2; 4"):
        draw(store, "effects", only=Selection((3,)))
    with open_store(folder) as store, pytest.raises(ValueError, match="--columns 3 is not one of 1, 2"):
        draw(store, "effects", style="paper", columns=3)
    assert COLUMNS[1] < 3.4


def test_chosen_panels_alone_are_drawn():
    """Those of a figure whose points name them, a depth or a quantity; a name that is none of them is told."""
    points = pd.DataFrame({"setting": "baseline", "x": 4, "mean": [1.0, 2.0, 3.0], "n_seeds": 1})
    points = points.assign(panel=[4, 8, 12], lo=points["mean"] - 0.5, hi=points["mean"] + 0.5)
    whole = lines_drawing(points, [panel_of("val_loss", key, x_label="lr") for key in (4, 8, 12)])
    some = whole.of_panels(["12", "4"])
    assert some.data["mean"].tolist() == [1.0, 3.0] and (len(whole.page().axes), len(some.page().axes)) == (3, 2)
    with pytest.raises(NothingToDraw, match="panels 4, loss are not all among those of this figure: 4, 8, 12"):
        whole.of_panels(["4", "loss"])


def test_panels_are_chosen_by_their_names(tmp_path, command):
    (folder,) = report_pages.single_run(tmp_path / "results")
    command("plot", folder, "--figure", "variance", "--panels", " training@6,", "-o", tmp_path / "a.png")
    assert {*pd.read_csv(tmp_path / "a.csv")["panel"]} == {"training@6"}
    with open_store(folder) as store, pytest.raises(NothingToDraw, match="its panels cannot be chosen by name"):
        draw(store, "layer_profile", only=Selection(panels=("training@6",)))
