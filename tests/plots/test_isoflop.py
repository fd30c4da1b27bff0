"""The figure `isoflop`: its numbers by hand, its envelope, and when it is not drawn."""

import pytest
from support.budget_results import FLOPS, budget_results, cells_of_rows, rows_of

from sparsedepth.plots.depth import by_budget
from sparsedepth.plots.draw import draw
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.scaling.crossover import crossovers
from sparsedepth.store.connection import open_store
from sparsedepth.store.import_table import import_table


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return budget_results(tmp_path_factory.mktemp("budgets"))


def test_every_point_with_its_interval_and_the_lower_envelope(results, tmp_path):
    with open_store(results) as store:
        figures = draw(store, "isoflop", tmp_path / "iso.png")
    data = figures.drawings["isoflop"].data
    assert list(dict.fromkeys(data["panel"])) == ["baseline", "depth_scale=lns"]
    line = data[(data["panel"] == "baseline") & (data["n_layers"] == 16)]
    assert list(line["x"]) == list(FLOPS) and set(line["n_seeds"]) == {3}
    at = line[line["x"] == 4e12].iloc[0]
    assert at["mean"] == pytest.approx(1.5 + 0.01, abs=0.001) and at["lo"] < at["mean"] < at["hi"]
    # At 1, 2 and 8e12 FLOPs, and beyond, the losses are .758, .616, .379 and .330 at 4 layers; .871, .660, .379 ...
    lowest = data[data["is_lowest"] & (data["panel"] == "baseline")]
    assert {(n, C) for n, C in zip(lowest["n_layers"], lowest["x"], strict=True)} >= {
        (4, 1e12), (4, 2e12), (16, 8e12), (16, 1.6e13),
    }  # fmt: skip
    text = figures.drawings["isoflop"].page().get_supxlabel()
    assert "n_layers=16: worth its cost from" in text and (tmp_path / "iso.csv").exists()


def test_budgets_that_are_equal_but_for_rounding_are_one_place_of_the_envelope():
    """Of three budgets, 8 layers spend 0.05% less than 4 and lose 0.1 more: no point of theirs is the lowest."""
    rows = [
        (depth, "baseline", seed, (1 - 0.0005 * (depth == 8)) * budget, 3.0 - 0.1 * k + 0.1 * (depth == 8), 1000.0)
        for depth in (4, 8)
        for k, budget in enumerate((1e12, 2e12, 4e12))
        for seed in range(3)
    ]
    runs = rows_of(rows)
    data = by_budget(runs, crossovers(cells_of_rows(runs)), "val_loss").data
    assert data["x"].nunique() == 3 and set(data.loc[data["is_lowest"], "n_layers"]) == {4}


@pytest.mark.parametrize("known", [[], [1_000_000]])
def test_budgets_are_told_apart_by_flops_where_an_import_does_not_state_tokens(tmp_path, known):
    tokens = {4e11: None, 8e11: None} | dict(zip([4e11], known, strict=False))
    lines = [f"{depth},{seed},{tokens[C] or ''},{C:g},{2 - C / 1e12 + 0.01 * seed + 1e-3 * depth * seed}"
             for depth in (4, 8) for C in tokens for seed in range(3)]  # fmt: skip
    (tmp_path / "runs.csv").write_text("\n".join(["l,s,t,c,y", *lines]))
    fields = "{n_layers: l, seed: s, train_flops: c, val_loss: y, train_tokens: {of: t, optional: true}}"
    (tmp_path / "map.yaml").write_text(f"source: x\nfields: {fields}\ncluster: y\n")
    import_table(tmp_path / "runs.csv", tmp_path / "map.yaml", tmp_path / "theirs")
    with open_store(tmp_path / "theirs") as store:
        data = draw(store, "isoflop").drawings["isoflop"].data
    assert data[["n_layers", "x", "n_seeds"]].to_numpy().tolist() == [[n, C, 3] for n in (4, 8) for C in tokens]
    assert data["train_tokens"].dropna().tolist() == 2 * known


def test_equal_flops_or_one_depth_are_no_curve(tmp_path):
    budget_results(tmp_path / "one", budgets=[2.7e12])
    with open_store(tmp_path / "one") as store, pytest.raises(NothingToDraw, match="no depth was run at two budgets"):
        draw(store, "isoflop")


def test_a_setting_of_one_budget_is_on_the_axis_of_the_others():
    rows = [
        (depth, setting, seed, budget, 3.0 - 1e-13 * budget + 0.01 * depth + 0.001 * seed * depth, 1000.0)
        for depth in (4, 8)
        for setting, budgets in (("baseline", (1e12, 2e12, 4e12)), ("depth_scale=lns", (4e12,)))
        for budget in budgets
        for seed in range(3)
    ]
    runs = rows_of(rows)
    page = by_budget(runs, crossovers(cells_of_rows(runs)), "val_loss").page()
    first, second = (axis.get_xlim() for axis in page.axes)
    assert first == second and first[0] < 1e12 < 4e12 < first[1]
    said = " ".join(page.get_supxlabel().split())
    assert "compared from 1e12 to 4e12 FLOPs" in said and "compared at 4e12 FLOPs" in said
