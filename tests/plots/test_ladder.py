"""The figure of a ladder: its numbers are those of the law, and it says what is no ladder."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.budget_results import rows_of

from sparsedepth.plots import ladder
from sparsedepth.plots.page import NothingToDraw, render
from sparsedepth.scaling import speedup
from sparsedepth.scaling.multiplier import laws_of

STORE = SimpleNamespace(sql=lambda query: SimpleNamespace(rows=[(False,)]))
"""Where not every budget has several seeds."""


def runs(worths=(("baseline", 1.0), ("depth_scale=lns", 1.2)), seeds=(0,)):
    """One run at each of six budgets, a depth more at each, noise of .004."""
    rng = np.random.default_rng(3)
    return rows_of(
        (depth, name, seed, C, 1.9 + 4.1 * (C * worth / 1e16) ** -0.13 + rng.normal(0, 0.004), 1.0)
        for depth, C in enumerate(np.geomspace(2e17, 6.4e18, 6), 8)
        for name, worth in worths
        for seed in seeds
    )


def test_its_numbers_are_those_of_the_law(monkeypatch):
    rows = runs()
    monkeypatch.setattr(speedup, "budget_rows", lambda store: rows)
    drawing = ladder.ladder(STORE)
    losses = {
        name: {row.train_flops: {0: row.loss} for row in own.itertuples()} for name, own in rows.groupby("setting")
    }
    law = laws_of(losses, "baseline")["depth_scale=lns"]
    worth = drawing.data[drawing.data["panel"] == "multiplier"]
    assert not law.has_drift and np.log(worth["mean"]).tolist() == pytest.approx([law.worth.estimate] * 6)
    assert np.log(worth["with_drift"]).tolist() == pytest.approx([law.worth_at(C).estimate for C in worth["x"]])
    page = drawing.page()
    assert "with its 95% interval: one value for all budgets. Pale: with a" in " ".join(page.get_supxlabel().split())
    (pale,) = (line for line in page.axes[1].get_lines() if line.get_alpha())
    assert pale.get_ydata().tolist() == worth["with_drift"].tolist()
    low, high = page.axes[1].get_ylim()
    assert worth["with_drift"].between(low, high).all() and worth["lo"].min() > low
    assert (worth["lo"] < worth["mean"]).all() and (worth["mean"] < worth["hi"]).all() and len(worth) == 6
    middle, half = law.baseline_at(np.array([1e18]))
    truth = 1.9 + 4.1 * 100**-0.13
    assert middle[0] * np.exp(-half[0]) < truth < middle[0] * np.exp(half[0])
    assert len(render(drawing.page, ".svg").pictures[0]) > 10_000


def test_a_drift_that_is_shown_is_drawn_at_each_budget(monkeypatch):
    rows = runs()
    C = rows["train_flops"] * (rows["train_flops"] / 1e18) ** 0.4
    rows["loss"] = rows["loss"].where(rows["setting"] == "baseline", 1.9 + 4.1 * (C / 1e16) ** -0.13)
    monkeypatch.setattr(speedup, "budget_rows", lambda store: rows)
    drawing = ladder.ladder(STORE)
    worth = drawing.data[drawing.data["panel"] == "multiplier"]
    assert worth["mean"].tolist() == worth["with_drift"].tolist() and worth["mean"].is_monotonic_increasing
    said = " ".join(drawing.page().get_supxlabel().split())
    assert "interval: at each budget of depth_scale=lns, whose drift is shown; else one value for all budgets." in said


def test_the_baseline_of_a_table_is_first_and_black_whatever_its_name():
    losses = {
        name: {row.train_flops: {0: row.loss} for row in own.itertuples()} for name, own in runs().groupby("setting")
    }
    named = {"vanilla": losses["baseline"], "a change": losses["depth_scale=lns"]}
    page = ladder.ladder_drawing(laws_of(named, "vanilla"), "vanilla").page()
    assert [text.get_text() for text in page.legends[0].get_texts()] == ["vanilla\xa0(baseline)", "a\xa0change"]
    (pale,) = (line for line in page.axes[1].get_lines() if line.get_alpha())
    assert [line.get_color() for line in page.legends[0].get_lines()] == ["#222222", pale.get_color()]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (runs(seeds=(0, 1)), "several seeds"),
        (runs(worths=(("baseline", 1.0),)), "a setting at 3 budgets"),
        (runs().query("n_layers < 10"), "2 budgets, and 3 of one seed are needed"),
        (runs().assign(loss=lambda rows: 9 - rows["loss"]), "does not fall with the budget"),
    ],
    ids=["seeds", "no setting", "two budgets", "rising"],
)
def test_what_is_no_ladder_says_why(rows, reason, monkeypatch):
    monkeypatch.setattr(speedup, "budget_rows", lambda store: rows)
    with pytest.raises(NothingToDraw, match=reason):
        ladder.ladder(STORE)
