"""Searches: no proposal is a baseline; the front, importances and partial dependence of a planted landscape; again."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml
from support.made_up_runs import MANIFEST, make_run

from sparsedepth.cli import main
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.run import RunConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.effects.surrogate import Axis, axes_of, importances, proposals, search_lines, search_table, surrogate
from sparsedepth.plan.tasks import Plan
from sparsedepth.plots.draw import FIGURES, default_figure, draw
from sparsedepth.plots.page import NothingToDraw
from sparsedepth.plots.search import page_of_slices
from sparsedepth.store.best import best, heading, text
from sparsedepth.store.connection import open_store
from sparsedepth.store.search import on_front, search_of

BASE = {"d_model": 16, "n_heads": 2, "seq_len": 32, "batch_tokens": 128, "train_tokens": 1280}
SEARCH = {
    "name": "s",
    "question": "q?",
    "hypothesis": "h",
    "base": BASE,
    "space": {
        "lr": {"low": 1e-3, "high": 1e-1, "log": True},
        "weight_decay": {"low": 0.01, "high": 1.0, "log": True},
        "depth_scale": ["none", "lns"],
    },
    "sampler": "tpe",
    "n_trials": 24,
    "objectives": ["val_loss", "train_flops"],
    "seeds": [0],
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
        summary = {"val_loss": loss, "train_flops": 1e9 + i, "params_total": 1000, "tokens_trained": 1280}
        make_run(root, config, {**summary, **measured}, manifest={**MANIFEST, "started": f"2026-01-02T03:04:{i:02}"})
    return root


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("searches") / "s")


def test_the_front_by_hand():
    values = np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0], [np.nan, 0.0], [1.0, 3.0]])
    assert on_front(values, ["val_loss", "train_flops"]).tolist() == [True, True, False, True, False, True]
    assert on_front(values[:, :1], ["usefulness"]).tolist() == [False, False, False, True, False, False]


def test_best_shows_a_front_and_no_baseline(searched):
    with open_store(searched) as store:
        ranking = best(store, top=2)
        shown = " ".join(f"{heading(ranking)}\n{text(ranking, 200)}".split())
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


def test_importance_and_dependence_of_a_planted_landscape(searched):
    with open_store(searched) as store:
        search, runs = search_of(store.roots), store.frame("select * from runs")
    frame = proposals(runs, search)
    assert len(frame) == 24 and frame["started"].is_monotonic_increasing
    fitted = surrogate(frame, search, "val_loss")
    assert fitted.skill > 0.8 and fitted.error < 0.3
    curve = fitted.partial("lr")
    lowest = min(curve, key=lambda point: point[1])[0]
    assert 0.004 < lowest < 0.025
    by_choice = dict(fitted.partial("depth_scale"))
    assert by_choice["none"] - by_choice["lns"] == pytest.approx(0.3, abs=0.15)
    for shares in importances(frame, search, "val_loss").values():
        assert sum(shares.values()) == pytest.approx(1) and max(shares, key=shares.get) == "lr"
        assert shares["weight_decay"] < 0.2


def test_noise_is_not_believed(searched):
    with open_store(searched) as store:
        search, runs = search_of(store.roots), store.frame("select * from runs")
    noise = runs.assign(val_loss=np.random.default_rng(1).standard_normal(len(runs)))
    fitted = surrogate(proposals(noise, search), search, "val_loss")
    assert fitted.skill < 0.2
    assert "partial dependence unreliable" in "\n".join(search_lines(noise, search, "val_loss"))
    assert surrogate(proposals(runs.head(5), search), search, "val_loss") is None
    assert not importances(proposals(runs.head(5), search), search, "val_loss")


def test_few_proposals_of_pure_noise_have_no_skill_on_average(searched):
    with open_store(searched) as store:
        search, runs = search_of(store.roots), store.frame("select * from runs")
    frame, generator = proposals(runs.head(10), search), np.random.default_rng(0)
    noise = [surrogate(frame.assign(val_loss=generator.standard_normal(10)), search, "val_loss") for _ in range(60)]
    assert np.mean([fitted.skill for fitted in noise]) < 0.05


def test_effects_of_a_search_are_importances(searched, capfd):
    with pytest.raises(SystemExit) as ended:
        main.run(["effects", str(searched)])
    told = capfd.readouterr().out
    assert ended.value.code == 0 and "importance" in told and "PED-ANOVA" in told and "vs " not in told
    with open_store(searched) as store:
        table = search_table(store.frame("select * from runs"), search_of(store.roots), "val_loss")
    assert {row[1] for row in table.rows} == {"lr", "weight_decay", "depth_scale"} and len(table.rows) == 25 + 25 + 2


def test_a_degenerate_objective_of_a_search_is_named(searched):
    with open_store(searched) as store:
        search, runs = search_of(store.roots), store.frame("select * from runs")
    asked = replace(search, definition=search.definition.model_copy(update={"objectives": ["usefulness"]}))
    assert not any("degenerate" in line for line in search_lines(runs.assign(usefulness=0.1 * runs["lr"]), asked))
    heading, caution, analysis = list(search_lines(runs.assign(usefulness=0.0), asked))[1:]
    assert heading.startswith("\nusefulness") and analysis == "  no analysis: all values are equal"
    assert caution.startswith("  usefulness is degenerate: 0 in every run (24 of 24 runs)")


def test_a_search_gives_no_recipe(searched, capfd):
    with pytest.raises(SystemExit) as ended:
        main.run(["recipe", str(searched)])
    assert ended.value.code == 2 and "rerun the best points" in capfd.readouterr().err


def test_figures_of_a_search(searched, tmp_path):
    with open_store(searched) as store:
        assert default_figure(store) == "slices"
        for name in ("history", "parallel", "slices"):
            drawn = draw(store, name, tmp_path / f"{name}.png")
            assert len(drawn.drawings[name].data) >= 24 and (tmp_path / f"{name}.png").stat().st_size > 5000
        assert drawn.drawings["slices"].data["kind"].nunique() == 2
        steps = draw(store, "history").drawings["history"].data["best_val_loss"]
        for name in ("effects", "learning_rate", "variance", "curves"):
            with pytest.raises(
                NothingToDraw, match="a search chose these runs by earlier results; draw --figure slices"
            ):
                draw(store, name)
    assert steps.is_monotonic_decreasing


def test_figures_name_a_degenerate_objective(tmp_path, searched):
    constant = fill(tmp_path / "s", {**SEARCH, "objectives": ["usefulness", "val_loss"]}, usefulness=0.5)
    for root, is_named in ((constant, True), (searched, False)):
        with open_store(root) as store:
            for name in ("history", "parallel", "slices"):
                said = " ".join(FIGURES[name].drawing(store).page().get_supxlabel().split())
                assert ("Degenerate, so no evidence: usefulness (0.5 in every run)." in said) == is_named


def test_the_numbers_of_a_choice_stand_by_their_size(searched):
    """Not by their first digit: 12, 3, 6."""
    with open_store(searched) as store:
        search, frame = search_of(store.roots), proposals(store.frame("select * from runs"), search_of(store.roots))
    frame["depth_scale"] = [(12, 3, 6, None)[i % 4] for i in range(len(frame))]
    (axis,) = [axis for axis in axes_of(frame, search) if axis.name == "depth_scale"]
    assert axis.values == (3, 6, 12, None)
    data = pd.DataFrame({"axis": axis.name, "kind": "proposal", "value": frame[axis.name], "mean": frame["val_loss"]})
    panel = page_of_slices([axis], data, "val_loss", "").axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["3", "6", "12", "None"]
    assert panel.collections[0].get_offsets()[:4, 0].tolist() == [2, 0, 1, 3]


def test_a_choice_between_floats_of_which_one_is_whole(searched):
    """1.0 is shown as 1: its importance is that of the option that it is."""
    with open_store(searched) as store:
        search, frame = search_of(store.roots), proposals(store.frame("select * from runs"), search_of(store.roots))
    named = importances(frame, search, "val_loss")
    frame["depth_scale"] = [0.1 if scale == "lns" else 1.0 for scale in frame["depth_scale"]]  # as they sort
    assert importances(frame, search, "val_loss") == named
    for shares in named.values():
        assert set(shares) == {"lr", "weight_decay", "depth_scale"} and shares["depth_scale"] > 0


def test_a_logarithmic_axis_has_few_labels():
    """From 0.0013 to 0.029: 1, 2 and 5 of each decade, none between them, where labels would lie on each other."""
    axis = Axis(name="lr", values=(0.001, 0.05), is_range=True, is_log=True)
    data = pd.DataFrame({"axis": "lr", "kind": "proposal", "value": [0.0013, 0.0022, 0.029], "mean": [5.4, 5.2, 3.0]})
    panel = page_of_slices([axis], data, "val_loss", "").axes[0]
    panel.figure.draw_without_rendering()
    shown = [text for text in (*panel.xaxis.get_ticklabels(), *panel.xaxis.get_ticklabels(minor=True))
             if text.get_text() and 0.0013 <= text.get_position()[0] <= 0.029]  # fmt: skip
    assert [text.get_text() for text in shown] == ["0.002", "0.005", "0.01", "0.02"]


def test_the_advice_is_a_sweep_that_runs(searched, tmp_path, capfd):
    out = tmp_path / "again.yaml"
    with pytest.raises(SystemExit) as ended:
        main.run(["best", str(searched), "--top", "3", "--again", str(out)])
    assert ended.value.code == 0 and "3 configurations, seeds 1, 2, 3, 4, 5" in capfd.readouterr().out
    definition = build(SweepDefinition, read_yaml(out), "again.yaml")
    runs = Plan(definition).runs()
    assert len(runs) == 15 and {run.config.seed for run in runs} == {1, 2, 3, 4, 5}
    with open_store(searched) as store:
        first = store.frame("select * from runs order by val_loss limit 3")
    assert {run.config.lr for run in runs} == set(first["lr"])
    with pytest.raises(SystemExit) as ended:
        main.run(["best", str(searched), "--again", str(out)])
    assert ended.value.code == 2 and "exists" in capfd.readouterr().err
