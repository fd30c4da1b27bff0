"""One law for a baseline and a setting: planted multipliers and drifts, and laws that do not hold."""

import numpy as np
import pytest

from sparsedepth.scaling.ladder import Ladder, ladder_of
from sparsedepth.scaling.multiplier import law_by_seeds

C_B = np.array([1.49e12, 2.98e12, 5.95e12, 1.19e13])
L_INF, LEVEL, ALPHA = 0.62, np.log(0.99), 0.46
"""L = .62 + .99 (C / middle)^-.46: about the text models of 12 layers and width 64, 2.16 to 1.21 nat/token."""
SD, TRUNK = 0.012, 0.8
"""Between seeds [nat/token], of which the branches of a trunk share this part of the variance."""


def world(ends: tuple[float, float], n_seeds: int, rng: np.random.Generator, shift: float = 0.0) -> Ladder:
    """The setting does what the baseline does with `ends` times the compute, from the smallest to the largest budget,
    evenly in logarithms. `shift`: the part of the variance that a seed has in common on both sides."""
    x_B = np.log(C_B) - np.log(C_B).mean()
    log_m_B = np.linspace(*np.log(ends), len(C_B))
    common_S = rng.standard_normal(n_seeds) * np.sqrt(shift)
    losses = {}
    for is_setting in (False, True):
        mean_B = L_INF + np.exp(LEVEL - ALPHA * (x_B + is_setting * log_m_B))
        trunk_S = rng.standard_normal(n_seeds) * np.sqrt(TRUNK * (1 - shift))
        own_BS = rng.standard_normal((len(C_B), n_seeds)) * np.sqrt((1 - TRUNK) * (1 - shift))
        loss_BS = mean_B[:, None] + SD * (common_S + trunk_S + own_BS)
        losses |= {(is_setting, C): dict(enumerate(loss_S.tolist())) for C, loss_S in zip(C_B, loss_BS, strict=True)}
    ladder = ladder_of(losses, {})
    assert ladder is not None
    return ladder


def score(ends: tuple[float, float], n_seeds: int, n_draws: int, shift: float) -> dict[str, float]:
    covered, shown, halves, drifts, misfits = [], [], [], [], []
    for number in range(n_draws):
        found = law_by_seeds(
            world(ends, n_seeds, np.random.default_rng([n_seeds, number, round(100 * ends[0])]), shift)
        )
        for C, truth in zip((C_B[0], C_B[-1]), np.log(ends), strict=True):
            lo, hi = found.found_at(C).interval
            covered.append(lo <= truth <= hi)
            shown.append(lo > 0 or hi < 0)
        halves.append((hi - lo) / 2)
        drifts.append(found.has_drift)
        misfits.append(found.is_rejected)
    figures = {"covered": covered, "shown": shown, "drift": drifts, "rejected": misfits}
    return {name: float(np.mean(of)) for name, of in figures.items()} | {"half": float(np.median(halves))}


@pytest.mark.parametrize("n_draws", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("n_seeds", [3, 5])
def test_a_multiplier_of_all_budgets(n_seeds, shift, n_draws):
    is_whole = n_draws == 300
    for multiplier in (1.0, 1.25):
        of = score((multiplier, multiplier), n_seeds, n_draws, shift)
        print(f"{multiplier} at {n_seeds} seeds, shift {shift}: {of}")
        assert of["covered"] >= (0.93 if is_whole else 0.75)
        if multiplier == 1:
            assert of["shown"] <= (22 / 300 if is_whole else 0.25)
        assert n_seeds < 5 or of["half"] <= 0.05
        assert of["drift"] <= (22 / 300 if is_whole else 0.25) and of["rejected"] <= (22 / 300 if is_whole else 0.25)


@pytest.mark.parametrize("n_draws", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n_seeds", [3, 5])
def test_a_multiplier_that_fades(n_seeds, n_draws):
    of = score((1.25, 1.0), n_seeds, n_draws, 0.0)
    print(f"fading at {n_seeds} seeds: {of}")
    if n_seeds == 5:
        assert of["drift"] >= 0.8 - (0.1 if n_draws < 300 else 0)
        assert of["covered"] >= (0.9 if n_draws == 300 else 0.7)


def exact(losses_of) -> Ladder:
    """Two seeds that differ by 1e-4, and by as little noise."""
    noise = iter(np.random.default_rng(0).normal(0, 1e-4, 100))
    cells = [(is_setting, C) for is_setting in (False, True) for C in C_B]
    found = ladder_of({cell: {seed: losses_of(*cell) + next(noise) for seed in range(4)} for cell in cells}, {})
    assert found is not None
    return found


def test_the_law_is_found():
    """1.6 + 87.65 C^-.0941: the curve of a public gate, as both sides have it at 1.13 times the compute."""
    found = law_by_seeds(exact(lambda is_setting, C: 1.6 + 87.65 * (C * (1.13 if is_setting else 1.0)) ** -0.0941))
    assert not found.is_rejected and not found.has_drift
    assert np.exp(found.found_at(C_B[0]).estimate) == pytest.approx(1.13, abs=0.01)
    L_inf, _, alpha, _ = found.fits[0].steady.theta_P
    assert alpha == pytest.approx(0.0941, abs=0.06) and L_inf == pytest.approx(1.6, abs=0.6)


def test_a_law_that_does_not_hold_gives_way_to_slopes():
    """A step between the second and the third budget, on both sides: the setting has the baseline's loss with 1.25
    times less compute, as the slopes say beside the step, too."""

    def loss(is_setting: bool, C: float) -> float:
        x = np.log(C * (1.25 if is_setting else 1.0) / 1.49e12)
        return 2.2 - 0.3 * x - 0.3 / (1 + np.exp(-8 * (x - 1.0)))

    found = law_by_seeds(exact(loss))
    assert found.is_rejected and found.p_misfit < 0.05
    last = found.found_at(C_B[-1])
    assert np.exp(last.estimate) == pytest.approx(1.25, rel=0.05) and np.ptp(last.interval) < 0.1


def test_a_bent_law_without_an_offset_has_none():
    """3 - .1 ln C is too straight for any L_inf above 0."""
    found = law_by_seeds(exact(lambda is_setting, C: 5 - 0.1 * np.log(C)))
    assert found.fits[0].steady.theta_P[0] == 0 or found.is_rejected
