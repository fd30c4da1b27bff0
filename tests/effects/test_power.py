"""What a design can detect: by hand, from a pilot worked out by hand, and as often as it says."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import stdtrit
from support.planted_worlds import World, score
from support.runs_frame import config_of, grid

from sparsedepth.cli.plan import DetectableEffects
from sparsedepth.effects import power as module
from sparsedepth.effects.power import MAX_SEEDS, PilotNoise, measure_power, pilot_noise, power_table
from sparsedepth.words.power import power_text


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(module, "DRAWS", 8)


def design(seeds, depths=(12,), cells=({}, {"n_kv_heads": 1})):
    points = itertools.product(depths, cells, range(seeds))
    return [config_of(n_layers=n, n_heads=4, **cell, seed=seed) for n, cell, seed in points]


def test_one_setting_of_many_seeds_is_the_textbook_s():
    """(t(39, .975) + t(39, .8)) sd sqrt(2 / 40)."""
    textbook = (stdtrit(39, 0.975) + stdtrit(39, 0.8)) * 0.1 * math.sqrt(2 / 40)
    (power,) = measure_power(design(40), "val_loss", PilotNoise(own=0.1))
    assert (power.setting, power.n_layers, power.n_seeds) == ("n_kv_heads=1", (12,), 40)
    assert power.detectable == pytest.approx(textbook, rel=0.1)
    more = design(40, cells=({}, {"n_kv_heads": 1}, {"beta2": 0.97}, {"weight_decay": 0.3}))
    of_three = measure_power(more, "val_loss", PilotNoise(own=0.1))[0]
    dunnett = (2.36 + stdtrit(100, 0.8)) * 0.1 * math.sqrt(2 / 40)  # Dunnett's critical value of three settings
    assert of_three.detectable == pytest.approx(dunnett, rel=0.1)


def test_depths_are_compared_with_the_shallowest():
    powers = measure_power(design(3, depths=(4, 12, 24)), "val_loss", PilotNoise(own=0.1))
    assert [(power.setting, power.n_layers) for power in powers] == [
        ("n_kv_heads=1", (4, 12, 24)),
        ("n_layers=12", (12,)),
        ("n_layers=24", (24,)),
    ]


def test_seeds_wanted_are_the_fewest_that_detect_the_effect():
    """Two (1.96 + 0.84)^2 variances over the square of the effect, 15.7 seeds, and a little for Student's t."""
    (power,) = measure_power(design(3), "val_loss", PilotNoise(own=0.1), effect=0.1)
    assert power.n_seeds_wanted in range(15, 22)
    (enough,) = measure_power(design(power.n_seeds_wanted), "val_loss", PilotNoise(own=0.1))
    assert enough.detectable is not None and 0.08 < enough.detectable <= 0.1
    (rare,) = measure_power(design(3), "val_loss", PilotNoise(own=0.1), effect=0.001)
    assert rare.n_seeds_wanted is None
    assert power_table([rare], "nat/token", 0.001).rows[0][-1] == f"over {MAX_SEEDS}"


def test_one_seed_detects_nothing_and_what_choosing_adds_counts():
    (power,) = measure_power(design(1), "val_loss", PilotNoise(own=0.1))
    assert power.detectable is None and power_table([power], "nat/token", None).rows[0][-1] == "none: too few seeds"
    added = PilotNoise(own=0.1, choice=0.1)
    untuned, tuned = (measure_power(design(40), "val_loss", added, of)[0].detectable for of in ((), ("lr",)))
    assert untuned is not None and tuned == pytest.approx(2.87 * math.sqrt(2 * (0.01 / 40 + 0.01)), rel=0.1)
    for noise, text in ((PilotNoise(own=0.1), "none assumed from choosing lr"), (added, "0.1 from choosing lr")):
        found = DetectableEffects(
            powers=[power], noise=noise, source="assumed", objective="val_loss", unit="nat/token", tuned=("lr",)
        )
        assert text in power_text(found)


def test_the_noise_of_a_pilot_by_hand():
    """Losses 1, 2 and 3, 6: less both means +-.5 is left, so a variance of 1 with one degree of freedom."""
    losses = {(4, 0): 1.0, (4, 1): 2.0, (1, 0): 3.0, (1, 1): 6.0}
    runs = grid({"n_kv_heads": [4, 1], "seed": [0, 1]}, lambda c: {"val_loss": losses[c.n_kv_heads, c.seed]}, n_heads=4)
    noise = pilot_noise(runs, "val_loss")
    assert (noise.own, noise.choice, noise.df) == (pytest.approx(1.0), 0.0, pytest.approx(1))
    with pytest.raises(ValueError, match="no setting has two finished runs"):
        pilot_noise(runs[runs["seed"] == 0], "val_loss")
    with pytest.raises(ValueError, match="must be above 0"):
        PilotNoise(own=0.0)


def test_a_tuned_pilot_of_the_baseline_alone_knows_what_choosing_lr_adds():
    """Losses at each lr are 0.1 off a parabola at random: as much is open about the value at the best one."""
    rough = dict(zip((1e-3, 2e-3, 4e-3, 8e-3, 16e-3), 0.1 * np.random.default_rng(0).standard_normal(5), strict=True))
    seeds = 0.01 * np.random.default_rng(1).standard_normal(8)

    def loss(config):
        return {"val_loss": 1 + 0.02 * math.log2(config.lr / 4e-3) ** 2 + rough[config.lr] + seeds[config.seed]}

    runs = grid({"lr": [*rough], "seed": [0, 1, 2]}, loss, n_heads=4)
    runs = runs.assign(tuned_fields="lr", tuned_by="val_loss", tuning="tuning")
    for number, noise in enumerate(([0.02, -0.02, 0.0], [-0.02, 0.0, 0.02], [0.0, 0.02, -0.02])):
        runs.loc[runs["seed"] == number, "val_loss"] += np.resize(noise, 5)
    assert 0.03 < pilot_noise(runs, "val_loss").choice < 0.3


def test_a_pilot_of_few_runs_promises_less():
    known, pilot = (
        measure_power(design(3), "val_loss", PilotNoise(own=0.1, df=df))[0].detectable for df in (None, 3.0)
    )
    assert known is not None and pilot is not None and known < pilot


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("settings", "seeds"), [(1, 3), (3, 3), (3, 6), (6, 4)])
def test_what_plan_calls_detectable_is_found_in_80_percent(settings, seeds):
    cells = ({}, {"n_kv_heads": 1}, {"beta2": 0.97}, *({"weight_decay": decay} for decay in np.arange(1, 6) / 10))
    (power, *_) = measure_power(design(seeds, cells=cells[: settings + 1]), "val_loss", PilotNoise(own=1.0))
    of = score(World(settings=settings, seeds=seeds, effect=-power.detectable), 400)
    print(f"{settings} settings, {seeds} seeds: an effect of {power.detectable:.2f} sd is found in {of.found:.3f}")
    assert 0.70 <= of.found <= 0.90
