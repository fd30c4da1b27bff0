"""Sweeps whose truth is known: do intervals cover it, are absent effects left alone and planted ones found?

A sweep has four depths, three seeds and six configurations that differ in one choice each (3 pairs for an effect), or
those beside two values of weight decay (6 pairs). Worlds differ in their noise alone; its standard deviation is 1 per
run. Slow: 500 draws of each, whose table is docs/intervals.md's. Always: a few draws, held to what few can tell.
"""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support.runs_frame import config_of, runs_frame

from sparsedepth.effects import cells
from sparsedepth.effects.all_effects import judge
from sparsedepth.effects.contrast import contrasts, noise_and_floor
from sparsedepth.effects.frame import effects_frame
from sparsedepth.effects.intervals import estimate
from sparsedepth.effects.knobs import depth_knob, find_knobs
from sparsedepth.effects.pairs import pairs
from sparsedepth.effects.power import Noise, measure_power
from sparsedepth.recipe.choose import derive

DEPTHS = (12, 16, 24, 32)
CHOICES = ({}, {"depth_scale": "lns"}, {"n_kv_heads": 1}, {"norm": "sandwich"}, {"init": "depth_scaled"})
SD = 0.01


def cells_of(decays, choices=CHOICES):
    crossed = [{"weight_decay": decay, **choice} for choice in choices for decay in decays]
    return [*crossed, {"weight_decay": 0.3}] if len(decays) == 1 else crossed


def frame(decays, choices=CHOICES, seeds=3):
    """The runs without their loss, and the index of depth, configuration and seed of each."""
    cells = cells_of(decays, choices)
    rows = list(itertools.product(DEPTHS, cells, range(seeds)))
    runs = runs_frame((config_of(n_layers=depth, **cell, seed=seed), {}) for depth, cell, seed in rows)
    runs["depth_number"] = [DEPTHS.index(depth) for depth, _, _ in rows]
    runs["choice_number"] = [cells.index(cell) // len(decays) for _, cell, _ in rows]
    runs["cell_number"] = [cells.index(cell) for _, cell, _ in rows]
    return runs


def noise(world, runs, generator):
    """Noise of variance 1 per run (before a world makes some runs noisier than others)."""
    depth, choice, cell, seed = (
        runs[name].to_numpy() for name in ("depth_number", "choice_number", "cell_number", "seed")
    )
    own = generator.normal(size=len(runs))
    if world == "heavy tails":
        return generator.standard_t(3, size=len(runs)) / np.sqrt(3)
    if world == "seeds shared":
        return own + 2 * generator.normal(size=9)[seed]
    if world == "noisier cells":
        return own * np.exp(0.5 * generator.normal(size=(4, 20)))[depth, cell]
    if world == "noisier depths":
        return own * np.sqrt(runs["n_layers"] / 12)
    if world == "deepest far noisier":
        return own * np.where(runs["n_layers"] == 32, 4, 1)
    if world == "seed x knob blocks":
        return np.sqrt(0.5) * (own + generator.normal(size=(4, 20, 9))[depth, choice, seed])
    if world == "seed x knob blocks over depths":
        return np.sqrt(0.5) * (own + generator.normal(size=(20, 9))[choice, seed])
    if world == "seed x depth blocks":
        return np.sqrt(0.5) * (own + generator.normal(size=(4, 9))[depth, seed])
    assert world == "plain"
    return own


def places(runs, knobs):
    """Every contrast of these knobs, with the rows of its pairs by seed, setting and baseline: [S, P] each."""
    numbered = runs.assign(val_loss=np.arange(len(runs), dtype=float))
    found = []
    for knob in knobs:
        rows = pairs(numbered, knob, "val_loss").sort_values("seed")
        for contrast in contrasts(numbered, knob, "val_loss"):
            at = (rows["setting"] == contrast.setting) & (rows["n_layers"] == (contrast.n_layers or rows["n_layers"]))
            sides = (rows.loc[at, side].to_numpy(dtype=int) for side in ("value", "value_baseline"))
            found.append((contrast, *(side.reshape(contrast.n_seeds, -1) for side in sides)))
    return found


def contrast_at(loss_N, contrast, setting_SP, baseline_SP):
    """The contrast of a draw, as `contrasts` would have it of these runs."""
    sides = {"value": loss_N[setting_SP].mean(axis=1), "value_baseline": loss_N[baseline_SP].mean(axis=1)}
    by_seed = sides["value"] - sides["value_baseline"]
    noise, floor = noise_and_floor(pd.DataFrame(sides))
    effect = replace(estimate(by_seed), n=contrast.effect.n)
    return replace(contrast, effect=effect, by_seed=tuple(map(float, by_seed)), noise=noise, floor=floor)


WORLDS = ("plain", "heavy tails", "seeds shared", "noisier cells", "noisier depths", "deepest far noisier")
WORLDS += ("seed x knob blocks", "seed x knob blocks over depths", "seed x depth blocks")


def draws(world, n, decays, effect=0.0, seed=0):
    """Shares over n sweeps: intervals that cover, sweeps with a false claim at the deepest depth, LNS found there to be
    better, and found to be worse; LNS lowers the loss by `effect` standard deviations."""
    generator = np.random.default_rng(seed)
    runs = frame(decays)
    is_lns = (runs["depth_scale"] == "lns").to_numpy()
    # seed x depth blocks are noise of depth's own effect
    planted = places(runs, [depth_knob(runs)] if world == "seed x depth blocks" else find_knobs(runs))
    covered, false, better, worse = [], [], [], []
    for _ in range(n):
        loss_N = SD * (np.asarray(noise(world, runs, generator)) - effect * is_lns)
        found = judge([contrast_at(loss_N, *place) for place in planted])
        truth = [-SD * effect * (one.setting == "depth_scale=lns") for one in found]
        covered += [one.effect.covers(at) for one, at in zip(found, truth, strict=True)]
        deepest = [(one, at) for one, at in zip(found, truth, strict=True) if one.n_layers in (None, 32)]
        false.append(any(one.verdict == "lower" and not at for one, at in deepest))
        verdicts = {one.setting: one.verdict for one, _ in deepest}
        better.append(verdicts.get("depth_scale=lns") == "lower")
        worse.append(verdicts.get("depth_scale=lns") == "higher")
    return tuple(float(np.mean(shares)) for shares in (covered, false, better, worse))


def test_a_few_draws():
    covered, false, better, worse = draws("heavy tails", 4, (0.1,), effect=6.0)
    assert covered >= 0.85 and not worse  # 80 intervals
    assert false <= 0.5 <= better


def test_the_recipe_takes_what_the_frame_calls_lower():
    runs = frame((0.1,))
    runs["val_loss"] = SD * (noise("plain", runs, np.random.default_rng(1)) - 6 * (runs["depth_scale"] == "lns"))
    rows = effects_frame(cells.cells_of(runs, "val_loss"))
    lower = rows[(rows["question"] == "setting") & (rows["n_layers"] == 32) & (rows["verdict"] == "lower")]
    recipe = derive(runs, 32)
    assert [change.contrast.setting for change in recipe.changes] == ["depth_scale=lns"]
    by = {candidate.contrast.setting: candidate.contrast.effect.mean for candidate in recipe.candidates}
    assert by["depth_scale=lns"] in [*lower["estimate"]]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("decays", [(0.1,), (0.1, 0.3)], ids=["3 pairs", "6 pairs"])
@pytest.mark.parametrize("world", WORLDS)
def test_intervals_cover_and_nothing_is_recommended_without_an_effect(world, decays):
    covered, false, _, _ = draws(world, 500, decays)
    print(f"{world}, {len(decays) * 3} pairs: covered {covered:.3f}, false recommendations {false:.3f}")
    assert 0.93 <= covered <= 0.97
    assert false <= 0.05


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("decays", "effect"), [((0.1,), 4.0), ((0.1, 0.3), 2.0)], ids=["3 pairs", "6 pairs"])
@pytest.mark.parametrize("world", ["plain", "heavy tails", "seeds shared"])
def test_effects_are_found(world, decays, effect):
    _, false, better, worse = draws(world, 500, decays, effect)
    print(f"{world}, {len(decays) * 3} pairs, {effect} sd: found {better:.3f}, wrong sign {worse:.3f}")
    assert better >= (0.5 if world != "seeds shared" else 0.0) and worse == 0.0 and false <= 0.05


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("decays", [(0.1,), (0.1, 0.3)], ids=["3 pairs", "6 pairs"])
def test_what_plan_calls_detectable_is_found_in_80_percent(decays):
    cells = itertools.product(DEPTHS, cells_of(decays), range(3))
    configs = [config_of(n_layers=depth, **cell, seed=seed) for depth, cell, seed in cells]
    powers = {power.setting: power for power in measure_power(configs, "val_loss", Noise(own=1.0))}
    effect = powers["depth_scale=lns"].detectable
    assert effect is not None and powers["depth_scale=lns"].n_layers == DEPTHS
    _, _, found, wrong = draws("plain", 400, decays, effect)
    print(f"{3 * len(decays)} pairs: an effect of {effect:.2f} sd is found in {found:.3f}")
    assert 0.74 <= found <= 0.87 and not wrong
