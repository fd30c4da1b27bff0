"""Searches: no proposal is a baseline; the front, importances and figures of a planted landscape; again."""

import math

import numpy as np
import pytest
import yaml
from matplotlib import pyplot, rc_context
from support.made_up_runs import MANIFEST, make_run

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.importance import by_objective, importances, proposals, search_table, study_of
from sparsedepth.plan.tasks import Plan
from sparsedepth.plots.draw import FIGURES, default_figure, draw
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.plots.points import numbered, page_of_slices
from sparsedepth.plots.style import RC
from sparsedepth.quantities import axis_label
from sparsedepth.store.best import best
from sparsedepth.store.connection import open_store
from sparsedepth.store.search import on_front, search_of
from sparsedepth.words.best import heading, ranking_table
from sparsedepth.words.search import importance_lines

BASE = {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280}
DECAY = {"low": 0.01, "high": 1.0, "log": True}
SPACE = {"lr": {"low": 1e-3, "high": 1e-1, "log": True}, "weight_decay": DECAY, "depth_scale": ["none", "lns"]}
SEARCH = {
    **{"name": "s", "question": "q?", "hypothesis": "h", "base": BASE, "space": SPACE, "seeds": [0]},
    **{"sampler": "tpe", "n_trials": 24, "objectives": ["val_loss", "train_flops"]},
}


def fill(root, definition=SEARCH, n=24, **measured):
    """Proposals at random: val_loss is best at lr 0.01 and better by 0.3 with lns; weight decay does nothing."""
    generator = np.random.default_rng(0)
    root.mkdir()
    (root / "sweep.yaml").write_text(yaml.safe_dump(definition))
    for i in range(n):
        lr, decay = 10 ** generator.uniform(-3, -1), 10 ** generator.uniform(-2, 0)
        scale = ("none", "lns")[i % 2]
        loss = 3 + 0.2 * math.log(lr / 0.01) ** 2 - 0.3 * (scale == "lns") + 0.002 * generator.standard_normal()
        config = RunConfig(**BASE, n_layers=2, lr=lr, weight_decay=decay, depth_scale=scale)
        summary = {"val_loss": loss, "train_flops": 1e9 * 1.02**i, "params_total": 1000, "tokens_trained": 1280}
        make_run(root, config, {**summary, **measured}, manifest={**MANIFEST, "started": f"2026-01-02T03:04:{i:02}"})
    return root


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("searches") / "s")


def test_the_front_by_hand():
    values = np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0], [np.nan, 0.0], [1.0, 3.0]])
    assert on_front(values, ["val_loss", "train_flops"]).tolist() == [True, True, False, True, False, True]
    flops = np.array([[2.0, 1e12], [1.0, 1.009e12], [2.0, 0.98e12]])  # 0.9% and 2% apart: the first has no advantage
    assert on_front(flops, ["val_loss", "train_flops"]).tolist() == [False, True, True]
    assert on_front(values[:, :1], ["usefulness"]).tolist() == [False, False, False, True, False, False]


def test_best_shows_a_front_and_no_baseline(searched):
    with open_store(searched) as store:
        ranking = best(store, top=2)
        shown = " ".join(f"{heading(ranking)}\n{ranking_table(ranking, 200)}".split())
    notes = [row[ranking.table.columns.index("note")] for row in ranking.table.rows]
    assert "front" in notes and not any("baseline" in (note or "") for note in notes)
    said = " ".join(heading(ranking).split())
    assert "optimistic, and which proposals are on the front is partly chance, until run with new seeds" in said
    assert ranking.by == "val_loss" and "train_flops" in ranking.table.columns
    assert "lr=" in ranking.settings[0] and "weight_decay=" in ranking.settings[0]
    assert "without a baseline" in shown and "baseline" not in shown.replace("without a baseline", "")
    assert len(ranking.table.rows) > 2  # the whole front, not the first two


def test_a_grid_is_no_search(tmp_path):
    grid = {**SEARCH, "sampler": "grid", "space": {"lr": [1e-3, 1e-2]}}
    grid.pop("n_trials")
    root = fill(tmp_path / "g", grid, n=2)
    with open_store(root) as store:
        assert search_of(store.roots) is None and best(store).search is None
    assert search_of([root, root]) is None


def test_a_proposal_whose_other_seeds_were_ended_early_is_not_ranked_by_the_seed_that_survived(tmp_path):
    """Of the proposal of lr 0.002 the second seed was pruned: the first, the lowest of all, flatters it."""
    tmp_path.joinpath("sweep.yaml").write_text(yaml.safe_dump({**SEARCH, "seeds": [0, 1]}))
    for lr, losses in {0.002: [1.0], 0.004: [2.0, 4.0], 0.008: [2.5, 4.5]}.items():
        for seed, loss in enumerate(losses):
            config = RunConfig(**BASE, n_layers=2, lr=lr, seed=seed)
            make_run(tmp_path, config, {"val_loss": loss, "train_flops": 1e9, "usefulness": loss / 10})
    with open_store(tmp_path) as store:
        rows = [dict(zip(best(store).table.columns, row, strict=True)) for row in best(store).table.rows]
        (survivors,) = best(store, where="lr = 0.004 AND seed = 0").table.rows
        drawn = draw(store, "pareto").drawings["pareto"].data
        frame = proposals(store.frame("select * from runs"), search_of(store.roots))
    expected = [(0.004, "front"), (0.008, None), (0.002, "incomplete")]
    assert [(row["lr"], row["note"]) for row in rows] == expected
    assert survivors[-1] == "front"  # it has its seeds: one of them was asked for
    assert frame.set_index("lr")["val_loss"].isna().to_dict() == {0.002: True, 0.004: False, 0.008: False}
    assert sorted(drawn["val_loss"]) == [3.0, 3.5]


@pytest.fixture(scope="module")
def landscape(searched):
    """The search, and its proposals."""
    with open_store(searched) as store:
        search, runs = search_of(store.roots), store.frame("select * from runs")
    return search, proposals(runs, search)


def test_a_missing_value_is_no_choice_of_a_proposal_and_one_without_an_outcome_no_trial(landscape):
    search, frame = landscape
    lost = frame.assign(val_loss=[np.nan, *frame["val_loss"][1:]], lr=[*frame["lr"][:-1], None])
    trials = study_of(lost, search, "val_loss").trials
    assert len(trials) == 23 and set(trials[-1].params) == {"weight_decay", "depth_scale"}


def test_importance_of_a_planted_landscape(landscape):
    search, frame = landscape
    found = {each.axis: each for each in importances(frame, search, "val_loss")}
    assert next(iter(found)) == "lr" and set(found) == {"lr", "weight_decay", "depth_scale"}
    assert sum(each.fanova for each in found.values()) == pytest.approx(1)
    assert found["lr"].fanova > 0.5 and found["weight_decay"].fanova < 0.2
    low, high = map(float, found["lr"].best.split(",")[0].split(" to "))
    assert 0.003 < low < 0.01 < high < 0.03


def test_an_axis_that_decides_a_cost_is_what_matters_to_it(landscape):
    """PED-ANOVA gave 1% where the axis decides everything, if the best proposals have the values of the others."""
    search, frame = landscape
    cost = np.where(frame["depth_scale"] == "lns", 1.0, 2.0)
    frame = frame.assign(val_loss=cost + 0.001 * frame.index % 0.007)
    (first, *_) = importances(frame, search, "val_loss")
    assert first.axis == "depth_scale" and first.fanova > 0.95
    share = (frame["depth_scale"] == "lns").mean()
    assert first.best == f"lns in 6 of 6 ({share:.0%} of all proposals)"


def test_an_axis_that_some_proposals_lack_has_no_importance(landscape):
    search, frame = landscape
    lacking = frame.assign(lr=[*frame["lr"][:-1], None])
    found = {each.axis: each for each in importances(lacking, search, "val_loss")}
    assert found["lr"].fanova is None and found["weight_decay"].fanova is not None and " to " in found["lr"].best


def test_the_best_of_an_objective_that_is_to_be_high_are_the_highest(landscape):
    """The same landscape, upside down, has the same importances."""
    search, frame = landscape
    turned = search.model_copy(update={"objectives": ["usefulness"]})
    upside_down = importances(frame.assign(usefulness=-frame["val_loss"]), turned, "usefulness")
    for one, other in zip(upside_down, importances(frame, search, "val_loss"), strict=True):
        assert (one.axis, one.best, one.fanova) == (other.axis, other.best, pytest.approx(other.fanova))


def test_few_proposals_and_equal_values_have_no_importance(landscape):
    search, frame = landscape
    assert [len(importances(frame.head(n), search, "val_loss")) for n in (8, 7)] == [3, 0]
    assert not importances(frame.assign(val_loss=1.0), search, "val_loss")


def test_effects_of_a_search_are_importances(searched, command):
    told, _ = command("effects", searched)
    assert "lr: importance fANOVA" in told and "vs " not in told
    assert "Of few proposals an axis that does nothing has a share, too." in told
    with open_store(searched) as store:
        table = search_table(by_objective(store.frame("select * from runs"), search_of(store.roots), "val_loss"))
    assert table.columns == ("objective", "axis", "fanova", "best_values", "proposals")
    assert {row[1] for row in table.rows} == {"lr", "weight_decay", "depth_scale"} and len(table.rows) == 3


def test_a_degenerate_objective_of_a_search_is_named(searched):
    with open_store(searched) as store:
        search, runs = search_of(store.roots), store.frame("select * from runs")
    asked = search.model_copy(update={"objectives": ["usefulness"]})

    def lines(usefulness):
        return [*importance_lines(by_objective(runs.assign(usefulness=usefulness), asked), "")]

    assert not any("degenerate" in line for line in lines(0.1 * runs["lr"]))
    heading, caution, analysis = lines(0.0)[1:]
    assert heading.startswith("\nusefulness") and analysis == "  no analysis: all values are equal"
    assert caution.startswith("  usefulness is degenerate: 0 in every run (24 of 24 runs)")


def test_a_search_gives_no_recipe(searched, command):
    assert "rerun the best points" in command("recipe", searched, code=2)[1]


def test_figures_of_a_search(searched, tmp_path):
    with open_store(searched) as store:
        assert default_figure(store) == "pareto"
        for name, n_rows in (("slices", 24), ("pareto", 24)):
            drawn = draw(store, name, tmp_path / f"{name}.png")
            assert len(drawn.drawings[name].data) == n_rows and (tmp_path / f"{name}.png").stat().st_size > 5000
        front = drawn.drawings["pareto"].data
        for name in ("effects", "learning_rate", "variance", "curves"):
            with pytest.raises(NothingToDraw, match="a search chose these runs by earlier results; draw --figure sl"):
                draw(store, name)
        ranked = best(store).table.records()
    on_front = {row["lr"] for row in ranked if row["note"] == "front"}
    assert set(front.loc[front["on_front"], "train_flops"]) and len(on_front) == front["on_front"].sum()
    assert not pyplot.get_fignums(), "no figure stays open"


def test_figures_name_a_degenerate_objective(tmp_path, searched):
    constant = fill(tmp_path / "s", {**SEARCH, "objectives": ["usefulness", "val_loss"]}, n=8, usefulness=0.5)
    all_figures = ("slices", "pareto")
    for root, names, is_named in ((constant, all_figures, True), (searched, ("slices",), False)):
        with open_store(root) as store:
            for name in names:
                said = " ".join(FIGURES[name].drawing(store).page().get_supxlabel().split())
                assert ("Degenerate, so no evidence: usefulness (0.5 in every run)." in said) == is_named


def test_axes_have_labels_and_choices_their_names_in_order(landscape):
    """Numbers by their size, not by their first digit: 12, 3, 6; a logarithmic range with few labels."""
    search, frame = landscape
    frame = frame.assign(depth_scale=[(12, 3, 6, None)[i % 4] for i in range(len(frame))])
    with rc_context(RC):
        page = page_of_slices(search, numbered(frame, "val_loss"), "")
        page.draw_without_rendering()
    panels = {axes.get_xlabel(): axes for axes in page.axes}
    assert set(panels) == {"proposal, in order of start", "depth_scale", "lr", "weight_decay"}
    assert [label.get_text() for label in panels["depth_scale"].get_xticklabels()] == ["3", "6", "12"]
    places = panels["depth_scale"].collections[0].get_offsets()
    known = frame.dropna(subset=["depth_scale"])
    assert sorted(places[:, 0].tolist()) == [0] * 6 + [1] * 6 + [2] * 6 and len(known) == 18
    assert panels["depth_scale"].get_ylabel() == axis_label("val_loss") and panels["lr"].get_xscale() == "log"
    assert len({tuple(axes.collections[0].get_clim()) for name, axes in panels.items() if name}) == 1


def test_an_objective_that_is_compared_by_ratio_has_a_logarithmic_axis(landscape):
    search, frame = landscape
    for name, scale in (("residual_variance_last", "log"), ("val_loss", "linear")):
        asked = search.model_copy(update={"objectives": [name]})
        values = numbered(frame.assign(**{name: np.exp(frame["val_loss"])}), name)
        for axes in page_of_slices(asked, values, "").axes:
            assert axes.get_yscale() == scale and axes.get_ylabel() == axis_label(name)


def test_the_advice_is_a_sweep_that_runs(searched, tmp_path, command):
    out = tmp_path / "again.yaml"
    assert "3 configurations, seeds 1, 2, 3, 4, 5" in command("best", searched, "--top", 3, "--again", out)[0]
    definition = build(SweepDefinition, read_yaml(out), "again.yaml")
    runs = Plan(definition).runs()
    assert len(runs) == 15 and {run.config.seed for run in runs} == {1, 2, 3, 4, 5}
    with open_store(searched) as store:
        first = store.frame("select * from runs order by val_loss limit 3")
    assert {run.config.lr for run in runs} == set(first["lr"])
    assert "exists" in command("best", searched, "--again", out, code=2)[1]


def test_null_on_an_axis_is_a_choice_of_a_search(tmp_path, command):
    """Planted: a window costs 0.5 nat/token, and null has none; the base has one."""
    space = {"sliding_window": [None, 8], "weight_decay": DECAY}
    folder = tmp_path / "s"
    folder.mkdir()
    parts = {"space": space, "objectives": ["val_loss"], "base": BASE | {"sliding_window": 4}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SEARCH | parts))
    generator = np.random.default_rng(0)
    for i in range(24):
        window, decay = (None, 8)[i % 2], 10 ** generator.uniform(-2, 0)
        config = RunConfig(**BASE, n_layers=2, weight_decay=decay, sliding_window=window)
        loss = 3 + 0.5 * (window is not None) + 0.002 * generator.standard_normal()
        make_run(folder, config, {"val_loss": loss}, manifest={**MANIFEST, "started": f"2026-01-02T03:04:{i:02}"})
    with open_store(folder) as store:
        search = search_of(store.roots)
        frame = proposals(store.frame("select * from runs"), search)
    first, second = importances(frame, search, "val_loss")
    assert first.axis == "sliding_window" and first.fanova > 0.6 > second.fanova
    assert first.best == "null in 6 of 6 (50% of all proposals)"
    command("best", folder, "--top", 2, "--again", tmp_path / "again.yaml")
    again = build(SweepDefinition, read_yaml(tmp_path / "again.yaml"), "x")
    assert {run.config.sliding_window for run in Plan(again).runs()} == {None}
