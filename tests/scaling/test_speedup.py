"""Compute multipliers: public numbers by hand, a planted one, and what is refused or withheld."""

import numpy as np
import pytest

from sparsedepth.scaling.power_law import PowerLaw
from sparsedepth.scaling.speedup import baseline_curve, speedup


def known(L_inf: float, alpha: float, C: float, loss: float) -> PowerLaw:
    """A curve without error through one point."""
    A = (loss - L_inf) * C**alpha
    return PowerLaw(
        L_inf=L_inf,
        A=A,
        alpha=alpha,
        intervals={},
        student_intervals={"L_inf": (L_inf, L_inf)},
        replicates=np.tile([L_inf, A, alpha], (50, 1)),
        warnings=(),
    )


def test_public_numbers():
    """A gate of a public training framework: L_inf 1.6, alpha .0941; 3.5422 -> 3.52 nat/token at 3.82e17 FLOPs, 433,986
    -> 410,000 tokens/s."""
    curve = known(1.6, 0.0941, 3.82e17, 3.5422)
    assert abs(curve.A - 87.65) < 0.01
    worth = speedup(curve, {0: 3.5422}, {0: 3.52})
    assert worth.multiplier == pytest.approx(1.130, abs=5e-4) and worth.lo is None and "one seed" in worth.reason
    pair = speedup(curve, {0: 3.5422, 1: 3.5422}, {0: 3.52, 1: 3.52})
    assert pair.times(410_000 / 433_986).multiplier == pytest.approx(1.067, abs=1e-3)


SEEDS, BUDGETS = range(6), (1e12, 2e12, 4e12, 8e12)


def planted(multiplier: float, noise: float, seed: int):
    """Losses of the baseline by budget, and at 4e12 FLOPs of a setting that does what the baseline does with
    `multiplier` times the compute; a seed shifts both."""
    draws = np.random.default_rng(seed)
    shift = {number: noise * draws.standard_normal() for number in SEEDS}

    def loss(C: float, number: int) -> float:
        return 1.0 + 3000.0 * C**-0.3 + shift[number] + 0.3 * noise * draws.standard_normal()

    curve = {C: {number: loss(C, number) for number in SEEDS} for C in BUDGETS}
    return curve, {number: loss(multiplier * 4e12, number) for number in SEEDS}


@pytest.mark.parametrize("multiplier", [1.0, 1.3])
def test_a_planted_multiplier_is_covered(multiplier):
    draws = []
    for seed in range(20):
        curve, setting = planted(multiplier, 0.002, seed)
        draws.append(speedup(baseline_curve(curve, n_replicates=40), curve[4e12], setting))
    given = [draw for draw in draws if draw.lo is not None]
    assert len(given) >= 15
    assert sum(draw.lo <= multiplier <= draw.hi for draw in given) >= 0.85 * len(given)
    assert np.median([draw.multiplier for draw in given]) == pytest.approx(multiplier, rel=0.05)


def test_fewer_than_three_budgets_and_rising_losses_are_refused():
    curve, _ = planted(1.0, 0.0, 0)
    with pytest.raises(ValueError, match=r"3 budgets or more, and it has 2; .*branch_at"):
        baseline_curve({C: curve[C] for C in BUDGETS[:2]})
    with pytest.raises(ValueError, match="does not fall with compute"):
        baseline_curve(dict(zip(BUDGETS, reversed(curve.values()), strict=True)))


def test_a_loss_below_the_floor_and_unpaired_seeds_give_nothing():
    curve = known(1.6, 0.1, 1e12, 2.0)
    below = speedup(curve, {0: 2.0, 1: 2.0}, {0: 1.5, 1: 1.55})
    assert below.multiplier is None and "L_inf 1.6 is not shown to lie below the loss 1.5" in below.reason
    assert speedup(curve, {0: 2.0}, {1: 1.9}).multiplier is None
