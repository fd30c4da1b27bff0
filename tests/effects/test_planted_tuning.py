"""Tuned sweeps whose truth is known: eight configurations, a landscape over lr for each, tuning seeds that choose,
fresh seeds that are the results. Do intervals cover, is an absent effect left alone, is a planted one found?

Losses are those of a parabola in steps of lr (`bend` nat a step, squared; `right` times that beyond the best), a
roughness of each value, seeds. Slow: 300 draws of each world, whose table is docs/intervals.md's.
"""

import math

import numpy as np
import pandas as pd
import pytest

from sparsedepth.effects.contrast import noise_and_floor
from sparsedepth.effects.intervals import (
    ExtraVariance,
    Judged,
    check_shared_baselines,
    correct,
    estimate,
    moderate,
    with_extra_variances,
)
from sparsedepth.store.tuning_curve import TuningCurve, curve_shapes

WIDE = {"noisy, steep", "noisy, a cliff", "noisy, a seed moves all"}
"""Whose intervals are wider than they need be; 0.97 is wanted of the others, beside the error of 300 draws."""
STEP = math.log(2)
N_CONFIGURATIONS = 8
CLEAN = {"seed_sd": 0.03, "n_tuning": 3, "n_results": 3}
NOISY = {"seed_sd": 0.14, "n_tuning": 2, "n_results": 6}
WORLDS = {
    "clean": CLEAN,
    "clean, rough .05": {**CLEAN, "rough": 0.05},
    "clean, rough .08, five lr": {**CLEAN, "rough": 0.08, "n_values": 5},
    "clean, rough .08, five lr, six seeds": {**CLEAN, "rough": 0.08, "n_values": 5, "n_results": 6},
    "noisy": NOISY,
    "noisy, rough .05": {**NOISY, "rough": 0.05},
    "noisy, rough .1": {**NOISY, "rough": 0.1},
    "noisy, steep": {**NOISY, "bend": 0.15},
    "noisy, a cliff": {**NOISY, "bend": 0.02, "right": 8.0},
    "noisy, a seed moves all": {**NOISY, "shared": 0.2},
    "noisy, some configurations noisier": {**NOISY, "uneven": 0.7},
}


def sweep(
    rng,
    *,
    seed_sd,
    n_tuning,
    n_results,
    bend=0.05,
    rough=0.0,
    n_values=3,
    right=1.0,
    shared=0.0,
    uneven=0.0,
    effect=0.0,
):
    """The curves of the configurations, the results at the values chosen, whether those are an end, and by how much
    each chosen value lies above its curve's lowest point. The second configuration is better by `effect`."""
    curves, results, at_end, excess = [], [], [], []
    of_seed_S = shared * rng.standard_normal(n_tuning + n_results)
    for number in range(N_CONFIGURATIONS):
        away_K = np.arange(-1, n_values + 1) - (n_values - 1) / 2 - rng.uniform(-0.5, 0.5)
        true_K = bend * away_K**2 * np.where(away_K > 0, right, 1) + rough * rng.standard_normal(n_values + 2)
        sd = seed_sd * np.exp(uneven * rng.standard_normal())
        loss_KS = true_K[:, None] + of_seed_S + sd * rng.standard_normal((n_values + 2, n_tuning + n_results))
        loss_KS = loss_KS - effect * (number == 1)
        mean_K = loss_KS[:, :n_tuning].mean(axis=1)
        tried = list(range(1, n_values + 1))
        first = min(tried, key=lambda i, mean_K=mean_K: mean_K[i])
        tried = [0, *tried] if first == 1 else [*tried, n_values + 1] if first == n_values else tried
        chosen = int(mean_K[tried].argmin())
        fresh_KS = np.where(np.arange(len(tried))[:, None] == chosen, loss_KS[tried, n_tuning:], np.nan)
        values = STEP * np.array(tried, dtype=float)
        curves.append(TuningCurve(values=values, losses=loss_KS[tried, :n_tuning], chosen=chosen, fresh=fresh_KS))
        results.append(loss_KS[tried[chosen], n_tuning:])
        at_end.append(chosen in (0, len(tried) - 1))
        excess.append(true_K[tried[chosen]])
    return curves, np.array(results), at_end, np.array(excess)


def judged(curves, results, at_end):
    """Each configuration against the first, as a family; with seeds alone, too."""
    shapes = curve_shapes(curves)
    family = []
    for number in range(1, len(results)):
        by_seed = results[number] - results[0]
        noise, floor = noise_and_floor(pd.DataFrame({"value": results[number], "value_baseline": results[0]}))
        here, base = shapes[number], shapes[0]
        sides = ((here, ()), (base, ("the baseline",)))
        added = tuple(ExtraVariance(variance=s.variance, df=s.df, baseline=cells) for s, cells in sides if s.variance)
        family.append(
            Judged(
                effect=with_extra_variances(estimate(by_seed), added),
                unit="nat/token",
                by_seed=tuple(map(float, by_seed)),
                noise=noise,
                floor=floor,
                extra_variances=added,
                expected_regret=here.expected_regret - base.expected_regret,
                tuning_ambiguity="chosen with few seeds",
                tuning_flaw="an end" if at_end[number] or at_end[0] else "",
            )
        )
    return check_shared_baselines(correct(moderate(family)), [str(i) for i in range(len(family))])


def draws(n, effect=0.0, **world):
    """Shares over n sweeps: intervals that cover; sweeps with a false 'lower', of all and of those whose baseline's lr
    was chosen worst (a tenth of them); and the planted effect found."""
    covered, false, excess, better = [], [], [], []
    for draw in range(n):
        curves, results, at_end, above = sweep(np.random.default_rng(draw), effect=effect, **world)
        family = judged(curves, results, at_end)
        covered += [contrast.effect.covers(0.0) for contrast in family[bool(effect) :]]
        false.append(any(contrast.verdict == "lower" for contrast in family[bool(effect) :]))
        better.append(family[0].verdict == "lower")
        excess.append(above[0] - above[1:].mean())
    worst = np.argsort(excess)[-max(n // 10, 1) :]
    return tuple(map(float, (np.mean(covered), np.mean(false), np.array(false)[worst].mean(), np.mean(better))))


def test_a_few_draws():
    covered, false, _, better = draws(3, effect=0.3, **CLEAN)
    assert covered >= 0.8 and false <= 0.4 and better == 1.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_intervals_cover_and_nothing_is_called_lower_without_an_effect(world):
    covered, false, worst, _ = draws(300, **WORLDS[world])
    print(f"{world}: covered {covered:.3f}, false {false:.3f}, with the worst choices of a baseline {worst:.3f}")
    assert 0.93 <= covered <= (0.99 if world in WIDE else 0.98) and false <= 0.02 and worst <= 0.1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("world", "effect", "least"),
    [
        ({**CLEAN}, 0.12, 0.5),
        ({**CLEAN, "n_results": 6}, 0.12, 0.8),
        ({**CLEAN, "rough": 0.02}, 0.2, 0.75),
        ({**CLEAN, "bend": 0.005}, 0.12, 0.4),
        ({**NOISY}, 0.4, 0.45),
        ({**NOISY, "n_tuning": 6}, 0.4, 0.7),
        ({**NOISY, "bend": 0.15}, 0.4, 0.45),
    ],
    ids=str,
)
def test_effects_are_found(world, effect, least):
    covered, false, _, better = draws(300, effect, **world)
    print(f"{world}, an effect of {effect}: covered {covered:.3f}, false {false:.3f}, found {better:.3f}")
    assert better >= least and false <= 0.05
