"""The held-out test: what the shallower depths recommend, at a depth that they did not see."""

from functools import cache

import pytest
from support.planted_recipes import sweep

from sparsedepth.effects.cells import cells_of
from sparsedepth.recipe.build_card import derive_card
from sparsedepth.recipe.checklist import hold_out
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.evidence import Evidence

AXES = {"n_layers": [8, 12, 24], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}


@cache
def held(gain_at_24, others=-0.1):
    """LNS gains .1 at 8 and 12 layers."""

    def loss(config):
        return (gain_at_24 if config.n_layers == 24 else others) * (config.depth_scale == "lns")

    runs = sweep(loss, AXES)
    found = Evidence(cells_of(runs, "val_loss"))
    return hold_out(found, 24, derive(runs, evidence=found)), runs


@pytest.mark.parametrize(("gain", "outcome"), [(-0.1, "confirmed"), (0.1, "refuted"), (0.0, "not confirmed")])
def test_a_recipe_of_the_shallower_depths_is_judged_at_the_held_out_one(gain, outcome):
    test, _ = held(gain)
    assert (test.fitted_on, test.changes, test.outcome) == ((8, 12), ("depth_scale=lns",), outcome)
    (lns,) = [each for each in test.predictions if each.setting == "depth_scale=lns"]
    assert lns.predicted.n_layers == 12 and lns.predicted.estimate == pytest.approx(-0.1, abs=0.03)
    assert lns.measured == test.gain and test.gain.estimate == pytest.approx(gain, abs=0.03)


def test_the_card_passes_only_if_both_say_the_same():
    _, runs = held(-0.1)
    card = derive_card(runs, holdout_depth=24)
    text = {test.name: (test.outcome, test.text) for test in card.tests}["held-out depth"]
    assert text[0] == "passed" and text[1].startswith("8, 12 layers recommend depth_scale=lns; confirmed at 24; mean")
    error, no_effect = (float(part.split()[-1]) for part in text[1].split("; ")[2].split(", "))
    assert error < no_effect
    _, late = held(-0.1, others=0.0)
    card = derive_card(late, holdout_depth=24)
    text = {test.name: (test.outcome, test.text) for test in card.tests}["held-out depth"]
    assert text[0] == "failed" and text[1].startswith("8, 12 layers recommend no change at 24")


def test_an_abstention_is_told_with_what_the_shallower_depths_said():
    _, runs = held(0.0)
    card = derive_card(runs, holdout_depth=24)
    assert not card.recipe.changes
    assert [(test.name, test.outcome) for test in card.tests] == [("held-out depth", "failed")]


@pytest.mark.parametrize("depth", [8, 12, 16])
def test_two_shallower_depths_are_needed(depth):
    _, runs = held(0.0)
    with pytest.raises(ValueError, match=f"--holdout-depth {depth} needs .* 8, 12, 24; try --holdout-depth 24"):
        derive_card(runs, holdout_depth=depth)
