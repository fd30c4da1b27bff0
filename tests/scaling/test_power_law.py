"""L = L_inf + A C^-alpha: the planted law, its intervals, and clusters that share what the law misses."""

import numpy as np
import pytest

from sparsedepth.scaling.power_law import fit_power_law

COMPUTE = np.repeat(np.geomspace(1e12, 1e15, 8), 3)
TRUTH = {"L_inf": 1.2, "A": 3000.0, "alpha": 0.3}


def losses(noise: float = 0.0, seed: int = 0, shared: float = 0.0) -> np.ndarray:
    """Three points of each compute; `shared`: a deviation of all three."""
    generator = np.random.default_rng(seed)
    error = noise * generator.standard_normal(24) + np.repeat(shared * generator.standard_normal(8), 3)
    return (TRUTH["L_inf"] + TRUTH["A"] * COMPUTE ** -TRUTH["alpha"]) * np.exp(error)


def test_a_planted_law_is_recovered_and_evaluated():
    law = fit_power_law(COMPUTE, losses(), n_replicates=20)
    assert {name: getattr(law, name) for name in TRUTH} == pytest.approx(TRUTH, rel=1e-4)
    assert law(COMPUTE) == pytest.approx(losses(), rel=1e-6)
    assert law.replicates == pytest.approx(np.tile([*TRUTH.values()], (20, 1)), rel=1e-3)


def test_intervals_hold_the_truth_and_are_wider_for_clusters():
    noisy = losses(0.001, shared=0.01)
    alone = fit_power_law(COMPUTE, noisy, n_replicates=60)
    whole = fit_power_law(COMPUTE, noisy, cluster=np.repeat(range(8), 3), n_replicates=60)
    for name, truth in TRUTH.items():
        for law in (alone, whole):
            assert law.intervals[name][0] < getattr(law, name) < law.intervals[name][1]
        assert whole.student_intervals[name][0] < truth < whole.student_intervals[name][1]
    narrow, wide = (np.diff(law.student_intervals["alpha"])[0] for law in (alone, whole))
    assert wide > 1.5 * narrow
    assert "seeds of one deviate" in alone.warnings[0] and "8 clusters are fewer than 20" in whole.warnings[0]


def test_what_is_no_power_law_is_said():
    flat = fit_power_law(COMPUTE, 2 * np.exp(0.01 * np.random.default_rng(3).standard_normal(24)), n_replicates=20)
    said = " ".join(flat.warnings)
    assert any(word in said for word in ("not distinguishable", "weakly constrained", "no standard error", "bound"))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_values_that_are_not_positive_are_refused(bad):
    with pytest.raises(ValueError, match="positive, finite C and loss"):
        fit_power_law(COMPUTE[:4], [3.0, 2.0, 1.0, bad])


def test_two_values_are_too_few():
    with pytest.raises(ValueError, match="C takes the two values"):
        fit_power_law([1, 1, 2, 2], [3, 3.1, 2, 2.1])
