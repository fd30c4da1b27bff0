"""The forest: the numbers of the frame, filled only where there is a verdict; readable ratios."""

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from support.runs_frame import grid

from sparsedepth.effects.cells import COSTS
from sparsedepth.plots import forest
from sparsedepth.plots.page import NothingToDraw, render
from sparsedepth.store.query_result import QueryResult

AXES = {"n_layers": [12, 24], "depth_scale": ["none", "lns"], "n_kv_heads": [4, 1], "seed": [0, 1, 2]}


def summary(config):
    noise = np.random.default_rng([config.seed, config.n_layers]).normal() * 0.01
    lns = config.depth_scale == "lns"
    loss = 3 - (0.2 + 0.001 * config.n_layers) * lns + noise + 1e-4 * config.n_layers * (config.n_kv_heads == 1)
    loss += 1e-5 * (config.seed - 1) * lns  # without a spread over seeds an effect has no interval
    return {"val_loss": loss, "residual_variance_last": (100 + config.seed) / (1 + 9 * lns)}


class Frames:
    """Stands for a store that holds these runs."""

    def __init__(self, runs):
        self.runs = runs

    def frame(self, text):
        return self.runs

    def sql(self, text):
        """No run is one of tuning."""
        return QueryResult(columns=("trained", "of_tuning"), rows=((len(self.runs), 0),))


@pytest.fixture(scope="module", autouse=True)
def without_settings():
    """The forest has the settings of the frame."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsedepth.plots.runs.setting_names", lambda store, *without: {})
        yield


@pytest.fixture(scope="module")
def store():
    return Frames(grid(AXES, summary))


def test_every_effect_is_a_row_with_its_numbers(store):
    data = forest.effects(store).data
    settings = ["depth_scale=lns", "n_kv_heads=1", "n_kv_heads=1, depth_scale=lns"]
    assert len(data) == 2 * len(settings) * 2  # outcomes, settings, depths
    assert sorted(set(data["setting"])) == sorted(settings)
    lns = data[(data["outcome"] == "val_loss") & (data["setting"] == "depth_scale=lns")]
    assert lns["estimate"].tolist() == pytest.approx([-0.212, -0.224])
    assert set(lns["verdict"]) == {"lower"}
    ratio = data[(data["outcome"] == "residual_variance_last") & (data["setting"] == "depth_scale=lns")]
    assert set(ratio["unit"]) == {"ln ratio"} and np.exp(ratio["estimate"]).to_numpy() == pytest.approx(0.1)


def test_the_legend_has_the_depths_that_are_drawn():
    """At 4 layers the baseline alone was run."""
    runs = grid({**AXES, "n_layers": [4, 12, 24]}, summary)
    away = (runs["depth_scale"] != "none") | (runs["n_kv_heads"] != 4)
    (legend,) = forest.effects(Frames(runs[~away | (runs["n_layers"] > 4)])).page().legends
    assert [text.get_text() for text in legend.get_texts()] == ["12 layers", "24 layers"]


def test_filled_has_a_verdict(store):
    drawing = forest.effects(store)
    axis = drawing.page().axes[0]
    faces = {}
    for points in axis.collections:
        if isinstance(points, PathCollection):  # of one depth
            faces |= dict(zip(points.get_offsets()[:, 0], map(to_hex, points.get_facecolors()), strict=True))
    data = drawing.data[drawing.data["outcome"] == "val_loss"]
    assert sorted(faces) == pytest.approx(sorted(data["estimate"]))
    for row in data.itertuples():
        hollow = faces[row.estimate] == "#ffffff"
        assert hollow == (row.verdict == "not shown")


def test_a_task_with_another_budget_is_no_effect():
    runs = grid({"n_layers": [12, 24], "corpus,seq_len": [("a", 512), ("b", 1024)], "seed": [0, 1]}, summary)
    assert len(forest.effects(Frames(runs)).data)
    other = runs["corpus"] == "b"
    for name in {*COSTS.values()} & {*runs}:
        runs[name] = runs[name].where(~other, 2 * runs[name])
    with pytest.raises(NothingToDraw, match="agree in tokens, parameters or FLOPs"):
        forest.effects(Frames(runs))


def test_nothing_to_compare_is_an_error():
    alone = Frames(grid({"seed": [0, 1]}, summary, n_layers=12))
    with pytest.raises(NothingToDraw, match="all complete runs have one configuration: there is nothing to compare"):
        forest.effects(alone)


def test_a_name_with_dollar_signs_is_not_a_formula():
    runs = grid({"corpus": [r"$\frac$ a", r"$\frac$ b"], "seed": [0, 1, 2]}, summary, n_layers=12)
    text = render(forest.effects(Frames(runs)).page, ".svg").pictures[0].decode()
    assert r"$\frac$" in text


def test_different_lr_are_shown_next_to_the_variance(store):
    """lr moves the variance as well, so its ratio is no evidence of the setting alone."""
    data = forest.effects(store).data
    data = data[data["outcome"] == forest.VARIANCE]
    for before, is_named in ((0.003, True), (0.006, False)):
        page = forest.page_of_effects(data.assign(lr=0.006, lr_baseline=before), [12, 24])
        assert ("0.003 → 0.006" in [text.get_text() for text in page.axes[0].texts]) == is_named
        assert ("changes residual variance" in " ".join(page.get_supxlabel().split())) == is_named


def test_names_of_many_lines_do_not_lie_over_another(store):
    data = forest.effects(store).data
    scalars = "residual_scalars=True, scalars_start=falling, lr_of={first_scalars: 10, residual_scalars: 0.1}, "
    data = data.assign(setting=scalars + data["setting"])
    page = render(lambda: forest.page_of_effects(data, [12, 24])).page
    page.canvas.draw()
    labels = page.axes[0].get_yticklabels()
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) == 3 and min(len(label.get_text().splitlines()) for label in labels) > 3
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
