"""The choice of lr in comparisons by compute: planted curves over lr, tuned with two noisy seeds at each budget."""

import numpy as np
import pandas as pd
import pytest
from support.budget_results import rows_of
from support.runs_frame import config_of, runs_frame

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import setting_effects
from sparsedepth.scaling.points import CHOICES, lr_choices
from sparsedepth.scaling.speedup import speedups

LR = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
BUDGETS = (1e12, 2e12, 4e12, 8e12)
TOKENS = 8192 * 20


def tuned_world(seed: int, noise: float = 0.01) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Baseline and LNS have one curve, .16 (ln lr - ln best)^2 / 2 in steps of the grid: the noise of two tuning seeds
    decides which lr is chosen. The rows of `runs`, and those by budget of the results."""
    rng, rows, results = np.random.default_rng(seed), [], []
    for number, C in enumerate(BUDGETS):
        for scale in ("none", "lns"):
            best = 1.5 + rng.uniform(-0.5, 0.5)

            def loss(step: int, best: float = best, C: float = C) -> float:
                return 1 + 0.5 * (C / 4e12) ** -0.3 + 0.08 * (step - best) ** 2 + noise * rng.standard_normal()

            trials = {(step, s): loss(step) for step in range(4) for s in (101, 102)}
            chosen = min(range(4), key=lambda step: trials[step, 101] + trials[step, 102])
            trials |= {(chosen, s): loss(chosen) for s in range(6)}
            for (step, s), value in trials.items():
                fields = {"depth_scale": scale, "train_tokens": TOKENS * 2**number, "seed": s, "lr": LR[step]}
                config = config_of(n_layers=4, schedule="wsd", warmup_tokens=8192, **fields)
                role = "rejected" if step != chosen else "tuning" if s > 100 else "best"
                facts = {"tuned_fields": "lr", "tuned_by": "val_loss", "tuning": role, "val_loss": value}
                rows.append((config, facts | {"train_flops": C}))
                if role == "best":
                    setting = "baseline" if scale == "none" else "depth_scale=lns"
                    results.append((config.run_id, (4, setting, s, C, value, None)))
    return runs_frame(rows), rows_of(row for _, row in results).assign(run_id=[run_id for run_id, _ in results])


def choices_of(runs: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Of the results."""
    choices = lr_choices(cells_of(runs, "val_loss", every_budget=True))
    return choices[choices.index.isin(rows["run_id"])]


def covered(rows: pd.DataFrame, worth: float = 1.0) -> list[bool]:
    return [row["lo"] <= worth <= row["hi"] for row in speedups(rows).to_dict("records")]


@pytest.mark.parametrize("n_worlds", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_without_a_difference_a_multiplier_is_1_and_its_interval_knows_the_choice_of_lr(n_worlds):
    """Also where the setting costs 7% less, so that no fit has both sides."""
    alone, known, apart = [], [], []
    for seed in range(n_worlds):
        runs, rows = tuned_world(seed)
        choices = choices_of(runs, rows)
        assert {*rows["run_id"]} <= {*choices.index} and (choices["lr_variance"] > 0).all()
        chosen = rows.drop(columns=[*CHOICES]).join(choices, on="run_id")
        share, none = np.where(rows["setting"] == "baseline", 1.0, 0.93), {"effect": np.nan, "effect_sd": np.nan}
        cheaper = chosen.assign(train_flops=rows["train_flops"] * share, **none)
        for found, each, worth in ((alone, rows, 1), (known, chosen, 1), (apart, cheaper, 1 / 0.93)):
            found += covered(each, worth)
    assert np.mean(known) >= 0.9 and np.mean(apart) >= 0.9, (np.mean(known), np.mean(apart))
    assert np.mean(alone) < 0.85, np.mean(alone)  # what leaves it out does not


def test_runs_at_another_lr_than_the_chosen_one_are_no_results_whatever_the_order():
    """As of a second folder with a fixed, bad lr."""
    runs, rows = tuned_world(0)
    fields = {"n_layers": 4, "lr": 0.1, "train_tokens": TOKENS, "schedule": "wsd", "warmup_tokens": 8192}
    facts = {"val_loss": 9.0, "train_flops": BUDGETS[0]}
    bad = [(config_of(**fields, seed=seed), facts) for seed in (0, 1)]
    for both in ([runs, runs_frame(bad)], [runs_frame(bad), runs]):
        choices = choices_of(pd.concat(both, ignore_index=True), rows)
        assert {*rows["run_id"]} <= {*choices.index} and not {config.run_id for config, _ in bad} & {*choices.index}


def effect_of(runs: pd.DataFrame, rows: pd.DataFrame) -> tuple[float, float]:
    """That of LNS at the largest budget."""
    at_largest = rows.loc[(rows["train_flops"] == 8e12) & (rows["setting"] != "baseline"), "run_id"]
    (effect,), (sd,) = (choices_of(runs, rows).loc[at_largest, name].unique() for name in ("effect", "effect_sd"))
    return effect, sd


def test_the_effect_at_a_budget_is_that_of_effects():
    """`effects` takes the largest budget of branched runs. An lr at which a run diverged, early and with fewer FLOPs,
    is no part of the curve of either."""
    runs, rows = tuned_world(0)
    high = (runs["train_flops"] == 8e12) & (runs["depth_scale"] == "lns") & (runs["tuning"] == "rejected")
    lost = runs[high & (runs["seed"] == 101)].index[-1]
    diverged = runs.copy()
    diverged.loc[lost, ["outcome", "train_flops", "val_loss"]] = ["diverged", 8e11, np.nan]
    diverged.loc[high & (diverged["lr"] == diverged.loc[lost, "lr"]) & (diverged["seed"] == 102), "val_loss"] += 0.3
    for each in (runs, diverged):
        (effect,) = setting_effects(cells_of(each, "val_loss")).to_dict("records")
        estimate, sd = effect_of(each, rows)
        assert estimate == pytest.approx(effect["estimate"])
        assert 1.96 * sd == pytest.approx((effect["hi"] - effect["lo"]) / 2, rel=0.05)


def test_runs_that_are_scored_in_another_way_are_compared_among_themselves():
    """A folder at one budget does not take the error from the others of its depth."""
    runs, rows = tuned_world(0)
    other = runs["train_flops"] == 1e12
    scored = runs.assign(eval_seq_len=np.where(other, 64.0, np.nan))
    assert (choices_of(scored, rows)["lr_variance"] > 0).all()


def test_without_tuning_there_is_no_choice():
    runs, rows = tuned_world(0)
    runs = runs[runs["tuning"] == "best"].drop(columns=["tuning", "tuned_fields", "tuned_by"])
    choices = choices_of(runs, rows)
    assert (choices["lr_variance"] == 0).all() and choices["effect"].isna().all()


def test_a_tuned_value_of_0_has_no_place_on_a_curve():
    """Of imported runs: a sweep refuses it."""
    runs, rows = tuned_world(0)
    zero = runs.assign(lr=runs["lr"].replace(LR[0], 0.0))
    assert np.isfinite(choices_of(zero, rows)["lr_variance"]).all()
