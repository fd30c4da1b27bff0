"""The budget from which a depth is worth its cost: crossings worked out by hand, planted ones, and absent ones."""

import numpy as np
import pandas as pd
import pytest
from support.budget_results import rows_of

from sparsedepth.scaling.crossover import crossovers
from sparsedepth.words.scaling import crossover_text

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


def test_an_exact_crossing():
    """.5 (C / 4e12)^-.3 and ^-.4 cross at 4e12; the first budget above it, of 200 steps over a factor of 16, is 1.4%
    away at most."""
    (found,) = crossovers(world(0.0, 0))
    assert (found.n_layers, found.setting, found.verdict, found.seeds) == (16, "baseline", "worth it", 5)
    assert found.lo <= 4e12 <= found.budget == found.hi <= 1.015 * 4e12
    assert crossover_text(found) == "worth its cost from 4.1e12 FLOPs (3.9e12 to 4.1e12)"


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
    assert found.reason == "no difference to 8 layers is shown at the largest budget in common, only to 4"


def test_a_planted_crossing_is_found_and_covered():
    found = [one for seed in range(60) for one in crossovers(world(0.008, seed))]
    worth = [one for one in found if one.verdict == "worth it"]
    assert len(worth) >= 54
    assert np.median([one.budget for one in worth]) == pytest.approx(4e12, rel=0.1)
    covered = [(one.lo or 0.0) <= 4e12 * 1.015 and one.hi >= 4e12 * 0.985 for one in worth]
    assert sum(covered) >= 0.88 * len(worth)


def test_the_choice_of_lr_counts():
    """Worse by .05 in every seed, with a standard error of .04 by the choice of lr on both sides together."""
    rows = world(0.001, 0, crossing=None)
    assert [one.verdict for one in crossovers(rows)] == ["not worth it"]
    assert [one.verdict for one in crossovers(rows.assign(lr_variance=0.04**2 / 2))] == ["not known"]


def test_an_absent_crossing_is_not_found():
    """A depth that is worse everywhere is not worth it up to the largest budget; equal depths are not known."""
    found = [one for seed in range(30) for one in crossovers(world(0.008, seed, crossing=None))]
    assert not [one for one in found if one.verdict == "worth it"]
    sure = [one for one in found if one.verdict == "not worth it" and one.budget == pytest.approx(1.6e13)]
    assert len(sure) >= 26 and crossover_text(sure[0]) == "not worth it up to 1.6e13 FLOPs"
    alike = world(0.008, 0, crossing=None, n_seeds=30)
    alike["n_layers"] = np.where(alike["n_layers"] == 16, 4, alike["n_layers"])  # one depth, shared out over two
    alike = alike[alike["loss"] < 9].assign(n_layers=np.where(alike["seed"] % 2, 4, 16), seed=alike["seed"] // 2)
    verdicts = [one.verdict for one in crossovers(alike)]
    assert verdicts == ["not known"]


def test_one_budget_is_a_budget():
    """Equal FLOPs within the tolerance of matching: the smallest and largest budget are one."""
    runs = [(4, "baseline", s, 2.7e12, 0.7 + 0.01 * s, None) for s in range(3)]
    runs += [(16, "baseline", s, 2.69e12, 0.4 + 0.012 * s, None) for s in range(3)]
    runs += [(32, "baseline", s, 2.71e12, 0.9 + 0.011 * s, None) for s in range(3)]
    middle, deep = crossovers(rows_of(runs))
    assert crossover_text(middle) == "worth its cost from 2.7e12 FLOPs, the smallest budget"
    assert crossover_text(deep) == "not worth it up to 2.7e12 FLOPs"


def test_a_depth_must_beat_every_shallower_one():
    """16 layers beat 4 and not 8."""
    level = {4: 1.0, 8: 0.5, 16: 0.7}
    runs = [(n, "baseline", s, C, level[n] + 0.01 * s, None) for n in level for C in BUDGETS[:2] for s in range(3)]
    assert [one.verdict for one in crossovers(rows_of(runs))] == ["worth it", "not worth it"]


def test_seeds_at_one_budget_alone_do_not_take_away_those_at_all():
    runs = world(0.0, 0)
    more = rows_of([(n, "baseline", 20 + s, BUDGETS[0], 1.5, None) for n in (4, 16) for s in range(40)])
    (found,) = crossovers(pd.concat([runs, more], ignore_index=True))
    assert (found.verdict, found.seeds, found.smallest) == ("worth it", 5, BUDGETS[0])


def test_each_budget_can_have_seeds_of_its_own():
    found = []
    for seed in range(40):
        rows = world(0.008, seed)
        found += crossovers(rows.assign(seed=rows["seed"] + 10 * rows["train_flops"].rank(method="dense").astype(int)))
    worth = [one for one in found if one.verdict == "worth it" and one.seeds == 5]
    assert len(worth) >= 36 and {one.largest for one in worth} == {1.6e13}
    assert sum((one.lo or 0.0) <= 4e12 * 1.015 and one.hi >= 4e12 * 0.985 for one in worth) >= 0.88 * len(worth)


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
