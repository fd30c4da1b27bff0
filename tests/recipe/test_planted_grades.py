"""Sweeps whose truth is known, from the recipe to its grade: is a better grade more often right?

Four depths, two widths, three seeds, four settings beside the baseline. A run's noise has standard deviation 1. The
figures of the slow test are docs/recipes.md's.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from support.runs_frame import config_of, runs_frame

from sparsedepth.recipe.card import grade_of
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.holdout import hold_out, hold_out_scale

DEPTHS, WIDTHS, SEEDS = (12, 16, 24, 32), (256, 512), 3
CHOICES = ({}, {"depth_scale": "lns"}, {"n_kv_heads": 1}, {"norm": "sandwich"}, {"init": "depth_scaled"})


def frame():
    """The runs without their loss, and the index of setting, depth and width of each."""
    rows = list(itertools.product(CHOICES, DEPTHS, WIDTHS, range(SEEDS)))
    runs = runs_frame(
        (config_of(n_layers=depth, d_model=width, n_heads=4, train_tokens=2**20, **choice, seed=seed), {})
        for choice, depth, width, seed in rows
    )
    return runs, np.indices((len(CHOICES), len(DEPTHS), len(WIDTHS), SEEDS))[:3].reshape(3, -1)


def grades(runs):
    """The recipe at 32 layers, and its grades with the test at that depth and at the larger width."""
    recipe = derive(runs, 32)
    if not recipe.changes:
        return recipe, ()
    wanted = tuple(change.contrast.setting for change in recipe.changes)
    tests = (hold_out(runs, 32), hold_out_scale(runs, "params", 32))
    outcomes = (test.outcome if test.changes == wanted else "not confirmed" for test in tests)
    return recipe, tuple(grade_of(recipe, False, [outcome]) for outcome in outcomes)


@pytest.mark.parametrize(("elsewhere", "grade"), [(-8.0, "B"), (0.0, "C")], ids=["effect", "luck"])
def test_what_holds_at_one_depth_alone_stays_below_b(elsewhere, grade):
    """An effect of 8 deviations at 32 layers, 14 standard errors, and at the other depths or not."""
    runs, (choice, depth, _) = frame()
    effect = np.where(depth == 3, -8.0, elsewhere) * (choice == 1)
    runs["val_loss"] = 3 + 0.01 * (effect + np.random.default_rng(0).normal(size=len(runs)))
    recipe, (by_depth, _) = grades(runs)
    assert [change.contrast.setting for change in recipe.changes] == ["depth_scale=lns"] and by_depth == grade


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("sizes", "varies"), [(0.0, 0.0), (2.0, 0.0), (2.0, 1.0)], ids=["none", "alike", "varying"])
def test_how_often_a_grade_is_right(sizes, varies):
    """Half the settings have an effect of N(0, `sizes`), which varies by N(0, `varies`) between depths and widths."""
    generator = np.random.default_rng(0)
    runs, (choice, depth, width) = frame()
    counts, n = Counter(), 120 if sizes else 250
    for _ in range(n):
        own = np.where(generator.random(len(CHOICES)) < 0.5, 0.0, sizes * generator.normal(size=len(CHOICES)))
        effect = own[:, None, None] + varies * generator.normal(size=(len(CHOICES), len(DEPTHS), len(WIDTHS)))
        effect[0] = 0
        runs["val_loss"] = 3 + 0.01 * (effect[choice, depth, width] + generator.normal(size=len(runs)))
        recipe, graded = grades(runs)
        counts["none"] += not graded
        if not graded:
            continue
        taken = [i for i, values in enumerate(CHOICES) if values and values.items() <= dict(recipe.config).items()]
        is_right = bool(effect[taken, 3].mean(axis=1).sum() < 0)
        counts.update(
            [("recommended", is_right), *((test, grade, is_right) for test, grade in zip("dw", graded, strict=True))]
        )
    print(f"{sizes}, {varies}: {dict(counts)}")
    recommended = n - counts["none"]
    assert recommended <= 0.05 * n if not sizes else counts["recommended", True] >= 0.95 * recommended >= 0.2 * n
    assert not counts["d", "B", False], "no held-out depth confirms luck at another"
    assert counts["w", "B", False] <= 0.4 * max(1, counts["recommended", False]), "a width shares the luck of a depth"
