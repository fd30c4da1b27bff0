"""Hold-out scores worked out by hand, on sweeps whose shallow and deep runs agree, or do not."""

import numpy as np
import pytest
from support.runs_frame import grid

from sparsedepth.recipe.build_card import derive_card
from sparsedepth.recipe.card_text import holdout_statements
from sparsedepth.recipe.choose import derive
from sparsedepth.recipe.holdout import accuracy_interval, decisions, hold_out, hold_out_scale

AXES = {"n_layers": [12, 16, 24], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}
WIGGLE = (0.0, 0.001, -0.001)
"""The same for all configurations of a seed but for a part that cancels over seeds."""


def loss(effects):
    """3 + the effect of LNS + that of decay by depth, and a little seed noise that differs between cells."""

    def of(config):
        lns, decay = effects[config.n_layers]
        turn = (config.depth_scale == "lns") + 2 * (config.weight_decay > 0)
        noise = WIGGLE[(config.seed + turn) % 3]
        return {"val_loss": 3 + lns * (config.depth_scale == "lns") + decay * (config.weight_decay > 0) + noise}

    return of


def test_decisions_by_hand():
    # measured order a < b < c; predicted a < c < b: two of three pairs; a predicted tie counts half
    assert decisions(np.array([0.0, 2.0, 1.0]), np.array([0.0, 1.0, 2.0])) == (2.0, 3)
    assert decisions(np.array([0.0, 1.0, 1.0]), np.array([0.0, 1.0, 2.0])) == (2.5, 3)
    assert decisions(np.array([0.0, 1.0]), np.array([5.0, 5.0])) == (0.0, 0)


@pytest.mark.parametrize("relation", [0.0, 0.8])
@pytest.mark.parametrize(("n_settings", "crossed"), [(4, True), (7, False)], ids=["crossed", "one at a time"])
def test_the_interval_of_decision_accuracy_covers(n_settings, crossed, relation):
    """Effects and predictions of 400 made-up holdouts, normal with this correlation; the mean accuracy is the truth."""
    rng = np.random.default_rng(0)
    crossing = (np.arange(2**n_settings)[:, None] >> np.arange(n_settings)) & 1
    cells = crossing if crossed else np.vstack([np.zeros(n_settings), np.eye(n_settings)])
    scores = []
    for _ in range(400):
        effects = rng.normal(size=n_settings)
        predicted = relation * effects + (1 - relation**2) ** 0.5 * rng.normal(size=n_settings)
        scores.append(decisions(cells @ predicted, cells @ effects))
    truth = np.mean([right / n for right, n in scores])
    intervals = [accuracy_interval(right, n, n_settings) for right, n in scores]
    assert 0.91 <= np.mean([lo <= truth <= hi for lo, hi in intervals]) <= 0.99


def test_a_rule_that_holds_is_confirmed():
    runs = grid(AXES, loss({12: (-0.1, 0.02), 16: (-0.1, 0.02), 24: (-0.1, 0.02)}))
    found = hold_out(runs, 24)
    assert found.fitted_on == (12, 16) and found.changes == ("depth_scale=lns",)
    assert found.outcome == "confirmed" and found.gain.effect.mean == pytest.approx(-0.1)
    assert (found.signs_right, found.n_signs) == (2, 2)
    assert (found.decision_accuracy, found.n_decisions) == (1.0, 6)
    assert found.regret == pytest.approx(0) and found.regret_of_baseline == pytest.approx(0.1)
    assert found.error == pytest.approx(0, abs=2e-3) and found.error_of_no_effect == pytest.approx(0.06)
    said = holdout_statements(found, derive(runs))
    assert [head for head, _ in said] == ["Held-out test", "Predicted", "Predicted", "Prediction error", "Scores"]
    assert "confirmed" in said[0][1] and "regret" in said[-1][1]


def test_a_rule_that_turns_is_refuted():
    """LNS gains 0.1 at 12 and 16, and loses 0.05 at 24; decay hurts by 0.02 everywhere.

    Measured cells: none 3.00, decay 3.02, lns 3.05, both 3.07; predicted -.1 and +.02: 0, .02, -.1, -.08. Of six pairs
    the two inside each setting of LNS are right. The recipe (lns, 3.05) is .05 worse than the best (3.00).
    """
    found = hold_out(grid(AXES, loss({12: (-0.1, 0.02), 16: (-0.1, 0.02), 24: (0.05, 0.02)})), 24)
    assert found.changes == ("depth_scale=lns",) and found.outcome == "refuted"
    assert (found.signs_right, found.n_signs) == (1, 2)
    assert (found.decisions_right, found.n_decisions) == (2.0, 6)
    assert found.regret == pytest.approx(0.05) and found.regret_of_baseline == pytest.approx(0)
    assert found.error == pytest.approx((0.15 + 0) / 2, abs=2e-3)
    # LNS alone: the two without it tie, and so do the two with it, the other four are wrong
    assert (found.naive, found.decisions_right_by_naive) == ("depth_scale=lns", 1.0)
    assert found.error_of_naive == pytest.approx((0.15 + 0.02) / 2, abs=2e-3)
    # two settings: Wilson's of 1/3 in 9 * 3 * 2 / 22 = 2.4545: (1/3 + .7825 -+ 1.96 sqrt(.0905 + .1594)) / 2.565
    assert found.accuracy_interval == (pytest.approx(0.0531, abs=1e-3), pytest.approx(0.817, abs=1e-3))
    scores = dict(holdout_statements(found, found_recipe()))["Scores"]
    assert "for predicting no effect" in scores and "17% for depth_scale=lns alone" in scores


def test_the_held_out_runs_are_not_looked_at():
    """What is predicted does not change with them."""
    runs = grid(AXES, loss({12: (-0.1, 0.02), 16: (-0.08, 0.02), 24: (-0.1, 0.02)}))
    other = runs.copy()
    other.loc[other["n_layers"] == 24, "val_loss"] += np.arange(12) * 0.1
    one, two = hold_out(runs, 24), hold_out(other, 24)
    assert [p.candidate for p in one.predictions] == [p.candidate for p in two.predictions]
    assert one.changes == two.changes and one.error != two.error


def test_the_held_out_width_is_not_looked_at():
    """What is predicted does not change with its runs, and is scored against them alone: LNS gains 0.1, there 0.3."""
    axes = {"d_model": [64, 128, 256], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}

    def found(gain):
        gains = {64: (-0.1, 0.02), 128: (-0.1, 0.02), 256: (gain, 0.02)}
        return hold_out_scale(
            grid(axes, lambda config: loss({12: gains[config.d_model]})(config), n_layers=12), "params"
        )

    one, two = found(-0.1), found(-0.3)
    assert [p.candidate for p in one.predictions] == [p.candidate for p in two.predictions]
    measured = {p.candidate.contrast.setting: p.measured.effect.mean for p in two.predictions}
    assert measured == {"depth_scale=lns": pytest.approx(-0.3), "weight_decay=0.1": pytest.approx(0.02)}
    assert two.error == pytest.approx((0.2 + 0) / 2, abs=2e-3)


def test_only_signs_of_significant_effects_are_counted():
    """Decay costs 0.02 at 12 and 16 layers, and at 24 0.0002, a fifth of the noise."""
    found = hold_out(grid(AXES, loss({12: (-0.1, 0.02), 16: (-0.1, 0.02), 24: (-0.1, 0.0002)})), 24)
    assert (found.signs_right, found.n_signs) == (1, 1)


def test_a_recipe_that_diverges_there_is_refuted_with_no_regret():
    runs = grid(AXES, loss({12: (-0.1, 0.02), 16: (-0.1, 0.02), 24: (-0.1, 0.02)}))
    lost = (runs["n_layers"] == 24) & (runs["depth_scale"] == "lns")
    runs.loc[lost, ["outcome", "val_loss"]] = ["diverged", None]
    found = hold_out(runs, 24)
    assert (found.outcome, found.regret, found.n_configurations) == ("refuted", None, 2)


def test_it_needs_the_depth_and_two_smaller_ones():
    runs = grid(AXES, loss({12: (0, 0), 16: (0, 0), 24: (0, 0)}))
    for depth in (16, 32):
        with pytest.raises(ValueError, match=f"--holdout-depth {depth} needs finished runs there and at two smaller"):
            hold_out(runs, depth)


def found_recipe():
    return derive(grid(AXES, loss({12: (-0.1, 0.02), 16: (-0.1, 0.02), 24: (-0.1, 0.02)})))


def test_a_width_is_predicted_from_the_smaller_ones():
    """LNS gains 0.1 at widths 64 and 128, and keeps it at 256, or turns."""
    axes = {"d_model": [64, 128, 256], "depth_scale": ["none", "lns"], "weight_decay": [0.0, 0.1], "seed": [0, 1, 2]}
    for lns, outcome in ((-0.1, "confirmed"), (0.1, "refuted")):
        gains = {64: (-0.1, 0.0), 128: (-0.1, 0.0), 256: (lns, 0.0)}
        runs = grid(axes, lambda config, gains=gains: loss({12: gains[config.d_model]})(config), n_layers=12)
        found = hold_out_scale(runs, "params")
        assert (found.axis, found.held, found.fitted_on, found.depth) == ("d_model", 256, (64, 128), 12)
        assert (found.changes, found.outcome) == (("depth_scale=lns",), outcome)
        assert found.n_configurations == 4 and found.naive == "depth_scale=lns"
        said = dict(holdout_statements(found, derive(runs)))["Held-out test"]
        assert said.startswith("fitted on d_model 64, 128, which recommend depth_scale=lns at d_model=256: ")
    with pytest.raises(ValueError, match="holdout tokens needs runs of two train_tokens or more at n_layers=12"):
        hold_out_scale(runs, "tokens")
    card = derive_card(runs, holdout="params")
    assert card.held_out.depth_outcome in ("refuted", "not confirmed") and card.grade == "C"
    with pytest.raises(ValueError, match="a card has one"):
        derive_card(runs, holdout="params", holdout_depth=12)
