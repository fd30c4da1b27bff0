"""What a design can detect: by hand, from a pilot worked out by hand (`test_planted_worlds` plants it)."""

import itertools
import math

import pytest
from scipy.special import stdtrit
from support.runs_frame import config_of, grid

from sparsedepth.effects import power as module
from sparsedepth.effects.intervals import ExtraVariance
from sparsedepth.effects.power import (
    MAX_SEEDS,
    Noise,
    choice_text,
    measure_power,
    pilot_noise,
    power_table,
    power_text,
    regret_of_choice,
)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(module, "VALUES", 40)


def design(seeds, depths=(12,), **axes):
    points = itertools.product(depths, *axes.values(), range(seeds))
    return [config_of(n_layers=n, **dict(zip(axes, values, strict=True)), seed=seed) for n, *values, seed in points]


def test_one_contrast_of_many_seeds_is_the_textbook_s():
    """(t(39, .975) + t(39, .8)) sd sqrt(2 / 40); with two pairs a seed and two settings tested less by sqrt(2)."""
    textbook = (stdtrit(39, 0.975) + stdtrit(39, 0.8)) * 0.1 * math.sqrt(2 / 40)
    (power,) = measure_power(design(40, n_kv_heads=[4, 1]), "val_loss", Noise(own=0.1))
    assert (power.setting, power.n_layers, power.n_pairs, power.n_seeds) == ("n_kv_heads=1", (12,), 1, 40)
    assert power.detectable == pytest.approx(textbook, rel=0.05)
    two, _ = measure_power(design(40, n_kv_heads=[4, 1], beta2=[0.95, 0.97]), "val_loss", Noise(own=0.1))
    corrected = (stdtrit(78, 1 - 0.05 / 4) + stdtrit(78, 0.8)) * 0.1 * math.sqrt(2 / 40 / 2)
    assert two.n_pairs == 2 and two.detectable == pytest.approx(corrected, rel=0.05)


def test_seeds_wanted_are_the_fewest_that_detect_the_effect():
    """Two (1.96 + 0.84)^2 variances over the square of the effect, 15.7 seeds, and a little for Student's t."""
    (power,) = measure_power(design(3, n_kv_heads=[4, 1]), "val_loss", Noise(own=0.1), effect=0.1)
    assert power.n_seeds_wanted in (17, 18, 19, 20)
    (enough,) = measure_power(design(power.n_seeds_wanted, n_kv_heads=[4, 1]), "val_loss", Noise(own=0.1))
    assert enough.detectable is not None and 0.09 < enough.detectable <= 0.1
    (rare,) = measure_power(design(3, n_kv_heads=[4, 1]), "val_loss", Noise(own=0.1), effect=0.001)
    assert rare.n_seeds_wanted is None
    assert power_table([rare], "val_loss", 0.001).rows[0][-1] == f"over {MAX_SEEDS}"


def test_one_seed_detects_nothing_and_what_choosing_adds_counts():
    runs = design(1, n_kv_heads=[4, 1])
    (power,) = measure_power(runs, "val_loss", Noise(own=0.1))
    assert power.detectable is None and power_table([power], "val_loss", None).rows[0][-1] == "none: too few seeds"
    runs = design(40, n_kv_heads=[4, 1])
    added = Noise(own=0.1, choice=ExtraVariance(variance=0.01, df=1000))
    untuned, tuned = (measure_power(runs, "val_loss", added, of)[0].detectable for of in ((), ("lr",)))
    assert untuned is not None and tuned == pytest.approx(2.8 * math.sqrt(2 * (0.01 / 40 + 0.01)), rel=0.03)
    assert "none assumed from choosing lr" in power_text(Noise(own=0.1), "assumed", "val_loss", ("lr",), None)
    assert "0.1 from choosing lr" in power_text(added, "assumed", "val_loss", ("lr",), None)


def test_what_a_choice_of_few_seeds_loses():
    """Of two values d apart the worse is taken with Phi(-d / sqrt 2), at most .17 sqrt 2 = .24 on average; best within
    a quarter to either side of the middle, here half a step, it is less. A value alone costs nothing."""
    assert regret_of_choice(1) == (0.0, 0.0)
    mean, rare = regret_of_choice(2)
    assert 0.1 < mean < 0.24 < rare < 2.4
    assert mean < regret_of_choice(3)[0] < regret_of_choice(5)[0]
    text = choice_text(Noise(own=0.14), "val_loss", {"lr": 3}, 2, 6)
    assert text.startswith("choice: choosing lr from 3 values with 2 tuning seeds may cost a configuration 0.0")
    assert "nat/token in one of 20; with 6 seeds, as many as the results have, " in text
    assert "as many" not in choice_text(Noise(own=0.14), "val_loss", {"lr": 3}, 6, 6)


def test_the_noise_of_a_pilot_by_hand():
    """Losses 1, 2 and 3, 6: within cells .5 and 4.5, so 2.5; less both means +-.5 is left, so 1 of one df."""
    losses = {(4, 0): 1.0, (4, 1): 2.0, (1, 0): 3.0, (1, 1): 6.0}
    runs = grid({"n_kv_heads": [4, 1], "seed": [0, 1]}, lambda c: {"val_loss": losses[c.n_kv_heads, c.seed]})
    noise = pilot_noise(runs, "val_loss")
    assert (noise.own, noise.shared, noise.df) == (pytest.approx(1.0), pytest.approx(math.sqrt(1.5)), 1)
    one = pilot_noise(runs[runs["n_kv_heads"] == 1], "val_loss")
    assert (one.own, one.shared, one.df) == (pytest.approx(math.sqrt(4.5)), 0.0, 1)
    with pytest.raises(ValueError, match="no configuration has two finished runs"):
        pilot_noise(runs[runs["seed"] == 0], "val_loss")
    with pytest.raises(ValueError, match="must be above 0"):
        Noise(own=0.0)


def test_a_pilot_of_few_runs_promises_less():
    runs = design(3, n_kv_heads=[4, 1], beta2=[0.95, 0.97])
    known, pilot = (measure_power(runs, "val_loss", Noise(own=0.1, df=df))[0].detectable for df in (None, 3.0))
    assert known is not None and pilot is not None and known < pilot
