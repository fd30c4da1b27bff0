"""The judges: do intervals hold the truth, are absent effects left alone and planted ones found, at one depth?

Slow: 300 draws of every world, whose table is docs/intervals.md's
(`PYTHONPATH=tests python tests/support/planted_worlds.py 300` prints it).
Always: a few draws, held to what few can tell.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support.planted_worlds import WORLDS, World, draw, score

from sparsedepth.effects.cells import BASELINE, Cells
from sparsedepth.effects.frame import depth_effects

ERROR = 0.02
"""Beside a target: about twice the standard error of 300 draws."""
TARGETS: dict[str, tuple[float, float, float, float]] = {
    # world: covered from, to, false at most, found at least
    "text, 24 layers, .05": (0.93, 0.98, 0.05, 0.95),
    "text, 24 layers, .03": (0.93, 0.98, 0.05, 0.75),
    **{f"noise rising, {depth} layers": (0.93, 0.99, 0.05, 0.0) for depth in (4, 12, 24)},
    "seed shifts all, 4 x 3, 2.5 sd": (0.93, 0.98, 0.05, 0.45),
    "seed shifts all, 3 x 6, 2.5 sd": (0.93, 0.98, 0.05, 0.88),
    "plain, 4 x 3, 4 sd": (0.93, 0.97, 0.05, 0.85),
    "plain, 3 x 6, 2 sd": (0.93, 0.97, 0.05, 0.75),
    "untuned text, 3 x 3, .02": (0.93, 0.97, 0.05, 0.28),
    "untuned text, 3 x 3, .05": (0.93, 0.97, 0.05, 0.95),
    "seed shifts a setting, 4 x 3": (0.92, 1.0, 0.06, 0.0),
    "untuned, baseline 3 x noisier, 4 x 3": (0.87, 1.0, 0.10, 0.0),
    "untuned, baseline 3 x noisier, 3 x 3": (0.87, 1.0, 0.10, 0.0),
    "untuned, one setting 3 x noisier, 4 x 3": (0.87, 1.0, 0.10, 0.0),
    "tuned, baseline 3 x noisier, .05": (0.93, 1.0, 0.05, 0.85),
    "tuned, one setting 3 x noisier, .05": (0.93, 1.0, 0.05, 0.85),
    "curve of baseline 2 x as sharp, .03": (0.93, 1.0, 0.05, 0.7),
    "curve of baseline 3 x as sharp": (0.93, 1.0, 0.05, 0.0),
    "curve of baseline 3 x as sharp, .03": (0.93, 1.0, 0.05, 0.44),
    "curve of one setting 3 x as sharp": (0.93, 1.0, 0.05, 0.0),
    **{f"right side {n} x as steep, .03": (0.93, 0.99, 0.05, 0.75) for n in (4, 8)},
    "heavy tails, .03": (0.93, 0.98, 0.05, 0.0),
    "heavy tails, untuned, 4 x 3": (0.93, 0.98, 0.05, 0.0),
    "LNS -.3 alone, +.2 beside": (0.93, 1.0, 0.05, 0.8),
    "depth study, 12 layers, .3": (0.93, 0.98, 0.05, 0.80),
    "depth study, 32 layers, .3": (0.93, 0.98, 0.05, 0.80),
}


def test_a_few_draws():
    of = score(WORLDS["text, 24 layers, .05"], 8)
    assert of.covered >= 0.75 and of.false <= 0.5 and of.found >= 0.75
    of = score(WORLDS["plain, 4 x 3, 4 sd"], 20)
    assert of.covered >= 0.8 and of.false <= 0.3 and of.found >= 0.6


def test_settings_that_differ_in_curvature_do_not_differ_by_that():
    """With one curvature for all, a third of these intervals held the truth and half of the draws had an effect."""
    of = score(WORLDS["curve of baseline 3 x as sharp"], 12)
    assert of.covered >= 0.85 and of.false <= 0.1


def test_a_baseline_tuned_badly_gives_no_verdict():
    assert score(WORLDS["baseline .08 beyond"], 8).false == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_coverage_false_verdicts_and_power_in_made_up_worlds_reach_their_targets(name):
    low, high, false, found = TARGETS[name]
    of = score(WORLDS[name], 300)
    print(f"{name}: {of}")
    assert low - ERROR <= of.covered <= high + ERROR
    assert of.false <= false + ERROR and of.found >= found - ERROR
    if low == 0.87:
        assert of.worst >= 0.85 - ERROR


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in WORLDS if "beyond" in name])
def test_a_baseline_whose_optimum_is_beyond_the_grid(name):
    of = score(WORLDS[name], 300)
    print(f"{name}: {of}")
    assert of.false <= (0.08 if "hidden" in name else 0.0)


def depths_differ(world: World, n: int) -> np.ndarray:
    """Of n draws of two equal depths that have the baseline alone, the second 1.6 times as noisy: how often the
    interval between them in the frame of effects holds 0, how often there is a verdict, and half of its width."""
    holds = []
    for i in range(n):
        rng, depths = np.random.default_rng([1, i]), []
        for n_layers, sd in ((4, world.sd), (8, 1.6 * world.sd)):
            runs = draw(replace(world, sd=sd, settings=0, values=(0.0,)), rng)[0]
            roles = np.where(runs["is_tuning_N"], np.where(runs["u_N"] == 0, "tuning", "rejected"), "best")
            facts = {
                "lr": np.exp(runs["u_N"]),
                "seed": runs["seed_N"],
                "value": runs["y_N"],
                "loss": runs["y_N"],
                "tuning": roles,
            }
            depths.append(pd.DataFrame(facts).assign(n_layers=n_layers))
        rows = pd.concat(depths, ignore_index=True).assign(setting=BASELINE, diverged=False, edge_beside="")
        rows["changes"] = [frozenset()] * len(rows)
        rows["role"] = np.where(rows["tuning"] == "best", "result", "tuning")
        known = {"settings": None, "outcome": "val_loss", "unit": "nat/token", "n_tuning": 0}
        cells = Cells(runs=rows, rows=rows, tuned=("lr",), tuned_by=frozenset({"val_loss"}), **known)
        (row,) = depth_effects(cells).to_dict("records")
        half = (row["hi"] - row["lo"]) / 2
        holds.append((row["lo"] <= 0 <= row["hi"], row["verdict"] in ("lower", "higher"), half))
    return np.array(holds).mean(axis=0)


DEPTHS = {
    "task": World(sd=0.1, rough=0.04, bend=0.07, tuning_seeds=3, seeds=10),
    "rough task": World(sd=0.1, rough=0.1, bend=0.07, tuning_seeds=3, seeds=10),
    "text": World(sd=0.01, rough=0.01, bend=0.01, tuning_seeds=2, seeds=5),
    "task, right side 4 x as steep": World(sd=0.1, rough=0.04, bend=0.07, tuning_seeds=3, seeds=10, right=4),
}


HALF_WIDTHS = {"task": 0.22, "rough task": 0.29, "text": 0.034, "task, right side 4 x as steep": 0.25}
"""At most. Where the whole variance of choosing lr was added to a difference of seeds, in the same worlds: .314, .385,
.056, and .993 to .997 covered; so by a third less, and on text by .44."""


@pytest.mark.parametrize("n", [6, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DEPTHS)
def test_between_depths_the_choice_of_lr_belongs_to_the_interval(name, n):
    covered, false, half = depths_differ(DEPTHS[name], n)
    print(f"{name}: covered {covered:.3f}, false {false:.3f}, half-width {half:.3f}")
    assert covered >= (0.93 if n > 100 else 0.8) and false <= (22 / 300 if n > 100 else 0.2)
    assert half <= HALF_WIDTHS[name] * (1 if n > 100 else 1.3)
