"""The budget from which a depth is worth its cost: crossings worked out by hand, planted ones, and absent ones."""

import numpy as np
import pandas as pd
import pytest
from support.budget_results import cells_of_rows, rows_of
from support.runs_frame import config_of, runs_frame

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.frame import depth_effects
from sparsedepth.scaling.crossover import Crossover, crossovers as crossovers_of_cells
from sparsedepth.scaling.points import lr_choices
from sparsedepth.words.scaling import crossover_text


def crossovers(rows: pd.DataFrame) -> list[Crossover]:
    return crossovers_of_cells(cells_of_rows(rows))


BUDGETS = (1e12, 2e12, 4e12, 8e12, 1.6e13)


def world(noise: float, seed: int, crossing: float | None = 4e12, n_seeds: int = 5, depths=(4, 16)):
    """Power laws of two depths that cross at `crossing`; None: the shallow one is lower by .05 everywhere. Seeds shift
    both depths, and each run has noise of its own."""
    draws = np.random.default_rng(seed)
    shift_S = 3 * noise * draws.standard_normal(n_seeds)
    runs = []
    for n_layers in depths:
        exponent = 0.3 if n_layers == depths[0] or crossing is None else 0.4
        for C in BUDGETS:
            above = 0.05 if crossing is None and n_layers != depths[0] else 0.0
            curve = 1.0 + above + 0.5 * (C / (crossing or 4e12)) ** -exponent
            own_S = noise * draws.standard_normal(n_seeds)
            runs += [(n_layers, "baseline", s, C, curve + shift_S[s] + own_S[s], None) for s in range(n_seeds)]
    return rows_of(runs)


def test_the_largest_budget_decides_and_smaller_ones_follow_without_a_gap():
    """.5 (C / 4e12)^-.3 and ^-.4: at 1.6e13 FLOPs the deeper one is lower by .5 (4^-.3 - 4^-.4) = .0427, and it is so
    down to 8e12; at 4e12 they are equal."""
    (found,) = crossovers(world(0.0005, 0))
    assert (found.n_layers, found.setting, found.verdict, found.seeds) == (16, "baseline", "worth it", 5)
    assert (found.budget, found.smallest, found.largest, found.against) == (8e12, 1e12, 1.6e13, 4)
    assert found.estimate == pytest.approx(-0.0427, abs=0.001) and found.lo < -0.0427 < found.hi < 0
    assert crossover_text(found).startswith("worth its cost from 8e12 FLOPs: at 1.6e13 FLOPs -0.04")
    smaller = world(0.0005, 0)
    (found,) = crossovers(smaller[smaller["train_flops"] < 4e12])
    assert (found.verdict, found.budget, found.against) == ("not worth it", 2e12, 4)
    assert crossover_text(found).startswith("not worth its cost: at 2e12 FLOPs +0.04")


def test_a_depth_that_is_lower_than_some_says_so():
    """16 layers are lower than 4 by .3, and alike with 8."""
    level = {4: 1.3, 8: 1.0, 16: 1.0}
    noise = np.random.default_rng(0).normal(0, 0.01, (3, 5))
    runs = [
        (depth, "baseline", seed, 1e12, level[depth] + noise[i, seed], None)
        for i, depth in enumerate(level)
        for seed in range(5)
    ]
    found = next(one for one in crossovers(rows_of(runs)) if one.n_layers == 16)
    assert found.reason == "no difference to 8 layers is shown at 1e12 FLOPs, only to 4"


def test_a_planted_crossing_is_found_where_it_is():
    found = [one for seed in range(60) for one in crossovers(world(0.008, seed))]
    worth = [one for one in found if one.verdict == "worth it"]
    assert len(worth) >= 54
    assert np.median([one.budget for one in worth]) == 8e12
    assert sum(one.budget < 8e12 for one in worth) <= 6 and not [one for one in worth if one.budget < 4e12]


def test_a_depth_that_is_worse_everywhere_is_not_worth_it():
    found = [one for seed in range(30) for one in crossovers(world(0.008, seed, crossing=None))]
    sure = [one for one in found if one.verdict == "not worth it" and one.budget == 1.6e13]
    assert len(sure) >= 28 and not [one for one in found if one.verdict == "worth it"]


def equal_depths(n_depths: int, rng: np.random.Generator, n_seeds: int = 4) -> pd.DataFrame:
    """Depths with one curve at four budgets; a seed moves all of its runs, and the runs of a depth are branches of one
    trunk, of which they have half of their variance."""
    shift_S = rng.normal(0, 0.01, n_seeds)
    trunk_DS, own_DBS = rng.normal(0, 0.01, (n_depths, n_seeds)), rng.normal(0, 0.01, (n_depths, 4, n_seeds))
    return rows_of(
        (
            4 * 2**d,
            "baseline",
            s,
            C,
            1 + 0.5 * (C / 4e12) ** -0.3 + shift_S[s] + trunk_DS[d, s] + own_DBS[d, b, s],
            None,
        )
        for d in range(n_depths)
        for b, C in enumerate(BUDGETS[:4])
        for s in range(n_seeds)
    )


@pytest.mark.parametrize("n_draws", [24, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n_depths", [2, 3, 6])
def test_equal_depths_are_neither_worth_their_cost_nor_not(n_depths, n_draws):
    """The rates of draws with such a verdict on any depth. With one significant budget of several enough, uncorrected,
    'not worth it' was false in .13, .25 and .63 of draws."""
    draws = [
        {one.verdict for one in crossovers(equal_depths(n_depths, np.random.default_rng([n_depths, i])))}
        for i in range(n_draws)
    ]
    false = {verdict: np.mean([verdict in found for found in draws]) for verdict in ("worth it", "not worth it")}
    print(f"{n_depths} depths: {false}")
    assert max(false.values()) <= (22 / 300 if n_draws == 300 else 0.15)


def tuned_depths(seed: int) -> pd.DataFrame:
    """Rows of `runs`: two depths with one curve over lr at one budget, .16 nat at a step from the best, and noise of
    .01, so that two tuning seeds often choose a neighbour of the best lr."""
    rng, rows = np.random.default_rng(seed), []
    for n_layers in (4, 16):
        best = 1.5 + rng.uniform(-0.5, 0.5)
        tuning = {(k, s): 1 + 0.16 * (k - best) ** 2 + rng.normal(0, 0.01) for k in range(4) for s in (101, 102)}
        chosen = min(range(4), key=lambda k: tuning[k, 101] + tuning[k, 102])
        fresh = {(chosen, s): 1 + 0.16 * (chosen - best) ** 2 + rng.normal(0, 0.01) for s in range(6)}
        for (k, s), loss in (tuning | fresh).items():
            role = "rejected" if k != chosen else "tuning" if s > 100 else "best"
            facts = {"tuned_fields": "lr", "tuned_by": "val_loss", "tuning": role, "val_loss": loss}
            config = config_of(n_layers=n_layers, lr=0.0015 * 2**k, seed=s)
            rows.append((config, facts | {"train_flops": 1e12}))
    return runs_frame(rows)


@pytest.mark.parametrize("n_worlds", [20, pytest.param(40, marks=pytest.mark.slow)])
def test_the_choice_of_lr_counts(n_worlds):
    """Depths that differ by nothing but how well their lr was chosen: most draws would be shown without its error."""
    whole = [tuned_depths(seed) for seed in range(n_worlds)]
    chosen = [runs[runs["tuning"] == "best"].drop(columns=["tuning", "tuned_fields", "tuned_by"]) for runs in whole]
    known, alone = (
        np.mean(
            [
                crossovers_of_cells(cells_of(runs.assign(lr=lr), "val_loss", True))[0].verdict != "not known"
                for runs, lr in each
            ]
        )
        for each in ([(runs, runs["lr"]) for runs in whole], [(runs, 0.003) for runs in chosen])
    )
    assert known <= 0.1 and alone > 0.3, (known, alone)


def test_one_budget_is_a_budget():
    """Equal FLOPs within the tolerance of matching: the smallest and largest budget are one."""
    runs = [(4, "baseline", s, 2.7e12, 0.7 + 0.01 * s, None) for s in range(3)]
    runs += [(16, "baseline", s, 2.69e12, 0.4 + 0.012 * s, None) for s in range(3)]
    runs += [(32, "baseline", s, 2.71e12, 0.9 + 0.011 * s, None) for s in range(3)]
    middle, deep = crossovers(rows_of(runs))
    assert crossover_text(middle).startswith("worth its cost from 2.7e12 FLOPs, the only budget: at 2.7e12 FLOPs -0.29")
    assert crossover_text(deep).startswith(
        "not worth its cost: at 2.7e12 FLOPs +0.4"
    ) and "against 16 layers" in crossover_text(deep)


def test_a_depth_must_beat_every_shallower_one():
    """16 layers beat 4 and not 8."""
    level = {4: 1.0, 8: 0.5, 16: 0.7}
    noise = np.random.default_rng(0).normal(0, 0.01, (3, 2, 3))
    runs = [
        (n, "baseline", s, C, level[n] + noise[i, b, s], None)
        for i, n in enumerate(level)
        for b, C in enumerate(BUDGETS[:2])
        for s in range(3)
    ]
    assert [one.verdict for one in crossovers(rows_of(runs))] == ["worth it", "not worth it"]


def test_seeds_at_one_budget_alone_do_not_take_away_those_at_all():
    runs, noise = world(0.0005, 0), np.random.default_rng(0).normal(0, 0.0005, 40)
    more = rows_of([(n, "baseline", 20 + s, BUDGETS[0], 1.5 + n * noise[s], None) for n in (4, 16) for s in range(40)])
    (found,) = crossovers(pd.concat([runs, more], ignore_index=True))
    assert (found.verdict, found.seeds, found.smallest) == ("worth it", 5, BUDGETS[0])


def test_each_budget_can_have_seeds_of_its_own():
    found = []
    for seed in range(40):
        rows = world(0.008, seed)
        found += crossovers(rows.assign(seed=rows["seed"] + 10 * rows["train_flops"].rank(method="dense").astype(int)))
    worth = [one for one in found if one.verdict == "worth it" and one.seeds == 5]
    assert len(worth) >= 36 and {one.largest for one in worth} == {1.6e13}
    assert np.median([one.budget for one in worth]) == 8e12


@pytest.mark.parametrize("n_draws", [12, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("deep_lower", [0.0, 0.03])
def test_depths_without_a_budget_in_common_are_compared_between_their_own(deep_lower, n_draws):
    """Three depths whose budgets are a third of a doubling apart: two of one curve, and the deepest, which is lower."""
    verdicts, covered = [], []
    for number in range(n_draws):
        rng, runs = np.random.default_rng([number, round(100 * deep_lower)]), []
        shift_S = rng.normal(0, 0.03, 5)
        for place, depth in enumerate((4, 8, 16)):
            for C in np.array(BUDGETS) * 2 ** (place / 3):
                level = 1 + 0.5 * (C / 4e12) ** -0.3 - (deep_lower if depth == 16 else 0.0)
                losses = level + shift_S + rng.normal(0, 0.01, 5)
                runs += [(depth, "baseline", seed, C, loss, None) for seed, loss in enumerate(losses.tolist())]
        middle, deep = crossovers(rows_of(runs))
        verdicts.append(deep.verdict)
        covered += [middle.lo <= 0 <= middle.hi, deep.lo <= -deep_lower <= deep.hi]
    worth = verdicts.count("worth it") / n_draws
    print(deep_lower, worth, np.mean(covered))
    assert (worth <= (22 / 300 if n_draws == 300 else 0.15)) if deep_lower == 0 else worth >= 0.8
    assert np.mean(covered) >= (0.9 if n_draws == 300 else 0.8)


def test_what_cannot_be_compared_is_not_known():
    runs = [(4, "baseline", s, C, 1.0 + 0.01 * s, None) for C in BUDGETS[:2] for s in range(3)]
    apart = [(8, "baseline", s, C, 0.5 + 0.01 * s, None) for C in BUDGETS[3:] for s in range(3)]
    (found,) = crossovers(rows_of([*runs, *apart]))
    assert crossover_text(found) == "not known (no budget in common: from 8e12 and up to 2e12 FLOPs)"
    other_seeds = [(8, "baseline", 10 + s, C, 0.5, None) for C in BUDGETS[:2] for s in range(3)]
    (found,) = crossovers(rows_of([*runs, *other_seeds]))
    assert "fewer than two seeds in common with 4 layers" in crossover_text(found)
    lost = rows_of([*runs, *((8, *run[1:]) for run in runs)])
    (found,) = crossovers(lost.assign(outcome=np.where(lost["n_layers"] == 8, "diverged", "ok")))
    assert "fewer than two seeds in common with 4 layers" in crossover_text(found)
    with pytest.raises(ValueError, match="no setting was run at two depths"):
        crossovers(rows_of(runs))


def test_effects_compare_depths_at_a_budget_of_both_though_one_has_a_larger_one():
    """At 4e12 FLOPs, twice the tokens of 4 layers, 8 layers lose .1 more; at the largest budget of 4 layers alone their
    loss is lower by .5."""
    noise = np.random.default_rng(0).normal(0, 0.01, (2, 4))
    budgets = [(4, 2**20, 2e12, 3.2), (4, 2**21, 4e12, 3.0), (4, 2**23, 1.6e13, 2.5), (8, 2**20, 4e12, 3.1)]
    cells = cells_of(
        runs_frame(
            (
                config_of(n_layers=depth, train_tokens=tokens, seed=seed, schedule="wsd", warmup_tokens=2**16),
                {"val_loss": loss + noise[int(depth == 8), seed], "train_flops": flops},
            )
            for depth, tokens, flops, loss in budgets
            for seed in range(4)
        ),
        "val_loss",
    )
    (effect,) = depth_effects(cells).to_dict("records")
    assert effect["basis"] == "flops" and effect["estimate"] == pytest.approx(0.1, abs=0.02)
    (found,) = crossovers_of_cells(cells_of(cells.runs, "val_loss", every_budget=True))
    assert found.estimate == pytest.approx(effect["estimate"], rel=1e-6) and found.budget == 4e12


def test_lr_that_was_carried_is_as_uncertain_as_in_effects():
    """6 layers are tuned, 12 and 24 have their lr at a regret of .05: sqrt(2) of it is more than a gain of .05."""
    noise, runs = np.random.default_rng(0), []
    for n_layers, loss in ((6, 3.0), (12, 2.95), (24, 2.9)):
        role = {"tuning": "best"} if n_layers == 6 else {"tuning": "carried", "carry_regret": 0.05}
        tried = [(lr, 101, {"tuning": "tuning" if lr == 2e-3 else "rejected"}) for lr in (1e-3, 2e-3, 4e-3)]
        for lr, seed, own in [*[(2e-3, seed, role) for seed in range(5)], *(tried if n_layers == 6 else [])]:
            value = loss + 0.02 * np.log2(lr / 2e-3) ** 2 + noise.normal(0, 0.005)
            facts = {"val_loss": value, "train_flops": 1e12, "tuned_fields": "lr", "tuned_by": "val_loss"}
            runs.append((config_of(n_layers=n_layers, lr=lr, seed=seed), facts | own))
    cells = cells_of(runs_frame(runs), "val_loss")
    found, effect = crossovers_of_cells(cells)[0], depth_effects(cells).iloc[0]
    assert (found.verdict, effect["verdict"]) == ("not known", "not shown")
    assert (found.lo, found.hi) == pytest.approx((effect["lo"], effect["hi"]))
    variances = lr_choices(cells).loc[cells.rows.loc[cells.rows["n_layers"] > 6, "run_id"], "lr_variance"]
    assert variances.tolist() == pytest.approx([0.05**2] * 10)
