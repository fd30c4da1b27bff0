"""Effects where runs are lost or missing: diverged ones, settings that only tuned; and outcomes of which a higher value
is better."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from support.budget_results import rows_of
from support.runs_frame import config_of, grid, runs_frame

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import effects_frame
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.judge_ladder import judge_ladders
from sparsedepth.scaling.crossover import crossovers
from sparsedepth.scaling.points import budget_cells, budget_rows
from sparsedepth.scaling.speedup import speedups
from sparsedepth.store.connection import open_store

RATES = (0.001, 0.002, 0.004)
SETTINGS = {"base": {}, "lns": {"depth_scale": "lns"}, "sandwich": {"norm": "sandwich"}}


def tuned(outcome="val_loss", better=-1, chosen=None, dead=()) -> pd.DataFrame:
    """Three settings, tuned by two seeds, five results; LNS is better by 0.3, the others are equal. Those `dead`
    diverged in every run."""
    generator, rows = np.random.default_rng(0), []
    for name, fields in SETTINGS.items():
        best = (chosen or {}).get(name, 0.002)
        for lr in RATES:
            for seed in (100, 101, *(range(5) if lr == best else ())):
                loss = 3 + 0.02 * math.log2(lr / best) ** 2 - 0.3 * (name == "lns")
                value = {outcome: -better * loss + 0.01 * generator.standard_normal()}
                role = "rejected" if lr != best else "tuning" if seed >= 100 else "best"
                facts = {"outcome": "diverged"} if name in dead else value
                config = config_of(n_layers=4, lr=lr, seed=seed, **fields)
                rows.append((config, {**facts, "tuned_fields": "lr", "tuned_by": outcome, "tuning": role}))
    return runs_frame(rows)


def effect(runs: pd.DataFrame, setting="depth_scale=lns", outcome="val_loss") -> dict:
    found = effects_frame(cells_of(runs, outcome))
    (row,) = found[(found["question"] == "setting") & (found["setting"] == setting)].to_dict("records")
    return row


def test_a_setting_that_diverged_at_every_lr_takes_no_interval_from_the_others():
    healthy, beside = effect(tuned()), effect(tuned(dead=("sandwich",)))
    assert healthy["verdict"] == beside["verdict"] == "lower"
    assert beside["estimate"] == pytest.approx(healthy["estimate"], abs=0.01)


def test_tuning_runs_of_a_setting_without_results_are_not_the_baselines():
    runs = tuned()
    waits = runs["norm"] == "sandwich"
    runs.loc[waits, "val_loss"] += 1.0
    part = runs[~waits | runs["tuning"].isin(["tuning", "rejected"])]
    assert effect(part)["estimate"] == pytest.approx(effect(runs[~waits])["estimate"], abs=0.01)
    assert "depth_scale=lns" in {change.setting for change in derive(part).changes}


def test_a_diverged_run_that_stopped_early_makes_its_setting_no_cheaper():
    gain = {"val_loss": 2.5}
    runs = grid({"depth_scale": ["none", "lns"], "seed": range(6)}, lambda c: gain, n_layers=4)
    runs["val_loss"] += np.where(runs["depth_scale"] == "lns", 0, 0.5) + 0.01 * np.random.default_rng(0).normal(size=12)
    runs["train_flops"] = np.where(runs["depth_scale"] == "lns", 1.15e12, 1e12)
    lost = (runs["depth_scale"] == "lns") & (runs["seed"] == 0)
    runs.loc[lost, ["outcome", "val_loss", "train_flops"]] = ["diverged", None, 1e11]
    assert effect(runs)["flops"] == pytest.approx(1.15)


def test_where_a_higher_outcome_is_better_the_winner_is_the_higher_side():
    """The curve of an accuracy that tuning chose has its highest point inside; a gain counts only if few runs of the
    better side were lost."""
    runs = tuned("val_accuracy", better=1)
    gain = effect(runs, outcome="val_accuracy")
    assert gain["verdict"] == "higher" and gain["estimate"] == pytest.approx(0.3, abs=0.02)
    at_result = (runs["depth_scale"] == "lns") & (runs["seed"] < 3) & (runs["tuning"] == "best")
    runs.loc[at_result, ["outcome", "val_accuracy"]] = ["diverged", None]
    lost = effect(runs, outcome="val_accuracy")
    assert (lost["verdict"], lost["reason"]) == ("not shown", "3 runs of the setting diverged, 0 of the baseline")
    edge = effect(tuned("val_accuracy", better=1, chosen={"base": 0.004}), outcome="val_accuracy")
    assert edge["verdict"] == "not shown" and "the baseline's lr 0.004 is the highest tried" in edge["reason"]


def test_of_untuned_runs_too_the_winner_is_the_higher_side_of_an_accuracy():
    axes = {"depth_scale": ["none", "lns"], "seed": range(6)}
    runs = grid(
        axes, lambda c: {"val_accuracy": 0.5 + 0.3 * (c.depth_scale == "lns") + 0.01 * (c.seed % 3)}, n_layers=4
    )
    runs["val_accuracy"] += 0.002 * np.random.default_rng(0).normal(size=12)
    assert effect(runs, outcome="val_accuracy")["verdict"] == "higher"
    lost = runs.assign(outcome=np.where((runs["depth_scale"] == "lns") & (runs["seed"] > 2), "diverged", "ok"))
    assert effect(lost, outcome="val_accuracy")["reason"] == "3 runs of the setting diverged, 0 of the baseline"


BUDGETS = (1e12, 2e12, 4e12, 8e12)


def budgets(*settings: str) -> pd.DataFrame:
    """A setting is worth 1.3 times the compute."""
    generator, rows = np.random.default_rng(0), []
    for seed in range(4):
        for budget in BUDGETS:
            for setting in settings:
                worth = budget * (1.3 if setting != "baseline" else 1.0)
                loss = 1 + 0.5 * (worth / 4e12) ** -0.3 + 0.01 * seed + 0.0005 * generator.standard_normal()
                rows.append((4, setting, seed, budget, loss, 1000.0))
    return rows_of(rows)


def test_a_diverged_run_makes_a_setting_worth_no_more_compute():
    rows = budgets("baseline", "depth_scale=lns")
    lost = (rows["setting"] != "baseline") & (rows["seed"] == 3) & (rows["train_flops"] == 8e12)
    rows.loc[lost, ["outcome", "loss", "train_flops"]] = ["diverged", None, 8e11]
    last = speedups(rows).iloc[-1]
    assert last["train_flops"] == 8e12 and last["multiplier"] == pytest.approx(1.3, abs=0.03)


def test_imported_runs_without_a_seed_are_a_ladder_and_no_seeds_of_a_depth(tmp_path, command):
    rows = ["layers,tokens,flops,scale,loss"]
    for layers, times, scale in itertools.product((4, 8), (1, 2, 4, 8), ("none", "lns")):
        loss = 2 + times**-0.3 - 0.05 * (scale == "lns")
        rows.append(f"{layers},{times * 10**6},{times * layers * 6 * 10**9},{scale},{loss}")
    tmp_path.joinpath("t.csv").write_text("\n".join(rows))
    fields = {"n_layers": "layers", "train_tokens": "tokens", "train_flops": "flops", "depth_scale": "scale"}
    source = {"source": "someone", "fields": fields | {"val_loss": "loss"}}
    tmp_path.joinpath("map.yaml").write_text(json.dumps(source))
    command("import", tmp_path / "t.csv", "--map", tmp_path / "map.yaml", "-o", tmp_path / "runs")
    with open_store(tmp_path / "runs") as store:
        rows, cells = budget_rows(store), budget_cells(store)
    judged = judge_ladders(rows).records()
    assert [row["n_layers"] for row in judged] == [4, 8] and all(row["lo"] is not None for row in judged)
    assert {found.verdict for found in crossovers(cells)} == {"not known"}
