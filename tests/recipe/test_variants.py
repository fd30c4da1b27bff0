"""The judges of `judge`: do intervals of variants hold the truth, are equal variants left alone and better ones found?

Worlds of ten variants and one baseline, sd 1 (the baseline's times `noisier`); docs/intervals.md has the table of 300
draws (`pytest -m slow -s`). *False*: families with any wrong verdict."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel

from sparsedepth.effects.verdict import Row, judged, with_intervals
from sparsedepth.recipe.variants import variant_effects
from sparsedepth.scaling.multiplier import prior_of

UNEQUAL = (5, 2, 3, 3, 4, 5, 5, 6, 8, 10, 4)
FALSE = 22 / 300
"""What 300 draws of a rate of .05 rarely exceed."""


@dataclass(frozen=True, kw_only=True)
class Variants:
    """A family: runs of the baseline, then of each variant."""

    seeds: tuple[int, ...]
    noisier: float = 1.0
    gain: float = 0.0
    """Of the first variant."""
    shift: float = 0.0
    """Sd by which a seed moves all runs."""
    heavy: bool = False


WORLDS: dict[str, tuple[Variants, float, float]] = {
    # covered at least, found at least
    **{f"{n} seeds": (Variants(seeds=(n,) * 11), 0.93, 0.0) for n in (2, 3, 5, 10)},
    "unequal seeds": (Variants(seeds=UNEQUAL), 0.93, 0.0),
    "t3, 5 seeds": (Variants(seeds=(5,) * 11, heavy=True), 0.93, 0.0),
    "baseline 3 x noisier, 5 seeds": (Variants(seeds=(5,) * 11, noisier=3), 0.93, 0.0),
    "baseline 3 x noisier, 10 seeds": (Variants(seeds=(10,) * 11, noisier=3), 0.93, 0.0),
    "2 sd, 5 seeds": (Variants(seeds=(5,) * 11, gain=2), 0.93, 0.55),
    "2 sd, 5 seeds, a seed shifts all": (Variants(seeds=(5,) * 11, gain=2, shift=2), 0.93, 0.55),
    # sd: the root of the mean variance of both sides
    "2 sd, 5 seeds, baseline 3 x noisier": (Variants(seeds=(5,) * 11, noisier=3, gain=2 * 5**0.5), 0.93, 0.45),
}


def draw(world: Variants, rng: np.random.Generator) -> list[dict[int, float]]:
    """Seed -> loss of the baseline and of each variant."""
    shift_S = world.shift * rng.standard_normal(max(world.seeds))
    sides = []
    for side, n in enumerate(world.seeds):
        noise_S = rng.standard_t(3, n) / 3**0.5 if world.heavy else rng.standard_normal(n)
        loss_S = shift_S[:n] + noise_S * (1 if side else world.noisier) - world.gain * (side == 1)
        sides.append(dict(enumerate(loss_S.tolist())))
    return sides


def score(world: Variants, n: int, is_paired: bool, seed: int = 0) -> tuple[float, float, float]:
    """Covered, false, found."""
    covered, false, found = [], [], []
    for i in range(n):
        effects = variant_effects(draw(world, np.random.default_rng([seed, i])), is_paired)
        rows = judged([Row(fields={}, contrast=each.distribution, shared=each.shared) for each in effects])
        with_intervals(rows)
        truths = [-world.gain, *[0.0] * (len(rows) - 1)]
        right = [{"not shown", "lower"} if truth else {"not shown"} for truth in truths]
        covered += [row.fields["lo"] <= truth <= row.fields["hi"] for row, truth in zip(rows, truths, strict=True)]
        false.append(any(row.fields["verdict"] not in may for row, may in zip(rows, right, strict=True)))
        found.append(rows[0].fields["verdict"] == "lower")
    return float(np.mean(covered)), float(np.mean(false)), float(np.mean(found))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("name", WORLDS)
def test_variants_of_made_up_worlds(name, is_paired):
    world, least_covered, least_found = WORLDS[name]
    if world.shift and not is_paired:
        pytest.skip("what moves all runs of a seed is noise to runs that are not paired")
    covered, false, found = score(world, 300, is_paired)
    print(f"| {name} | {'paired' if is_paired else 'independent'} | {covered:.3f} | {false:.3f} | {found:.2f} |")
    assert covered >= least_covered and false <= FALSE and found >= least_found


@pytest.mark.parametrize("name", ["3 seeds", "2 sd, 5 seeds, a seed shifts all", "2 sd, 5 seeds, baseline 3 x noisier"])
def test_a_few_draws_of_them(name):
    """Held to what 40 draws can tell."""
    covered, false, found = score(WORLDS[name][0], 40, is_paired="shifts" in name)
    assert covered >= 0.9 and false <= 0.125 and found >= WORLDS[name][2] - 0.15


def test_two_variants_of_their_own_noise_are_compared_as_by_student_and_welch():
    rng = np.random.default_rng(0)
    base, own = (rng.normal(0, 3, 6), rng.normal(1, 1, 6))
    (effect,) = variant_effects([dict(enumerate(base)), dict(enumerate(own))], True)
    assert effect.estimate == pytest.approx((own - base).mean())
    assert effect.distribution.p == pytest.approx(ttest_rel(own, base).pvalue, rel=1e-6)
    (effect,) = variant_effects([dict(enumerate(base)), dict(enumerate(own[:4]))], False)
    assert effect.distribution.p == pytest.approx(ttest_ind(own[:4], base, equal_var=False).pvalue, rel=1e-6)


def test_gaps_are_least_squares():
    """Seeds that the baseline lacks still tell variants apart, as in the regression on cells and seeds."""
    rng = np.random.default_rng(1)
    losses = [
        dict(zip(seeds, rng.normal(0, 1, len(seeds)).tolist(), strict=True))
        for seeds in ([0, 1, 2], [0, 1, 3], [1, 2, 3])
    ]
    rows = [(cell, seed, y) for cell, side in enumerate(losses) for seed, y in side.items()]
    design = np.array([[cell == 1, cell == 2, *(seed == s for s in range(4))] for cell, seed, _ in rows], dtype=float)
    wanted = np.linalg.lstsq(design, np.array([y for *_, y in rows]))[0][:2]
    from sparsedepth.recipe.variants import _two_way

    cell_N, seed_N, y_N = (np.array(column) for column in zip(*rows, strict=True))
    effect_C, variance_C, square_C, df_C = _two_way(cell_N, seed_N, y_N, np.ones(3))
    assert effect_C[1:] == pytest.approx(wanted) and df_C.sum() == pytest.approx(9 - 3 - 4 + 1)
    assert variance_C[1:] == pytest.approx(np.diag(np.linalg.inv(design.T @ design))[:2])
    residual = np.array([y for *_, y in rows]) - design @ np.linalg.lstsq(design, np.array([y for *_, y in rows]))[0]
    assert square_C.sum() == pytest.approx(residual @ residual)


def test_the_prior_of_variances():
    """1 / sigma^2 ~ chi^2(d0) / (d0 s0^2): both are found again; equal variances have no spread."""
    rng = np.random.default_rng(2)
    sigma2 = 8 * 2.0 / rng.chisquare(8, 4000)
    df = np.full(4000, 4.0)
    d0, s02 = prior_of(sigma2 * rng.chisquare(4, 4000) / 4, df)
    assert d0 == pytest.approx(8, rel=0.15) and s02 == pytest.approx(2, rel=0.05)
    d0, s02 = prior_of(3 * rng.chisquare(4, 50) / 4, np.full(50, 4.0))
    assert d0 > 20 and s02 == pytest.approx(3, rel=0.2)


def test_a_baseline_of_one_run_has_the_noise_of_the_variants():
    rng = np.random.default_rng(3)
    losses = [{0: 0.0}, *(dict(enumerate(rng.normal(1, 0.1, 5).tolist())) for _ in range(4))]
    for effect in variant_effects(losses, False):
        assert effect.distribution is not None and effect.distribution.sd == pytest.approx(0.1 * 1.2**0.5, rel=0.3)


def test_runs_that_agree_have_no_interval():
    (effect,) = variant_effects([{0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}], False)
    assert effect.estimate == 1 and effect.distribution is None
