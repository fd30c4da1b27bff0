"""Second looks: a verdict that one seed or one folder decides says so, and one that none decides does not."""

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.effects.cells import cells_of
from sparsedepth.effects.second_look import second_looks
from sparsedepth.words.effects import second_look_line

NOISE = np.random.default_rng(0).normal(0, 0.01, (2, 6))


def runs(gain: float, odd: float = 0.0):
    """LNS loses `gain` less; the baseline's run of seed 5 loses `odd` more."""

    def loss(config):
        is_lns = config.depth_scale == "lns"
        return {
            "val_loss": 3 - gain * is_lns + NOISE[int(is_lns), config.seed] + odd * (config.seed == 5 and not is_lns)
        }

    return grid({"depth_scale": ["none", "lns"], "seed": range(6)}, loss, n_layers=4)


def test_the_seed_that_makes_an_effect_larger_is_named():
    """Of -.05, the mean of six seeds, and .12 more in one of them: -.07, and -.05 without it."""
    (look,) = second_looks(cells_of(runs(0.05, odd=0.12), "val_loss"))
    assert look.without == "seed 5" and look.estimate == pytest.approx(-0.05, abs=0.012)
    assert look.effect["estimate"] == pytest.approx(look.estimate - 0.02, abs=0.005)
    assert second_look_line(look).startswith("second look: depth_scale=lns at n_layers=4 is -0.0")
    assert " without seed 5 (" in second_look_line(look)


def test_an_effect_of_all_seeds_needs_no_word_and_none_without_a_verdict():
    assert second_looks(cells_of(runs(0.1), "val_loss")) == []
    assert second_looks(cells_of(runs(0.0), "val_loss")) == []


def test_the_folder_that_decides_is_named():
    """The second folder has the seeds with the effect."""
    found = runs(0.1).assign(source="results/first")
    second = found["seed"] >= 2
    found.loc[second, "source"] = "results/second"
    found.loc[~second & (found["depth_scale"] == "lns"), "val_loss"] += 0.1
    looks = second_looks(cells_of(found, "val_loss"))
    assert [look.without for look in looks] == ["results/second"] and looks[0].turns
